//! Scopes that begin and end by themselves: of models whose blocks are private fields.

use std::cell::Cell;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Distribution, Tensor, TensorPrimitive};
use burn_amp::{Autocast, GradScaler, GradScalerConfig, Off};
use burn_checkpoint::{
    MemoryBudget, Remat, RematError, RematStats, checkpoint, checkpoint_units, checkpoint_units_by,
    independent,
};
use burn_decorator::module::{AnyTensor, for_each_float};
use burn_flex::Flex;
use burn_update::Update;

use crate::apart::InstallApart;
use crate::models::{Around, Bare, Mlp, Model, generator, parameters};
use crate::verified::{RecordedRun, Verified, recorded};
use pairs::Pairs;
use stranger::{Residual, Stranger, Transformer};

type Inner = Verified<Flex>;
type Told = Autocast<Autodiff<Remat<Inner>>, Off>;
type Plain = Autocast<Autodiff<Inner>, Off>;

/// Models of another crate: nothing of them is public but these calls.
mod stranger {
    use burn::module::Module;
    use burn::nn::conv::{Conv2d, Conv2dConfig};
    use burn::nn::{
        BatchNorm, BatchNormConfig, Dropout, DropoutConfig, LayerNorm, LayerNormConfig, Linear,
        LinearConfig, PaddingConfig2d,
    };
    use burn::tensor::Tensor;
    use burn::tensor::activation::{gelu, relu, softmax};
    use burn::tensor::backend::Backend;

    use crate::models::Around;

    pub trait Stranger<B: Backend>: Module<B> {
        fn new(device: &B::Device) -> Self;
        /// `around` is what its author would have written around each block.
        fn forward(&self, x: Tensor<B, 4>, around: &impl Around) -> Tensor<B, 2>;
    }

    #[derive(Module, Debug)]
    struct Block<B: Backend> {
        norm: LayerNorm<B>,
        query_key_value: Linear<B>,
        mlp_norm: LayerNorm<B>,
        up: Linear<B>,
        down: Linear<B>,
        dropout: Dropout,
    }

    impl<B: Backend> Block<B> {
        fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
            let heads = self.query_key_value.forward(self.norm.forward(x.clone()));
            let [query, key, value] = heads.chunk(3, 2).try_into().expect("three");
            let weights = softmax(query.matmul(key.transpose()), 2);
            let x = x + self.dropout.forward(weights.matmul(value));
            let y = gelu(self.up.forward(self.mlp_norm.forward(x.clone())));
            x + self.dropout.forward(self.down.forward(y))
        }
    }

    #[derive(Module, Debug)]
    pub struct Transformer<B: Backend> {
        embed: Linear<B>,
        blocks: Vec<Block<B>>,
        norm: LayerNorm<B>,
        head: Linear<B>,
    }

    impl<B: Backend> Stranger<B> for Transformer<B> {
        fn new(device: &B::Device) -> Self {
            let block = |_| Block {
                norm: LayerNormConfig::new(32).init(device),
                query_key_value: LinearConfig::new(32, 96).init(device),
                mlp_norm: LayerNormConfig::new(32).init(device),
                up: LinearConfig::new(32, 128).init(device),
                down: LinearConfig::new(128, 32).init(device),
                dropout: DropoutConfig::new(0.2).init(),
            };
            Self {
                embed: LinearConfig::new(48, 32).init(device),
                blocks: (0..6).map(block).collect(),
                norm: LayerNormConfig::new(32).init(device),
                head: LinearConfig::new(32, 8).init(device),
            }
        }

        fn forward(&self, x: Tensor<B, 4>, around: &impl Around) -> Tensor<B, 2> {
            let [batch, ..] = x.dims();
            let x = self.embed.forward(x.reshape([batch as i32, 16, 48]));
            let x = self
                .blocks
                .iter()
                .fold(x, |x, block| around.block(|| block.forward(x)));
            self.head.forward(self.norm.forward(x)).flatten(0, 1)
        }
    }

    #[derive(Module, Debug)]
    struct ResidualBlock<B: Backend> {
        conv1: Conv2d<B>,
        norm1: BatchNorm<B>,
        conv2: Conv2d<B>,
        norm2: BatchNorm<B>,
    }

    /// Its blocks are the last thing that has parameters, but for one.
    #[derive(Module, Debug)]
    pub struct Residual<B: Backend> {
        stem: Conv2d<B>,
        layers: Vec<ResidualBlock<B>>,
        head: Linear<B>,
    }

    impl<B: Backend> Stranger<B> for Residual<B> {
        fn new(device: &B::Device) -> Self {
            let conv = |channels| {
                Conv2dConfig::new(channels, [3, 3])
                    .with_padding(PaddingConfig2d::Same)
                    .init(device)
            };
            let block = |_| ResidualBlock {
                conv1: conv([8, 8]),
                norm1: BatchNormConfig::new(8).init(device),
                conv2: conv([8, 8]),
                norm2: BatchNormConfig::new(8).init(device),
            };
            Self {
                stem: conv([3, 8]),
                layers: (0..3).map(block).collect(),
                head: LinearConfig::new(8, 4).init(device),
            }
        }

        fn forward(&self, x: Tensor<B, 4>, around: &impl Around) -> Tensor<B, 2> {
            let layer = |x: Tensor<B, 4>, layer: &ResidualBlock<B>| {
                around.block(|| {
                    let y = relu(layer.norm1.forward(layer.conv1.forward(x.clone())));
                    relu(x + layer.norm2.forward(layer.conv2.forward(y)))
                })
            };
            let x = self.layers.iter().fold(self.stem.forward(x), layer);
            self.head.forward(x.mean_dim(3).mean_dim(2).flatten(1, 3))
        }
    }
}

