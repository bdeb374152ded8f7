//! What holds whatever the numbers are.

use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::nn::loss::{CrossEntropyLossConfig, Reduction};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, IntDType, Tensor};
use burn_amp::{Autocast, Bf16, Off};
use burn_checkpoint::trace::{self, EventKind, Traced};
use burn_checkpoint::{MemoryBudget, Policy, RematStats, apart, checkpoint, checkpoint_with};
use burn_fused::{
    Chunk, LinearCrossEntropyLossConfig, OutOfRange, TargetOutOfRange, Targets,
    linear_cross_entropy,
};

use super::*;

/// Nothing divides by another; more than a third as many rows as columns, so that [`Chunk::Auto`]
/// computes gradients too.
const SHAPE: [usize; 3] = [29, 24, 101];
const ROUNDING: f64 = 2e-6;

fn targets<B: Backend>() -> Tensor<B, 1, Int> {
    classes_of(SHAPE[0], SHAPE[2])
}

fn full<B: Backend>(
    hidden: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
) -> Tensor<B, 1> {
    let loss = CrossEntropyLossConfig::new().init(&hidden.device());
    loss.forward(hidden.matmul(weight), targets)
}

#[test]
fn is_burns_loss_over_full_logits() {
    let leaves = Leaves::<Plain>::new(SHAPE, false);
    let expected = full(leaves.hidden.clone(), leaves.weight.clone(), targets());
    let expected = leaves.differentiate(expected);
    for chunk in [Chunk::Auto, Chunk::Rows(1), Chunk::Rows(8), Chunk::Rows(29)] {
        let config = LinearCrossEntropyLossConfig::new().with_chunk(chunk);
        let found = leaves.differentiate(leaves.chunked(targets(), &config).loss);
        let distance = found.distance(&expected);
        assert!(distance < ROUNDING, "{chunk:?}: {distance}");
    }
}

/// Hidden states and weight are functions of the same leaf, the loss is part of another, and its
/// share is not 1.
#[test]
fn a_tied_weight_gets_both_gradients() {
    fn loss<B: AutodiffBackend>(
        embedding: &Tensor<B, 2>,
        loss: impl Fn(Tensor<B, 2>, Tensor<B, 2>) -> Tensor<B, 1>,
    ) -> Vec<f64> {
        let tokens = targets().flip([0]);
        let hidden = embedding.clone().select(0, tokens).tanh().mul_scalar(3.0);
        let loss = loss(hidden, embedding.clone().transpose());
        let loss = loss.mul_scalar(-7.5) + embedding.clone().square().mean();
        values(embedding.grad(&loss.backward()).expect("it is used"))
    }
    let [_, width, classes] = SHAPE;
    let embedding = numbers::<Plain, 2>([classes, width], 5).require_grad();
    let expected = loss(&embedding, |hidden, weight| full(hidden, weight, targets()));
    let found = loss(&embedding, |hidden, weight| {
        in_chunks_of(8)
            .init()
            .forward(hidden, weight, None, targets())
    });
    let distance = distance(&found, &expected);
    assert!(distance < ROUNDING, "{distance}");
}

#[test]
fn without_autodiff_it_is_the_same_loss() {
    let leaves = Leaves::<Autocast<Managed, Bf16>>::new(SHAPE, true);
    let config = in_chunks_of(8).with_z_loss(0.1).with_smoothing(0.1);
    let trained = leaves.chunked(targets(), &config);
    let bias = leaves.bias.map(Tensor::inner);
    let valid = config.init().forward(
        leaves.hidden.inner(),
        leaves.weight.inner(),
        bias,
        targets(),
    );
    assert_eq!(values(valid), values(trained.loss));
}

#[test]
fn nothing_that_counts_is_zero() {
    for reduction in [Reduction::Mean, Reduction::Sum, Reduction::BatchMean] {
        for chunk in [Chunk::Rows(8), Chunk::Auto] {
            // Auto leaves so few rows to autodiff.
            let leaves = Leaves::<Plain>::new([5, 24, 101], true);
            let config = LinearCrossEntropyLossConfig::new()
                .with_chunk(chunk)
                .with_ignore_index(Some(7))
                .with_smoothing(0.1)
                .with_z_loss(0.1)
                .with_reduction(reduction.clone());
            let targets = Tensor::<Plain, 1, Int>::full([5], 7, &Default::default());
            let output = leaves.chunked(targets, &config);
            assert_eq!(values(output.items), [0.0]);
            let found = leaves.differentiate(output.loss);
            assert_eq!(found.loss, 0.0);
            for gradient in found.gradients {
                assert!(gradient.expect("there").into_iter().all(|x| x == 0.0));
            }
        }
    }
}

