//! Groups of parameters.

use burn::optim::{AdamWConfig, GradientsParams, MuonConfig, Optimizer, SgdConfig};
use burn_accum::{AccumConfig, ClipNorm};
use burn_amp::{GradScaler, GradScalerConfig};
use burn_update::{AverageConfig, Group, Groups, Paths, Update, UpdateError};

use crate::support::{F32, Half, LR, Net, PATHS, adamw, bits, gradients, net};

type Model = Net<F32>;

/// A few steps with made-up gradients.
fn trained(mut update: Update<Model, F32>) -> (Model, Update<Model, F32>) {
    let mut model = net();
    for step in 0..6 {
        let made_up = gradients(&model, step, &[]);
        model = update.step(LR, model, made_up).unwrap();
    }
    (model, update)
}

fn everything() -> Paths {
    Paths::glob("*")
}

#[test]
fn one_group_of_all_parameters_is_its_optimizer() {
    let expected = bits(&trained(Update::new(adamw())).0);
    let sgd = || SgdConfig::new().init::<F32, Model>();
    let groups = Groups::new(sgd()).with("all", Group::new(everything(), adamw()));
    assert_eq!(bits(&trained(Update::of_groups(groups)).0), expected);

    // Two groups of one kind of optimizer are that optimizer, too.
    let groups = Groups::new(adamw()).with("first", Group::new(Paths::glob("first.*"), adamw()));
    assert_eq!(bits(&trained(Update::of_groups(groups)).0), expected);
}

/// Each group is what its optimizer alone makes of its parameters.
#[test]
fn each_group_has_its_optimizer_and_its_learning_rate() {
    let decaying = AdamWConfig::new().with_weight_decay(0.3);
    let no_decay = AdamWConfig::new().with_weight_decay(0.0);
    let matrices = Paths::when("matrices of the first layer", |path, shape| {
        path.starts_with("first.") && shape.len() == 2
    });
    let muon = || MuonConfig::new().init::<F32, Model>();
    let groups = Groups::new(decaying.init())
        .with(
            "no decay",
            Group::new(Paths::glob("*.bias"), no_decay.init()),
        )
        .with("muon", Group::new(matrices, muon()).with_lr_factor(0.5));
    let model = bits(&trained(Update::of_groups(groups)).0);

    // A whole training by one optimizer; Muon takes matrices only.
    let alone = |mut optimizer: Box<dyn FnMut(f64, Model, usize) -> Model>| {
        let mut model = net();
        for step in 0..6 {
            model = optimizer(LR, model, step);
        }
        bits(&model)
    };
    fn stepping(
        mut optimizer: impl Optimizer<Model, F32> + 'static,
    ) -> Box<dyn FnMut(f64, Model, usize) -> Model> {
        Box::new(move |lr, model, step| {
            let made_up = gradients(&model, step, &[]);
            optimizer.step(lr, model, made_up)
        })
    }
    let rest = alone(stepping(decaying.init()));
    let biases = alone(stepping(no_decay.init()));
    let mut by_muon = muon();
    let first = alone(Box::new(move |lr, model, step| {
        let mut made_up = gradients(&model, step, &[]);
        let mut only = GradientsParams::new();
        let id = burn::module::list_param_ids(&model)[0];
        let gradient = made_up.remove::<burn_flex::Flex, 2>(id).unwrap();
        only.register(id, gradient);
        by_muon.step(0.5 * lr, model, only)
    }));
    assert_eq!(
        model,
        [&first[0], &biases[1], &rest[2], &biases[3]].map(Clone::clone)
    );
    assert_ne!(biases[1], rest[1]);
}