/// By hand.
struct Scopes;

impl crate::models::Around for Scopes {
    fn block<B: Backend, const D: usize>(
        &self,
        region: impl FnOnce() -> Tensor<B, D>,
    ) -> Tensor<B, D> {
        checkpoint(region)
    }
}

/// What a step took.
#[derive(Debug)]
struct Taken {
    /// Beyond what was live before it.
    forward_bytes: u64,
    peak_bytes: u64,
    replayed: u64,
}

/// Three steps, two backward passes each with a validation after it. Returns the bits of the
/// parameters, and what the last pass took.
fn trained<B: AutodiffBackend, M: Stranger<B> + AutodiffModule<B>>(
    around: &impl crate::models::Around,
    with_units: bool,
    inner: impl Fn(&M::InnerModule, Tensor<B::InnerBackend, 4>),
) -> (Vec<Vec<u8>>, Taken) {
    let device = Default::default();
    B::seed(&device, 3);
    let model = M::new(&device);
    parameters::<B, M>(&model); // drawn now
    let (model, units) = match with_units {
        true => checkpoint_units(model).map(|(model, units)| (model, Some(units))),
        false => Ok((model, None)),
    }
    .expect("there are blocks");
    B::seed(&device, 4);
    let mut taken = None;
    let mut step = |model: &M| {
        let x = Tensor::random([2, 3, 16, 16], Distribution::Normal(0.0, 1.0), &device);
        RematStats::reset_thread();
        let before = RematStats::of_thread();
        let output = model.forward(x.clone(), around);
        let forward_bytes = RematStats::of_thread().live_bytes - before.live_bytes;
        let loss = output.powi_scalar(2).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), model);
        let after = RematStats::of_thread();
        taken = Some(Taken {
            forward_bytes,
            peak_bytes: after.peak_bytes - before.live_bytes,
            replayed: after.replayed_operations - before.replayed_operations,
        });
        inner(&model.valid(), x.inner());
        gradients
    };
    let mut train = |mut model: M, mut optimizer: Box<dyn FnMut(M, GradientsParams) -> M>| {
        for _ in 0..3 {
            step(&model);
            let gradients = step(&model);
            model = optimizer(model, gradients);
        }
        parameters::<B, M>(&model)
    };
    let mut sgd = SgdConfig::new().init::<B, M>();
    let bits = match units {
        Some(units) => {
            let mut optimizer = units.wrap(sgd);
            train(
                model,
                Box::new(move |model, gradients| optimizer.step(0.1, model, gradients)),
            )
        }
        None => train(
            model,
            Box::new(move |model, gradients| sgd.step(0.1, model, gradients)),
        ),
    };
    (bits, taken.expect("a step"))
}