/// Neither the hidden states nor the weights of items that are ignored are looked at.
#[test]
fn an_ignored_row_does_not_count() {
    let config = in_chunks_of(4).with_ignore_index(Some(-1)).with_z_loss(0.1);
    let leaves = Leaves::<Plain>::new([12, 24, 101], true);
    let classes = classes_of::<Plain>(12, 101);
    let ignored = Tensor::<Plain, 1, Int>::arange(0..12, &Default::default()).greater_equal_elem(9);
    let weights = numbers([12], 6).add_scalar(1.0);
    let hidden = leaves.hidden.clone();
    let part = Leaves {
        hidden: hidden.narrow(0, 0, 9),
        ..leaves.clone()
    };
    let expected = Targets::weighted(
        classes.clone().narrow(0, 0, 9),
        weights.clone().narrow(0, 0, 9),
    );
    let expected = part.chunked(expected, &config);
    let found = leaves.chunked(
        Targets::weighted(
            classes.mask_fill(ignored.clone(), -1),
            weights.mask_fill(ignored, f32::NAN),
        ),
        &config,
    );
    assert!(distance(&values(found.items), &values(expected.items)) < ROUNDING);
    let (found, expected) = (
        leaves.differentiate(found.loss),
        leaves.differentiate(expected.loss),
    );
    let distance = found.distance(&expected);
    assert!(distance < ROUNDING, "{distance}");
}

/// Also of types that hold neither the number of classes nor `ignore_index`.
#[test]
fn targets_are_integers_of_any_type() {
    let config = in_chunks_of(4).with_ignore_index(Some(-100));
    let leaves = Leaves::<Plain>::new([12, 24, 256], true);
    let classes = classes_of::<Plain>(12, 256);
    let expected = leaves.chunked(classes.clone(), &config).items;
    let expected = values(expected);
    for dtype in [IntDType::U8, IntDType::I16, IntDType::U32, IntDType::U64] {
        let found = leaves.chunked(classes.clone().cast(dtype), &config);
        assert_eq!(values(found.items), expected, "{dtype:?}");
    }
}

#[test]
fn a_target_that_is_no_class_is_named() {
    let leaves = Leaves::<Plain>::new(SHAPE, false);
    for (wrong, config) in [
        (101, in_chunks_of(8)),
        (-1, in_chunks_of(8)),
        (-100, in_chunks_of(8).with_ignore_index(Some(-1))),
    ] {
        let device = Default::default();
        let wrong_at = |row: i64| {
            let rows = Tensor::<Plain, 1, Int>::arange(0..29, &device);
            targets().mask_fill(rows.equal_elem(row), wrong)
        };
        let attempt = |config: &LinearCrossEntropyLossConfig| {
            linear_cross_entropy(
                leaves.hidden.clone(),
                leaves.weight.clone(),
                None,
                wrong_at(17),
                config,
            )
        };
        let error = attempt(&config).expect_err("it is no class");
        let expected = TargetOutOfRange {
            row: 17,
            target: wrong,
            classes: 101,
        };
        assert_eq!(error, expected);
        let message =
            format!("target {wrong} of row 17 is out of range: there are 101 classes, from 0 on");
        assert_eq!(error.to_string(), message);

        let unread = attempt(&config.with_out_of_range(OutOfRange::Nan)).expect("nothing is read");
        let found = leaves.differentiate(unread.loss);
        assert!(found.loss.is_nan());
        assert!(
            found.gradients[1]
                .as_ref()
                .expect("there")
                .iter()
                .all(|x| x.is_nan())
        );
    }
}

#[test]
#[should_panic = "target 101 of row 0 is out of range"]
fn the_module_panics_as_burns_do() {
    let leaves = Leaves::<Plain>::new([1, 24, 101], false);
    let targets = Tensor::<Plain, 1, Int>::from_data([101], &Default::default());
    LinearCrossEntropyLossConfig::new()
        .init()
        .forward(leaves.hidden, leaves.weight, None, targets);
}

