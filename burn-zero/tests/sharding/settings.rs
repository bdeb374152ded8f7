//! Ranks that do not do the same are told so, with both sides, before it does harm.

use std::sync::Arc;

use burn::grad_clipping::GradientClippingConfig;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams, Optimizer, SgdConfig};
use burn_update::UpdateError;
use burn_zero::{
    GroupFault, GroupOptions, ParameterShards, ProcessGroup, RanksError, ShardingFault, Stage,
    ThreadGroup, ZeroSettings,
};

use super::optimizers::Grows;
use super::support::*;

const ITERATIONS: usize = 6;
/// Where a rank differs.
const AT: usize = 3;

/// What a loop does in an iteration: whether it takes part, and with which learning rate.
type Iteration = fn(usize, usize) -> Option<f64>;

/// Runs a loop of one's own on two ranks.
fn run(stage: Stage, iteration: Iteration) -> Result<Vec<Vec<Vec<f32>>>, UpdateError> {
    let weights = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
        let rank = group.rank();
        let group: Arc<dyn ProcessGroup> = Arc::new(group);
        let adam = AdamWConfig::new().init();
        let mut update = over_ranks(adam, group, small_buckets(stage))?;
        let mut model = update.prepare(Net::<B>::new(&Default::default()))?;
        for step in 0..ITERATIONS {
            let Some(lr) = iteration(step, rank) else {
                continue; // an empty batch, say
            };
            let loss = model.loss(batch(step, rank, 2));
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = Optimizer::step(&mut update, lr, model, gradients);
        }
        Ok(parameters(&model))
    });
    weights?.into_iter().collect()
}

/// Steps panic with their errors: the first comes here.
fn told(stage: Stage, iteration: Iteration) -> String {
    match run(stage, iteration) {
        Err(UpdateError::Ranks(RanksError::Group(GroupFault::PeerPanicked {
            message, ..
        }))) => message,
        other => panic!("{stage:?}: {other:?}"),
    }
}

#[test]
fn a_learning_rate_that_differs_stops_the_step() {
    for stage in STAGES {
        let message = told(stage, |step, rank| {
            Some(if step == AT && rank == 1 { 0.1 } else { 0.05 })
        });
        // No weight was changed by it: it is found before any parameter is gathered.
        let sides = ["step 4, lr 0.05 (", "step 4, lr 0.1 ("];
        assert!(
            message.contains("ranks differ: rank ") && sides.iter().all(|s| message.contains(s)),
            "{stage:?}: {message}"
        );
    }
}

#[test]
fn so_does_the_last_bit_of_it() {
    let message = told(Stage::Gradients, |_, rank| {
        Some(if rank == 1 { 0.05_f64.next_up() } else { 0.05 })
    });
    assert!(
        message.contains("lr 0.05 (") && message.contains("lr 0.05000000000000001 ("),
        "{message}"
    );
}

/// A rank that leaves out an iteration altogether makes as many calls as the others until the end.
#[test]
fn a_rank_that_leaves_out_an_iteration_is_told_by_its_schedule() {
    for stage in STAGES {
        let message = told(stage, |step, rank| {
            (step != AT || rank != 1).then(|| 0.1 / (1 + step) as f64)
        });
        assert!(
            message.contains("step 4, lr 0.025 (") && message.contains("step 4, lr 0.02 ("),
            "{stage:?}: {message}"
        );
    }
}

/// Where that does not change it has trained on with its next batch, on the same weights as all: no
/// garbage, and at the end too few steps.
#[test]
fn or_at_the_end_which_says_after_which_step() {
    for stage in STAGES {
        let message = match run(stage, |step, rank| {
            (step != AT || rank != 1).then_some(0.05)
        }) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{stage:?}: it was not found"),
        };
        let at = match stage {
            Stage::Gradients => "after step 5 (",
            _ => "step 6, lr 0.05 (",
        };
        assert!(
            message.contains("rank 1 left after") && message.contains(at),
            "{stage:?}: {message}"
        );
    }
}