/// One model, by units and otherwise.
fn compared<M, P>()
where
    M: Stranger<Told> + AutodiffModule<Told>,
    M::InnerModule: Stranger<<Told as AutodiffBackend>::InnerBackend>,
    P: Stranger<Plain> + AutodiffModule<Plain>,
    P::InnerModule: Stranger<<Plain as AutodiffBackend>::InnerBackend>,
{
    let _generator = generator();
    let (plain, _) = trained::<Plain, P>(&Bare, false, |model, x| drop(model.forward(x, &Bare)));
    let valid = |model: &M::InnerModule, x| drop(model.forward(x, &Bare));
    let (by_hand, hand) = trained::<Told, M>(&Scopes, false, valid);
    let (by_units, units) = trained::<Told, M>(&Bare, true, valid);
    assert!(plain == by_hand);
    assert!(plain == by_units, "not the bits of the plain run");
    let check =
        |what: &str, units: u64, most: f64| assert!(units as f64 <= most, "{what}: {units}");
    // One tensor of a norm behind the blocks: by hand it is outside of scopes, where nothing counts.
    let norm_bytes = (2 * 16 * 32 * 4) as f64;
    let forward_bytes = 1.15 * hand.forward_bytes as f64 + norm_bytes;
    check("forward bytes", units.forward_bytes, forward_bytes);
    check(
        "peak bytes",
        units.peak_bytes,
        1.15 * hand.peak_bytes as f64,
    );
    check("replays", units.replayed, 1.05 * hand.replayed as f64);
}

#[test]
fn units_of_a_transformer_that_cannot_be_edited_take_what_scopes_by_hand_take() {
    compared::<Transformer<Told>, Transformer<Plain>>();
}

#[test]
fn units_of_a_residual_network_that_cannot_be_edited_take_what_scopes_by_hand_take() {
    compared::<Residual<Told>, Residual<Plain>>();
}

/// A hash of the bits of the loss and of all gradients of one pass. Running statistics are left out:
/// each pass changes them.
fn bits(model: &Residual<Told>, x: &Tensor<Told, 4>) -> u64 {
    bits_of(model, model.forward(x.clone(), &Bare))
}

fn bits_of(model: &Residual<Told>, output: Tensor<Told, 2>) -> u64 {
    let mut hasher = DefaultHasher::new();
    let loss = output.powi_scalar(2).mean();
    loss.to_data().as_bytes().hash(&mut hasher);
    let gradients = loss.backward();
    for_each_float(model, |_, _, value: FloatTensor<Told>| {
        if let Some(gradient) = Told::grad(&value, &gradients) {
            let gradient = AnyTensor::<<Told as AutodiffBackend>::InnerBackend>::Float(
                TensorPrimitive::Float(gradient),
            );
            gradient.to_data().as_bytes().hash(&mut hasher);
        }
    });
    hasher.finish()
}

fn input<B: Backend>() -> Tensor<B, 4> {
    let device = Default::default();
    let x = Tensor::<B, 1, burn::tensor::Int>::arange(0..2 * 3 * 8 * 8, &device);
    (x.float() * 0.37).sin().reshape([2, 3, 8, 8])
}

/// A model with units, and the bits of a pass of the same model without, and what ran in that.
fn with_units() -> (Residual<Told>, u64, RecordedRun) {
    let _generator = generator();
    let device = Default::default();
    Told::seed(&device, 5);
    let model = Residual::<Told>::new(&device);
    // Reading them makes those that are lazy, in this order of random numbers.
    parameters::<Told, _>(&model);
    // With running statistics of its own, which its first pass updates as the other's does.
    let other = independent(&model);
    // The second pass takes over what the first left to the running statistics.
    let ([expected, _], run) = recorded(|| [(); 2].map(|()| bits(&model, &input())));
    let (model, _) = checkpoint_units(other).expect("blocks");
    (model, expected, run)
}

#[test]
fn units_have_the_same_bits_under_a_budget_in_a_scope_and_where_all_is_compared() {
    let (model, expected, run) = with_units();
    let x = input();
    assert_eq!(bits(&model, &x), expected, "alone");
    assert_eq!(run.verify(|| bits(&model, &x)), expected, "compared");
    for bytes in [1, 8 << 10] {
        let _budget = MemoryBudget::bytes(bytes).install_apart();
        for step in 0..2 {
            assert_eq!(
                bits(&model, &x),
                expected,
                "step {step} under {bytes} bytes"
            );
        }
    }
    for _ in 0..2 {
        let output = checkpoint(|| model.forward(x.clone(), &Bare));
        assert_eq!(bits_of(&model, output), expected, "in a scope");
        let output = model.forward(x.clone(), &Scopes);
        assert_eq!(bits_of(&model, output), expected, "around scopes");
    }
}

/// Panics in the second block.
struct Stops(Cell<u32>);

impl Around for Stops {
    fn block<B: Backend, const D: usize>(
        &self,
        region: impl FnOnce() -> Tensor<B, D>,
    ) -> Tensor<B, D> {
        let result = region();
        self.0.set(self.0.get() + 1);
        assert_ne!(self.0.get(), 2, "the block stops");
        result
    }
}

