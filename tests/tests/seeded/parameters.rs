//! Law: with parameters in host memory, losses, gradients and trained parameters are bit for bit
//! those of training without, and no parameter stays on the device.

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer, SgdConfig};
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_accum::{AccumConfig, ClipByNorm};
use burn_amp::{Autocast, Bf16, F16, GradScalerConfig};
use burn_checkpoint::{MemoryBudget, Policy, Remat, apart, checkpoint_with, is_delivered};
use burn_flex::Flex;
use burn_update::Update;
use burn_zero::{
    HostAdamWConfig, Memory, OffloadConfig, ParameterShards, ReduceOverRanks, Sharded, SingleRank,
    ZeroSettings, offload_parameters,
};
use tests::compare::{bits, gradients, values};
use tests::models::{Classifier, Cnn, Decoder, EncoderDecoder, Mlp, Transformer};

const STEPS: usize = 4;

/// What is compared.
#[derive(Debug, PartialEq)]
struct Trained {
    losses: Vec<f32>,
    /// Of the last step, with their paths.
    gradients: Vec<(String, Vec<f32>)>,
    parameters: Vec<Vec<u32>>,
    /// The loss of the module for validation.
    valid: f32,
}

/// The bits of all float tensors, in the order of the module.
pub fn parameters<B: Backend, M: Module<B>>(module: &M) -> Vec<Vec<u32>> {
    struct Collect(Vec<Vec<u32>>);
    impl<B: Backend> ModuleVisitor<B> for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.push(bits(param.val()));
        }
    }
    let mut collect = Collect(Vec::new());
    module.visit(&mut collect);
    collect.0
}

/// Checks that all parameters that are trained are in host memory, or none.
fn check_placed<B: AutodiffBackend, M: Module<B>>(module: &M, on_host: bool) {
    struct Check(bool);
    impl<B: AutodiffBackend> ModuleVisitor<B> for Check {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if param.is_require_grad() {
                let tensor = param.val().into_primitive().tensor();
                assert_eq!(is_delivered::<B>(&tensor), self.0, "{}", param.id);
            }
        }
    }
    module.visit(&mut Check(on_host));
}

/// A seeded model, of which every third parameter is frozen if wanted.
fn model<B: AutodiffBackend, M: Classifier<B>>(frozen: bool) -> M {
    struct Freeze(usize);
    impl<B: AutodiffBackend> ModuleMapper<B> for Freeze {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            self.0 += 1;
            match self.0 % 3 {
                0 => param.set_require_grad(false),
                _ => param,
            }
        }
    }
    let device = B::Device::default();
    B::seed(&device, 42);
    let model = M::init(&device);
    // Parameters are drawn when they are first used, so all of them before they are moved.
    values(model.loss(2, &device));
    match frozen {
        true => model.map(&mut Freeze(0)),
        false => model,
    }
}

/// What trains a model.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Optimizers {
    /// Burn's, on the device.
    AdamW,
    /// Burn's with momentum, on the device.
    Sgd,
    /// The host's.
    OffloadedAdamW,
    /// Burn's with momentum, on the host's backend.
    /// A loss scaler around windows of two micro-batches around clipping by the global norm.
    Layers,
}

/// What runs a forward pass.
#[derive(Clone, Debug)]
enum Around {
    Nothing,
    Scope(Policy),
    BudgetBytes(u64),
}

struct Case {
    optimizers: Optimizers,
    frozen: bool,
    around: Around,
}

impl Case {
    fn of(optimizers: Optimizers) -> Self {
        Self {
            optimizers,
            frozen: false,
            around: Around::Nothing,
        }
    }

    fn train<B, M>(&self, memory: Memory) -> Trained
    where
        B: AutodiffBackend,
        M: Classifier<B> + AutodiffModule<B> + 'static,
        M::InnerModule: Classifier<B::InnerBackend>,
    {
        let model = model::<B, M>(self.frozen);
        let sgd = || {
            let momentum = MomentumConfig::new().with_momentum(0.9);
            SgdConfig::new().with_momentum(Some(momentum))
        };
        let placed = |model| match memory {
            Memory::Device => model,
            Memory::Host => offload_parameters::<B, M>(model).expect("a backend with `Remat`"),
        };
        match (self.optimizers, memory) {
            // Without ranks: that one rank is none is part of the law.
            (Optimizers::AdamW, Memory::Device) => {
                self.steps(model, AdamWConfig::new().init(), memory)
            }
            (Optimizers::Sgd, Memory::Device) => self.steps(model, sgd().init(), memory),
            (Optimizers::AdamW, Memory::Host) => {
                let adam = Update::new(AdamWConfig::new().init());
                let (model, update) = one_rank::<B, M>(adam, model, memory);
                self.steps(model, update, memory)
            }
            (Optimizers::Sgd, Memory::Host) => {
                let sgd = Update::new(sgd().init());
                let (model, update) = one_rank::<B, M>(sgd, model, memory);
                self.steps(model, update, memory)
            }
            (Optimizers::OffloadedAdamW, _) => {
                let optimizer = OffloadConfig::new(HostAdamWConfig::default()).init();
                self.steps(placed(model), optimizer.expect("valid"), memory)
            }
            (Optimizers::Layers, _) => {
                let clipped = Update::new(AdamWConfig::new().init()).clip_norm(0.5);
                let clipped = clipped.expect("valid");
                let (model, update) = one_rank::<B, M>(clipped, model, memory);
                let windows = update.accumulate(AccumConfig::mean(2)).expect("valid");
                let scaled = windows.scale(GradScalerConfig::default()).expect("valid");
                self.steps(model, scaled, memory)
            }
        }
    }

