//! A training in two ways, and that they are the same: for strategies that promise Burn's, here and
//! in burn-zero.

use std::sync::LazyLock;

use burn::tensor::backend::Backend;
use burn_flex::{Flex, FlexDevice};

use crate::{
    learner::{B, Outcome, Setup},
    model::{Model, bits, rows},
};

pub const EPOCHS: usize = 3;

/// With dropout, and parameters of the same ids that are not initialised yet.
pub fn seeded() -> Model<B> {
    static MODEL: LazyLock<Model<B>> = LazyLock::new(|| Model::lazy(0.3, &FlexDevice));
    let model = MODEL.clone();
    Flex::seed(&FlexDevice, 7);
    model
}

pub fn setup() -> Setup {
    let mut setup = Setup::new(rows(0, 22), EPOCHS);
    setup.shuffle = Some(3);
    setup
}

/// Everything that was shown, logged, learned and recorded.
pub fn assert_same(ours: &Outcome<B>, burns: &Outcome<B>, epochs: usize) {
    assert_eq!(ours.watch.lines(), burns.watch.lines());
    assert_eq!(bits(&ours.model), bits(&burns.model));
    for epoch in 1..=epochs {
        assert_eq!(
            ours.directory.records(epoch),
            burns.directory.records(epoch)
        );
    }
    assert!(!ours.directory.is_recorded(epochs + 1));
    assert!(!burns.directory.is_recorded(epochs + 1));
}
