//! What the strategy does not train with, it says before the first step.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::{
    lr_scheduler::constant::ConstantLr,
    optim::{AdamWConfig, Optimizer, SgdConfig},
};
use burn_accum::{
    AccumConfig, AccumulatingStrategy, ClipGlobalNorm, MultiSteps, NonFinite, UpdateCounter,
};
use burn_amp::GradScaler;

use crate::{
    learner::{B, Setup, train},
    model::{Model, rows},
};

fn run(
    optimizer: impl Optimizer<Model<B>, B> + 'static,
    updates: &UpdateCounter,
    burns_accumulation: Option<usize>,
) -> Result<(), String> {
    let strategy = AccumulatingStrategy::new(updates);
    let mut setup = Setup::new(rows(0, 8), 1);
    setup.burns_accumulation = burns_accumulation;
    let trained = catch_unwind(AssertUnwindSafe(|| {
        let scheduler = ConstantLr::new(0.1);
        train(
            Model::new(),
            optimizer,
            scheduler,
            setup,
            Some(strategy.into()),
        )
    }));
    let message = |panic: Box<dyn std::any::Any + Send>| *panic.downcast::<String>().unwrap();
    trained.map(drop).map_err(message)
}

fn windows<O>(inner: O) -> (MultiSteps<O>, UpdateCounter) {
    let windows = MultiSteps::new(inner, AccumConfig::mean(2)).unwrap();
    let counter = windows.updates();
    (windows, counter)
}

#[test]
fn an_optimizer_without_windows_or_with_another_counter() {
    let _turn = crate::turn();
    let adamw = || AdamWConfig::new().init::<B, Model<B>>();
    let (optimizer, counter) = windows(adamw());
    for refused in [
        run(adamw(), &counter, None),
        run(GradScaler::default().wrap(adamw()), &counter, None),
        run(optimizer, &UpdateCounter::default(), None),
    ] {
        let message = refused.unwrap_err();
        assert!(message.contains("wrap the optimizer"), "{message}");
        assert!(message.contains("AdamW"), "{message}");
    }
    assert_eq!(counter.micro_batches(), 0);
}

#[test]
fn a_second_accumulation() {
    let _turn = crate::turn();
    let (optimizer, counter) = windows(SgdConfig::new().init::<B, Model<B>>());
    let message = run(optimizer, &counter, Some(3)).unwrap_err();
    assert!(message.contains("grads_accumulation(3)"), "{message}");
    assert_eq!(counter.micro_batches(), 0);
}

/// Wherever it is, the strategy finds it.
#[test]
fn any_layers_around_and_inside() {
    let _turn = crate::turn();
    let sgd = || SgdConfig::new().init::<B, Model<B>>();
    let (plain, counter) = windows(sgd());
    run(plain, &counter, None).unwrap();
    let (clipped, counter) = windows(ClipGlobalNorm::new(sgd(), 1.0).unwrap());
    run(GradScaler::default().wrap(clipped), &counter, None).unwrap();
    let (scaled, counter) = windows(GradScaler::default().wrap(sgd()));
    let scaled = scaled.with_non_finite(NonFinite::Propagate);
    run(ClipGlobalNorm::new(scaled, 1.0).unwrap(), &counter, None).unwrap();
    assert_eq!(counter.updates(), 1);
}