/// Events of the operations that begin with a name.
fn count(events: &[trace::Event], counts: impl Fn(&EventKind) -> bool) -> usize {
    events.iter().filter(|event| counts(&event.kind)).count()
}

/// Scopes of every policy, nested ones, and a budget that holds next to nothing: the same bits, and
/// the products run once.
#[test]
fn scopes_and_budgets_change_nothing_and_compute_nothing_again() {
    let config = in_chunks_of(8).with_smoothing(0.1);
    let leaves = Leaves::<Managed>::new(SHAPE, true);
    let leaves = || leaves.clone();
    let loss = |leaves: &Leaves<Managed>| {
        // What the loss is computed from has to come back itself.
        let hidden = leaves.hidden.clone().tanh();
        let leaves = Leaves {
            hidden,
            ..leaves.clone()
        };
        leaves.chunked(targets(), &config).loss
    };
    let expected = leaves().differentiate(loss(&leaves()));
    let replayed_products = |run: &dyn Fn() -> Found| {
        let recording = trace::record();
        let found = run();
        assert_eq!(found, expected);
        let events = recording.finish();
        count(&events, |kind| {
            matches!(
                kind,
                EventKind::Replay(
                    Traced {
                        op: "float_matmul",
                        ..
                    },
                    _
                )
            )
        })
    };
    let managed = leaves();
    for policy in [Policy::Recompute, Policy::KeepCompute, Policy::Offload] {
        let run = || managed.differentiate(checkpoint_with(policy.clone(), || loss(&managed)));
        assert_eq!(replayed_products(&run), 0, "{policy:?}");
    }
    let nested = || managed.differentiate(checkpoint(|| checkpoint(|| loss(&managed))));
    assert_eq!(replayed_products(&nested), 0);
    RematStats::reset_thread();
    let budget = || {
        let _apart = apart();
        let _budget = MemoryBudget::bytes(4096).install();
        managed.differentiate(loss(&managed))
    };
    assert_eq!(replayed_products(&budget), 0);
    assert!(RematStats::of_thread().evicted_operations > 0);
}

/// What has no gradient costs no product: hidden states and weights that are constants, leaves or
/// not, below every decorator.
#[test]
fn a_frozen_operand_costs_nothing() {
    fn check<B: AutodiffBackend>(stack: &str) {
        let products = |hidden: bool, weight: bool| {
            let set = |tensor: Tensor<B, 2>, tracked: bool| {
                let tensor = tensor.set_require_grad(false);
                match tracked {
                    true => tensor.require_grad().mul_scalar(1.5),
                    false => tensor.mul_scalar(1.5),
                }
            };
            let leaves = Leaves::<B>::new(SHAPE, false);
            let leaves = Leaves {
                hidden: set(leaves.hidden, hidden),
                weight: set(leaves.weight, weight),
                bias: None,
            };
            let recording = trace::record();
            checkpoint(|| leaves.chunked(targets(), &in_chunks_of(29)).loss);
            let events = recording.finish();
            count(&events, |kind| {
                matches!(
                    kind,
                    EventKind::Alloc(
                        Traced {
                            op: "float_matmul",
                            ..
                        },
                        _
                    )
                )
            })
        };
        // That of one element tells the type; the weight's gradient is computed in four parts.
        assert_eq!(products(false, false), 1 + 1, "{stack}");
        assert_eq!(products(true, false), 1 + 2, "{stack}");
        assert_eq!(products(false, true), 1 + 1 + 4, "{stack}");
        assert_eq!(products(true, true), 1 + 2 + 4, "{stack}");
    }
    check::<Managed>("managed");
    check::<Autodiff<Remat<Flex>, BalancedCheckpointing>>("balanced");
    check::<Autocast<Managed, Off>>("off");
    check::<Autocast<Managed, Bf16>>("bf16");
}

#[test]
fn the_configuration_is_a_file() {
    use burn::config::Config;
    let config = in_chunks_of(128)
        .with_ignore_index(Some(-100))
        .with_z_loss(1e-4);
    let read =
        LinearCrossEntropyLossConfig::load_binary(config.to_string().as_bytes()).expect("JSON");
    assert_eq!(read.to_string(), config.to_string());
}