/// Its gradients count neither for the norm nor for the scale, and its average stays.
#[test]
fn a_frozen_group_does_not_change() {
    let scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
    let clip = ClipNorm::new(0.1).unwrap();
    let norm = clip.norm();
    let groups = Groups::new(adamw()).with("frozen", Group::frozen(Paths::glob("first.*")));
    let mut update = Update::of_groups(groups)
        .clip(clip)
        .unwrap()
        .scale(scaler.clone())
        .unwrap()
        .average(AverageConfig::new(0.5))
        .unwrap();
    let start = net::<F32>();
    let mut model = start.clone();
    for step in 0..3 {
        // Not finite, in a frozen parameter.
        let made_up = gradients(&model, step, &[0]);
        model = update.step(LR, model, made_up).unwrap();
    }
    assert_eq!(scaler.skipped_steps(), 0);
    assert!(norm.last().unwrap().is_finite());
    for net in [bits(&model), bits(&update.averaged(&model).unwrap())] {
        assert_eq!(net[..2], bits(&start)[..2]);
        assert_ne!(net[2], bits(&start)[2]);
        assert_ne!(net[3], bits(&start)[3]);
    }
}

#[test]
fn groups_train_in_windows_under_autocast() {
    let groups = Groups::new(adamw::<Half>()).with(
        "biases",
        Group::new(Paths::glob("*.bias"), adamw()).with_lr_factor(0.5),
    );
    let mut update = Update::of_groups(groups)
        .accumulate(AccumConfig::mean(2))
        .unwrap()
        .scale(GradScalerConfig::default())
        .unwrap();
    let mut model = net::<Half>();
    let before = model.loss(0, 8).into_scalar().to_f32();
    for step in 0..60 {
        let gradients = update.backward(&model, model.loss(step % 8, step % 8 + 2));
        model = update.step(LR, model, gradients).unwrap();
    }
    let after = model.loss(0, 8).into_scalar().to_f32();
    assert!(
        update.updates() > 20 && after < 0.8 * before,
        "{before} to {after}"
    );
}

trait ToF32 {
    fn to_f32(self) -> f32;
}

impl ToF32 for f32 {
    fn to_f32(self) -> f32 {
        self
    }
}

fn error_of(groups: Groups<Model, F32>) -> UpdateError {
    let model = net();
    let gradients = gradients(&model, 0, &[]);
    let mut update = Update::of_groups(groups);
    update.step(LR, model, gradients).unwrap_err()
}

#[test]
fn a_pattern_that_matches_nothing_is_named() {
    let paths = Paths::glob("*.bias").or_glob("head.*");
    let error = error_of(Groups::new(adamw()).with("no decay", Group::frozen(paths)));
    let UpdateError::NoParameter {
        group,
        paths,
        parameters,
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!(
        (group.as_str(), paths.as_str()),
        ("no decay", "the pattern `head.*`")
    );
    assert_eq!(parameters, &PATHS);
    assert!(error.to_string().contains("first.weight"), "{error}");
}

#[test]
fn a_parameter_of_two_groups_is_named() {
    let groups = Groups::new(adamw())
        .with("biases", Group::new(Paths::glob("*.bias"), adamw()))
        .with("second", Group::frozen(Paths::glob("second.*")));
    let error = error_of(groups);
    let UpdateError::TwoGroups {
        parameter,
        first,
        second,
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!(
        [parameter, first, second],
        ["second.bias", "biases", "second"]
    );

    let twice = Groups::new(adamw())
        .with("biases", Group::frozen(Paths::glob("first.bias")))
        .with("biases", Group::frozen(Paths::glob("second.bias")));
    assert!(matches!(error_of(twice), UpdateError::SameName { name } if name == "biases"));
}

#[test]
fn another_model_is_refused() {
    let groups = Groups::new(adamw()).with("all", Group::new(everything(), adamw()));
    let (_, mut update) = trained(Update::of_groups(groups));
    let other = net();
    let gradients = gradients(&other, 0, &[]);
    let error = update.step(LR, other, gradients).unwrap_err();
    assert!(matches!(error, UpdateError::OtherModel { .. }), "{error}");
}