/// What each of two ranks gets from `prepare`.
fn prepared<O: Optimizer<ParameterShards<B>, B> + 'static>(
    optimizer: impl Fn(usize) -> O + Sync,
) -> [Result<(), UpdateError>; 2] {
    let results = on_each_rank(2, |group| {
        let own = optimizer(group.rank());
        let mut update = over_ranks(own, group, ZeroSettings::stage(Stage::OptimizerState))?;
        update.prepare(Net::<B>::new(&Default::default())).map(drop)
    });
    results.try_into().expect("two ranks")
}

fn assert_told<O: Optimizer<ParameterShards<B>, B> + 'static>(
    what: &str,
    optimizer: impl Fn(usize) -> O + Sync,
) {
    for (own, result) in prepared(optimizer).into_iter().enumerate() {
        let Err(UpdateError::Ranks(RanksError::Disagreement {
            label, rank, peer, ..
        })) = &result
        else {
            panic!("{what}: {result:?}")
        };
        assert_eq!((*rank, *peer), (own, 1 - own), "{what}");
        assert!(
            label.starts_with("settings of the optimizer"),
            "{what}: {label}"
        );
    }
}

#[test]
fn settings_of_the_optimizer_that_differ_are_refused() {
    let adamw = AdamWConfig::new;
    for (what, other) in [
        ("beta_1", adamw().with_beta_1(0.91)),
        ("beta_2", adamw().with_beta_2(0.9991)),
        ("epsilon", adamw().with_epsilon(2e-8)),
        ("weight decay", adamw().with_weight_decay(1.2e-4)),
        (
            "clipping by value",
            adamw().with_grad_clipping(Some(GradientClippingConfig::Value(3.0))),
        ),
    ] {
        assert_told(what, |rank| [adamw(), other.clone()][rank].init());
    }
    let sgd = |momentum: f64| {
        let momentum = MomentumConfig::new().with_momentum(momentum);
        SgdConfig::new().with_momentum(Some(momentum)).init()
    };
    assert_told("momentum", |rank| sgd([0.9, 0.91][rank]));
    let adam = |decay: Option<f32>| {
        let decay = decay.map(WeightDecayConfig::new);
        AdamConfig::new().with_weight_decay(decay).init()
    };
    assert_told("L2 decay", |rank| adam([None, Some(1e-2)][rank]));
    assert!(prepared(|_| adam(None)).iter().all(Result::is_ok));
}

#[test]
fn an_optimizer_that_only_one_rank_refuses_is_named_on_all() {
    let sgd = |clipping| {
        let config = SgdConfig::new().with_gradient_clipping(clipping);
        config.init()
    };
    let norm = Some(GradientClippingConfig::Norm(1.0));
    let [zero, one] = prepared(|rank| sgd([None, norm.clone()][rank].clone()));
    let refused = one.as_ref().err().and_then(refused_by_reduction);
    assert!(
        matches!(refused, Some(ShardingFault::NotShardable { .. })),
        "{one:?}"
    );
    let text = zero.unwrap_err().to_string();
    assert!(
        text.contains("rank 1 has `an optimizer that cannot be sharded`"),
        "{text}"
    );
}

/// Results that differ slightly, each within the tolerance of the next rank's: all ranks return the
/// same verdict.
#[test]
fn ranks_agree_on_whether_they_agree() {
    let refused = |bits: [f32; 3]| {
        on_each_rank(3, |group| {
            let own = OptimizerAdaptor::from(Grows(bits[group.rank()]));
            let mut update = over_ranks(own, group, ZeroSettings::default()).unwrap();
            let model = Net::<B>::new(&Default::default());
            update.prepare(model).is_err()
        })
    };
    assert_eq!(refused([0.0, 2.0, 2.0]), [false; 3]);
    assert_eq!(refused([0.0, 2.0, 4.0]), [true; 3]);
}