    fn steps<B, M, O>(&self, mut model: M, mut optimizer: O, memory: Memory) -> Trained
    where
        B: AutodiffBackend,
        M: Classifier<B> + AutodiffModule<B> + 'static,
        M::InnerModule: Classifier<B::InnerBackend>,
        O: Optimizer<M, B>,
    {
        let device = B::Device::default();
        let _apart = apart();
        let _budget = match (&self.around, memory) {
            (Around::BudgetBytes(bytes), Memory::Host) => {
                Some(MemoryBudget::bytes(*bytes).install())
            }
            _ => None,
        };
        B::seed(&device, 7);
        let mut losses = Vec::new();
        let mut last = Vec::new();
        for _ in 0..STEPS {
            let loss = match (&self.around, memory) {
                (Around::Scope(policy), Memory::Host) => {
                    checkpoint_with(policy.clone(), || model.loss(8, &device))
                }
                _ => model.loss(8, &device),
            };
            losses.extend(values(loss.clone()));
            let grads = loss.backward();
            last = gradients(&model, &grads);
            let grads = GradientsParams::from_grads(grads, &model);
            // As the Learner does.
            model = optimizer.step(1e-2, model.clone(), grads);
            check_placed::<B, M>(&model, memory == Memory::Host);
        }
        Trained {
            losses,
            gradients: last,
            parameters: parameters::<B, M>(&model),
            valid: values(model.valid().loss(8, &device))[0],
        }
    }
}

/// The update over one rank, and the model for it.
fn one_rank<B, M>(
    inside: Update<ParameterShards<B>, B>,
    model: M,
    parameters: Memory,
) -> (M, Update<M, B>)
where
    B: AutodiffBackend,
    M: AutodiffModule<B> + 'static,
{
    let settings = ZeroSettings {
        parameters,
        ..ZeroSettings::default()
    };
    let update = inside.reduce(settings, Arc::new(SingleRank::new()));
    let mut update = update.expect("one rank agrees");
    let model = update.prepare(model).expect("it can be placed");
    (model, update)
}

fn same<P, H, M, N>(case: &Case)
where
    P: AutodiffBackend,
    H: AutodiffBackend,
    M: Classifier<P> + AutodiffModule<P> + 'static,
    M::InnerModule: Classifier<P::InnerBackend>,
    N: Classifier<H> + AutodiffModule<H> + 'static,
    N::InnerModule: Classifier<H::InnerBackend>,
{
    let _turn = super::turn();
    let plain = case.train::<P, M>(Memory::Device);
    let found = case.train::<H, N>(Memory::Host);
    let what = || {
        let (optimizers, around) = (case.optimizers, &case.around);
        format!("{optimizers:?}, frozen {}, {around:?}", case.frozen)
    };
    assert_eq!(plain.losses, found.losses, "losses: {}", what());
    assert!(!plain.gradients.is_empty());
    assert!(plain.gradients == found.gradients, "gradients: {}", what());
    let parameters = plain.parameters == found.parameters;
    assert!(parameters, "parameters: {}", what());
    assert_eq!(plain.valid, found.valid, "validation: {}", what());
}

fn every_model<P: AutodiffBackend, H: AutodiffBackend>(case: &Case) {
    same::<P, H, Mlp<_>, Mlp<_>>(case);
    same::<P, H, Cnn<_>, Cnn<_>>(case);
    same::<P, H, Transformer<_>, Transformer<_>>(case);
    same::<P, H, EncoderDecoder<_>, EncoderDecoder<_>>(case);
    same::<P, H, Decoder<_>, Decoder<_>>(case);
}

type Plain<I> = Autodiff<I>;
type Managed<I> = Autodiff<Remat<I>>;

fn burns_optimizers<I: Backend>() {
    every_model::<Plain<I>, Managed<I>>(&Case::of(Optimizers::AdamW));
    every_model::<Plain<I>, Managed<I>>(&Case::of(Optimizers::Sgd));
}

fn optimizers_on_the_host<I: Backend>() {
    every_model::<Plain<I>, Managed<I>>(&Case::of(Optimizers::OffloadedAdamW));
}

fn gradients_that_leave_during_backward<I: Backend>() {
    type Leaving<I> = Sharded<Managed<I>>;
    let case = Case::of(Optimizers::OffloadedAdamW);
    every_model::<Sharded<Plain<I>>, Leaving<I>>(&case);
}

