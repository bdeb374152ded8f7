//! What the strategy does not train with, it says before the first step.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::{
    lr_scheduler::constant::ConstantLr,
    optim::{AdamWConfig, Optimizer, SgdConfig},
};
use burn_accum::{AccumConfig, Accumulation, ClipByNorm};
use burn_amp::GradScaler;
use burn_update::Update;

use crate::{
    learner::{B, Setup, train},
    model::{Model, rows},
    windows::{Windows, in_windows},
};

type Trained = Update<Model<B>, B>;

/// Trains with the strategy of `update`.
fn run(
    optimizer: impl Optimizer<Model<B>, B> + 'static,
    update: &Trained,
    burns_accumulation: Option<usize>,
) -> Result<(), String> {
    let strategy = update.strategy();
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

fn windows(inner: impl Optimizer<Model<B>, B> + 'static) -> Windows<B> {
    in_windows(inner, AccumConfig::mean(2))
}

#[test]
fn an_optimizer_without_windows_or_with_another_counter() {
    let _turn = crate::turn();
    let adamw = || AdamWConfig::new().init::<B, Model<B>>();
    let Windows { update, counter } = windows(adamw());
    let alone = run(adamw(), &update, None).unwrap_err();
    assert!(alone.contains("AdamW"), "{alone}");
    let other = run(windows(adamw()).update, &update, None).unwrap_err();
    for message in [alone, other] {
        assert!(message.contains("made by another update"), "{message}");
    }
    assert_eq!(counter.micro_batches(), 0);
}

#[test]
fn a_second_accumulation() {
    let _turn = crate::turn();
    let Windows { update, counter } = windows(SgdConfig::new().init::<B, Model<B>>());
    let message = run(update.clone(), &update, Some(3)).unwrap_err();
    assert!(message.contains("grads_accumulation(3)"), "{message}");
    assert_eq!(counter.micro_batches(), 0);
}

/// Whatever other parts the update has.
#[test]
fn any_layers_around_and_inside() {
    let _turn = crate::turn();
    let sgd = || Update::new(SgdConfig::new().init::<B, Model<B>>());
    let plain = sgd().accumulate(AccumConfig::mean(2)).unwrap();
    run(plain.clone(), &plain, None).unwrap();
    let windows = Accumulation::new(AccumConfig::mean(2)).unwrap();
    let counter = windows.updates();
    let clipped = sgd().clip_norm(1.0).unwrap().accumulate(windows).unwrap();
    let scaled = clipped.scale(GradScaler::default()).unwrap();
    run(scaled.clone(), &scaled, None).unwrap();
    assert_eq!(counter.updates(), 1);
}
