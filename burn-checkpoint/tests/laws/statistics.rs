//! Running statistics are updated once a step, by what the first run of each operation gave.

use burn::backend::Autodiff;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn_checkpoint::{MemoryBudget, Remat, RematStats};
use burn_flex::Flex;

use crate::apart::InstallApart;
use crate::models::{Around, Bare, Cnn, generator, model, step_of};
use crate::scopes::{Scope, policies};
use crate::verified::{Verified, recorded};

type Plain = Autodiff<Verified<Flex>>;
type Managed = Autodiff<Remat<Verified<Flex>>>;

/// The bits of a batch norm's running mean and variance after so many steps.
///
/// What a visitor of the module sees of them is a step behind: the update of a step is taken over
/// by the next one that asks.
fn statistics<B: AutodiffBackend>(steps: usize, around: &impl Around) -> [Vec<u8>; 2] {
    let model = model::<B, Cnn<B>>();
    for _ in 0..steps {
        step_of::<B, Cnn<B>>(&model, around);
    }
    let bits = |vector: Tensor<B, 1>| vector.into_data().bytes.to_vec();
    let norm = &model.norm;
    [
        norm.running_mean.value_sync(),
        norm.running_var.value_sync(),
    ]
    .map(bits)
}

#[test]
fn running_statistics_are_those_without_scopes_and_budgets() {
    let _generator = generator();
    let (plain, run) = recorded(|| statistics::<Plain>(3, &Bare));
    for steps in [0, 1, 2] {
        let fewer = statistics::<Plain>(steps, &Bare);
        assert!(plain[0] != fewer[0] && plain[1] != fewer[1], "{steps}");
    }
    for bytes in [None, Some(4_000), Some(20_000)] {
        let _budget = bytes.map(|bytes| MemoryBudget::bytes(bytes).install_apart());
        RematStats::reset_thread();
        let found = run.verify(|| statistics::<Managed>(3, &Bare));
        assert!(plain == found, "{bytes:?}");
        let evicted = RematStats::of_thread().evicted_operations;
        assert_eq!(evicted > 0, bytes.is_some(), "{bytes:?}: {evicted}");
        for policy in policies() {
            let found = run.verify(|| statistics::<Managed>(3, &Scope(policy.clone())));
            assert!(plain == found, "{policy:?}, {bytes:?}");
        }
    }
}