fn frozen_parameters<I: Backend>() {
    for optimizers in [Optimizers::AdamW, Optimizers::OffloadedAdamW] {
        let case = Case {
            frozen: true,
            ..Case::of(optimizers)
        };
        every_model::<Plain<I>, Managed<I>>(&case);
    }
}

fn scopes_and_budgets<I: Backend>() {
    let scopes = [Policy::Recompute, Policy::KeepCompute, Policy::Offload].map(Around::Scope);
    let budgets = [40 << 10, 400 << 10].map(Around::BudgetBytes);
    for around in scopes.into_iter().chain(budgets) {
        let case = Case {
            around,
            ..Case::of(Optimizers::AdamW)
        };
        same::<Plain<I>, Managed<I>, Mlp<_>, Mlp<_>>(&case);
        same::<Plain<I>, Managed<I>, Cnn<_>, Cnn<_>>(&case);
        same::<Plain<I>, Managed<I>, Decoder<_>, Decoder<_>>(&case);
    }
}

fn in_f16_with_every_layer<I: Backend>() {
    type Low<I> = Autocast<Plain<I>, F16>;
    type LowManaged<I> = Autocast<Managed<I>, F16>;
    for around in [Around::Nothing, Around::Scope(Policy::Recompute)] {
        let case = Case {
            around,
            ..Case::of(Optimizers::Layers)
        };
        same::<Low<I>, LowManaged<I>, Mlp<_>, Mlp<_>>(&case);
        same::<Low<I>, LowManaged<I>, Cnn<_>, Cnn<_>>(&case);
        same::<Low<I>, LowManaged<I>, Decoder<_>, Decoder<_>>(&case);
    }
}

/// On the CPU only: each law trains a dozen times, for whose kernels software Vulkan takes minutes.
mod flex {
    use burn_flex::Flex;

    #[test]
    fn burns_optimizers() {
        super::burns_optimizers::<Flex>()
    }

    #[test]
    fn optimizers_on_the_host() {
        super::optimizers_on_the_host::<Flex>()
    }

    #[test]
    fn gradients_that_leave_during_backward() {
        super::gradients_that_leave_during_backward::<Flex>()
    }

    #[test]
    fn frozen_parameters() {
        super::frozen_parameters::<Flex>()
    }

    #[test]
    fn scopes_and_budgets() {
        super::scopes_and_budgets::<Flex>()
    }

    #[test]
    fn in_f16_with_every_layer() {
        super::in_f16_with_every_layer::<Flex>()
    }
}

mod devices {
    use super::*;

    fn a_decoder<I: Backend>() {
        let case = Case::of(Optimizers::OffloadedAdamW);
        same::<Plain<I>, Managed<I>, Decoder<_>, Decoder<_>>(&case);
    }

    tests::on_counted_backends!(a_decoder);
}

/// Not on every backend: not each has bf16.
#[test]
fn in_bf16() {
    type Low<A> = Autocast<A, Bf16>;
    for optimizers in [Optimizers::AdamW, Optimizers::OffloadedAdamW] {
        let case = Case::of(optimizers);
        every_model::<Low<Plain<Flex>>, Low<Managed<Flex>>>(&case);
        let case = Case {
            around: Around::Scope(Policy::Recompute),
            ..case
        };
        every_model::<Low<Plain<Flex>>, Low<Managed<Flex>>>(&case);
    }
}

#[test]
fn burns_records_are_the_same_and_are_loaded_into_host_memory() {
    fn record<B: Backend, M: Module<B>>(model: &M) -> Vec<u8> {
        let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
        Recorder::<B>::record(&recorder, model.clone().into_record(), ()).expect("bytes")
    }
    fn load<B: Backend, M: Module<B>>(model: M, bytes: Vec<u8>) -> M {
        let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
        let record = Recorder::<B>::load(&recorder, bytes, &B::Device::default());
        model.load_record(record.expect("a record"))
    }
    type P = Plain<Flex>;
    type H = Managed<Flex>;
    let _turn = super::turn();
    let plain = model::<P, EncoderDecoder<P>>(false);
    let bytes = record::<P, _>(&plain);
    let placed = || {
        let other = EncoderDecoder::<H>::init(&Default::default());
        offload_parameters::<H, _>(other).expect("a backend with `Remat`")
    };
    let loaded = load::<H, _>(placed(), bytes.clone());
    check_placed::<H, _>(&loaded, true);
    assert_eq!(parameters(&loaded), parameters(&plain));
    assert!(record::<H, _>(&loaded) == bytes);
    // A copy for another thread or device.
    let forked = loaded.clone().fork(&Default::default());
    check_placed::<H, _>(&forked, true);
    assert_eq!(parameters(&forked), parameters(&plain));
    // In the Learner a record meets the model before the optimizer prepares it.
    let adam = Update::new(AdamWConfig::new().init());
    let loaded = load::<H, _>(placed(), bytes);
    let (again, _) = one_rank::<H, _>(adam, loaded, Memory::Host);
    check_placed::<H, _>(&again, true);
}