#[test]
fn a_forward_pass_that_panics_in_a_block_changes_no_later_one() {
    let (model, expected, _) = with_units();
    let x = input();
    let pass = || {
        let before = RematStats::of_thread().replayed_operations;
        assert_eq!(bits(&model, &x), expected);
        RematStats::of_thread().replayed_operations - before
    };
    pass(); // learns what blocks hand over
    let replayed = pass();
    assert!(replayed > 0);
    let fails = || model.forward(x.clone(), &Stops(Cell::new(0)));
    assert!(catch_unwind(AssertUnwindSafe(fails)).is_err());
    assert_eq!(pass(), replayed);
}

#[test]
fn results_that_a_program_reads_after_backward_stay_from_the_next_step_on() {
    let _generator = generator();
    let device = Default::default();
    let blocks = Mlp::<Told>::new(&device); // nothing of it is outside of its blocks
    let (model, units) = checkpoint_units(blocks).expect("blocks");
    assert_eq!(units.names().len(), 6);
    let replayed = |_| {
        let x = Tensor::<Told, 2>::ones([32, 16], &device);
        let output = model.blocks.iter().fold(x, |x, block| block.forward(x));
        drop(output.clone().powi_scalar(2).mean().backward());
        let before = RematStats::of_thread().replayed_operations;
        output.into_data();
        RematStats::of_thread().replayed_operations - before
    };
    let replayed: Vec<u64> = (0..3).map(replayed).collect();
    assert_eq!(replayed[1..], [0, 0], "{replayed:?}");
}

/// Blocks that hand over two tensors, and use those of the block before in several ways.
mod pairs {
    use burn::module::Module;
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Tensor;
    use burn::tensor::activation::gelu;
    use burn::tensor::backend::Backend;
    use burn_checkpoint::{Outputs, checkpoint};

    #[derive(Module, Debug)]
    struct Block<B: Backend> {
        up: Linear<B>,
        down: Linear<B>,
    }

    #[derive(Module, Debug)]
    pub struct Pairs<B: Backend> {
        blocks: Vec<Block<B>>,
        head: Linear<B>,
    }

    type Pair<B> = (Tensor<B, 2>, Tensor<B, 2>);

    /// How the blocks are written.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub enum Style {
        /// The head uses what no block uses of the one before, by the operation that ends the block.
        OtherUse,
        /// A scope of the author's begins a block.
        ScopeFirst,
        /// A scope of the author's is in the middle of a block, which uses what it got after it.
        ScopeInside,
        /// What a block computes before it uses a parameter is used after it.
        Early,
    }

    pub const STYLES: [Style; 4] = [
        Style::OtherUse,
        Style::ScopeFirst,
        Style::ScopeInside,
        Style::Early,
    ];

    impl<B: Backend> Block<B> {
        fn forward(&self, style: Style, (x, other): Pair<B>) -> Pair<B> {
            match style {
                Style::OtherUse => {
                    let y = self.down.forward(gelu(self.up.forward(x)));
                    (gelu(y.clone()), y)
                }
                Style::ScopeFirst => {
                    let y = checkpoint(|| gelu(self.up.forward(x.clone())));
                    (x + self.down.forward(y), other)
                }
                Style::ScopeInside => {
                    let y = self.up.forward(x.clone());
                    let y = checkpoint(|| self.down.forward(gelu(y)));
                    (x + y.clone() + other, y.tanh())
                }
                Style::Early => {
                    let early = x.clone().tanh();
                    let y = gelu(self.up.forward(early.clone()));
                    (x + self.down.forward(y), other + early)
                }
            }
        }
    }

    impl<B: Backend> Pairs<B> {
        pub fn new(device: &B::Device) -> Self {
            let block = |_| Block {
                up: LinearConfig::new(16, 64).with_bias(false).init(device),
                down: LinearConfig::new(64, 16).with_bias(false).init(device),
            };
            Self {
                blocks: (0..4).map(block).collect(),
                head: LinearConfig::new(16, 4).with_bias(false).init(device),
            }
        }

        pub fn forward(&self, style: Style, x: Tensor<B, 2>, by_hand: bool) -> Tensor<B, 2> {
            fn around<R: Outputs>(by_hand: bool, block: impl FnOnce() -> R) -> R {
                if by_hand { checkpoint(block) } else { block() }
            }
            let pair = (x.clone(), x);
            let (x, other) = self.blocks.iter().fold(pair, |pair, block| {
                around(by_hand, || block.forward(style, pair))
            });
            match style {
                Style::OtherUse => self.head.forward(other),
                _ => self.head.forward(x + other),
            }
        }
    }
}

