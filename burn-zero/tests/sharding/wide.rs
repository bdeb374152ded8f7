//! A model of many small parameters: each rank's thread has a stack for it.

#[path = "../support/wide.rs"]
mod model;

use burn::optim::AdamWConfig;
use burn::prelude::*;

use super::support::*;
use model::{WIDTH, Wide};

#[test]
fn ranks_train_a_model_of_57_kib_by_value() {
    assert!(size_of::<Wide<B>>() >= 57 << 10, "{}", size_of::<Wide<B>>());
    for stage in WITH_PARAMETERS {
        let trained = on_ranks(2, |group| {
            let rank = group.rank();
            let settings = small_buckets(stage);
            let mut optimizer = over_ranks(AdamWConfig::new().init(), group, settings)?;
            let device = Default::default();
            let mut model = optimizer.prepare(Wide::<B>::new(&device))?;
            let before = parameters(&model);
            for _ in 0..2 {
                let x = Tensor::full([1, 2, WIDTH], 1.0 + rank as f32, &device);
                let gradients = optimizer.backward(&model, model.loss(x));
                model = optimizer.step(0.05, model, gradients)?;
            }
            let after = parameters(&model);
            assert!(before.iter().zip(&after).all(|(a, b)| a != b));
            Ok(after)
        });
        assert!(trained.iter().flatten().all(|value| value.is_finite()));
    }
}
