//! A program that forgot the patch, or whose patch cargo dropped, is told at its first call.

use burn_decorated::{AmpConfig, GradScaler, GradScalerConfig, MemoryBudget, ScaledOptimizer};

#[track_caller]
fn is_told(call: impl FnOnce() + std::panic::UnwindSafe) {
    let panic = std::panic::catch_unwind(call).expect_err("the call goes on without the patch");
    let message = panic
        .downcast_ref::<&str>()
        .expect("a message without values");
    for part in [
        "[patch.crates-io]",
        "was not used in the crate graph",
        "cargo update",
    ] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn every_first_call_panics_and_says_what_to_do() {
    assert!(!burn_decorated::is_on());
    is_told(|| burn_decorated::checkpoint(|| ()));
    is_told(|| burn_decorated::evict(()));
    is_told(|| drop(MemoryBudget::bytes(1 << 20).install()));
    is_told(|| drop(AmpConfig::bf16().install()));
    is_told(|| burn_decorated::autocast::<burn_decorated::Bf16, _>(|| ()));
    is_told(|| {
        let scaler = GradScaler::new(&GradScalerConfig::default()).expect("the defaults are valid");
        drop(ScaledOptimizer::new(
            burn::optim::AdamWConfig::new().build(),
            scaler,
        ));
    });
}