/// What is computed again in the forward and in the backward pass of a model with scopes.
#[derive(Debug, PartialEq)]
struct Again {
    forward: u64,
    backward: u64,
}

fn again(model: &Pairs<Told>, style: pairs::Style, by_hand: bool) -> (Again, Vec<u8>) {
    let replayed = || RematStats::of_thread().replayed_operations;
    let x = Tensor::<Told, 1, burn::tensor::Int>::arange(0..32 * 16, &Default::default());
    let x = (x.float() * 0.37).sin().reshape([32, 16]).require_grad();
    let before = replayed();
    let output = model.forward(style, x.clone(), by_hand);
    let forward = replayed() - before;
    let gradients = output.powi_scalar(2).mean().backward();
    let backward = replayed() - before - forward;
    let gradient = x.grad(&gradients).expect("it is used").into_data();
    (Again { forward, backward }, gradient.as_bytes().to_vec())
}

#[test]
fn units_compute_again_what_scopes_by_hand_do_however_blocks_are_written() {
    let _generator = generator();
    for style in pairs::STYLES {
        let model = Pairs::<Told>::new(&Default::default());
        let (by_hand, expected) = again(&model, style, true);
        let (model, _units) = checkpoint_units(model).expect("blocks");
        for pass in 0..3 {
            let (found, bits) = again(&model, style, false);
            assert!(bits == expected, "{style:?}, pass {pass}: other bits");
            // What is used late is known from the second pass on.
            if pass > 0 || style != pairs::Style::Early {
                assert_eq!(found.forward, 0, "{style:?}, pass {pass}");
            }
            if pass > 0 {
                let most = by_hand.backward;
                assert!(
                    found.backward <= most,
                    "{style:?}, pass {pass}: {found:?}, {by_hand:?}"
                );
            }
        }
    }
}

#[test]
fn parameters_of_an_update_that_skips_a_step_are_in_their_units() {
    let _generator = generator();
    let device = Default::default();
    let (mut model, units) = checkpoint_units(Mlp::<Told>::new(&device)).expect("blocks");
    let scaler = GradScaler::new(GradScalerConfig::default()).expect("valid");
    let update = Update::new(units.wrap(SgdConfig::new().init())).scale(scaler.clone());
    let mut update = update.expect("no other scale");
    let mut replayed = Vec::new();
    for step in 0..4 {
        let before = RematStats::of_thread().replayed_operations;
        let loss = model.loss(&Bare, &device);
        // The second step overflows.
        let loss = if step == 1 { loss * f32::MAX } else { loss };
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        replayed.push(RematStats::of_thread().replayed_operations - before);
        model = update.step(0.01, model, gradients).expect("it goes on");
    }
    assert_eq!(scaler.skipped_steps(), 1);
    // What blocks hand over is known from the second step on.
    assert!(replayed[1] > 0);
    assert_eq!(replayed[1..], [replayed[1]; 3]);
}

/// A budget that is in force before must not take anything of `checkpoint_units` for a step.
#[test]
fn a_fraction_measures_the_first_step_of_a_model_with_units() {
    let budget = MemoryBudget::fraction(0.5).unwrap().install_apart();
    let model = Residual::<Told>::new(&Default::default());
    let (model, _units) = checkpoint_units(model).unwrap();
    for _ in 0..2 {
        drop(model.forward(input(), &Bare).sum().backward());
    }
    let limit = budget.limit_bytes()[0].expect("it was measured");
    assert!(limit > 10_000, "{limit}");
}

#[test]
fn where_units_cannot_have_scopes_an_error_says_why() {
    let _generator = generator();
    let device = Default::default();
    let error = checkpoint_units_by(Residual::<Told>::new(&device), |_| String::new());
    let error = error.expect_err("no units");
    let none = |error: &RematError| matches!(error, RematError::NoRepeatedBlocks { blocks: 0, .. });
    assert!(none(&error), "{error}");
    let error = checkpoint_units(Residual::<Plain>::new(&device)).expect_err("no Remat");
    assert!(matches!(error, RematError::UnitsNotSeen { .. }), "{error}");
    let untold = Residual::<Autodiff<Remat<Inner>>>::new(&device);
    let error = checkpoint_units(untold).expect_err("not told");
    assert!(
        matches!(error, RematError::BackwardNotTold { .. }),
        "{error}"
    );
}
