//! The estimate of a step against the heap of the same step on burn-flex.
//!
//! The tests run one at a time, because they share the process's heap.

mod accumulation;
mod batch_norm;
mod device_costs;
#[cfg(feature = "vulkan")]
mod fusion;
mod learner;
mod link;
mod low_functions;
mod programs;
mod ranks;
#[cfg(feature = "vulkan")]
mod vulkan;

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::backend::Autodiff;
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, Optimizer, SgdConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::module::attention;
use burn_accum::AccumConfig;
use burn_amp::{Autocast, Bf16, F16};
use burn_checkpoint::{MemoryBudget, Remat, RematStats, apart};
use burn_estimate::{
    DeviceProfile, Estimate, Holder, Kind, Meta, MetaDevice, Shares, estimate_run, estimate_step,
};
use burn_flex::Flex;
use burn_fused::FusedBackward;
use burn_update::Update;
use examples::training::recompute::Checkpoint;
use peak_alloc::PeakAlloc;
use programs::{Cnn, EncoderDecoder, Gpt, Mlp, Program, Recurrent};

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Locks the heap and the default device for one test.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One update.
fn update<B: AutodiffBackend, P: Program>(
    program: &P,
    mut model: P::Model<B>,
    optimizer: &mut impl Optimizer<P::Model<B>, B>,
    micro_batches: usize,
    device: &B::Device,
) -> P::Model<B> {
    for _ in 0..micro_batches {
        let gradients = program.loss(&model, device).backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(1e-3, model, gradients);
    }
    model
}

/// A program and its settings, measured and estimated.
struct Case<'a, P> {
    program: &'a P,
    micro_batches: usize,
    budget_bytes: Option<u64>,
}

impl<P: Program> Case<'_, P> {
    fn run<B: AutodiffBackend, R>(
        &self,
        device: &B::Device,
        run: impl FnOnce(P::Model<B>, &mut dyn FnMut(P::Model<B>) -> P::Model<B>) -> R,
    ) -> R {
        let _apart = apart();
        let _budget = self
            .budget_bytes
            .map(|bytes| MemoryBudget::bytes(bytes).install());
        let model = self.program.model::<B>(device);
        let windows = self.micro_batches;
        if windows == 1 {
            let mut optimizer = AdamWConfig::new().init::<B, P::Model<B>>();
            return run(model, &mut |model| {
                update(self.program, model, &mut optimizer, 1, device)
            });
        }
        let adamw = AdamWConfig::new().init::<B, P::Model<B>>();
        let optimizer = Update::new(adamw).accumulate(AccumConfig::mean(windows));
        let mut optimizer = optimizer.expect("a window of steps");
        run(model, &mut |model| {
            update(self.program, model, &mut optimizer, windows, device)
        })
    }

    /// The peak of the second step's heap beyond what was there before the program.
    fn heap<B: AutodiffBackend>(&self) -> u64 {
        let before = HEAP.current_usage();
        self.run::<B, _>(&B::Device::default(), |model, step| {
            let model = step(model);
            HEAP.reset_peak_usage();
            drop(step(model));
            (HEAP.peak_usage() - before) as u64
        })
    }

    fn estimate<B: AutodiffBackend<Device = MetaDevice>>(&self) -> Estimate {
        self.run::<B, _>(&MetaDevice::default(), |model, step| {
            estimate_step::<B, _>(model, step).0
        })
    }

    /// Checks that the estimate is within 1 % of the heap without what autodiff and Remat note of
    /// operations, which the same run on the device without memory takes.
    fn check<F, E>(&self, name: &str)
    where
        F: AutodiffBackend,
        E: AutodiffBackend<Device = MetaDevice>,
    {
        // The first runs start worker threads, whose stacks must not count.
        self.heap::<F>();
        self.heap::<E>();
        let (heap, notes) = (self.heap::<F>(), self.heap::<E>());
        let estimate = self.estimate::<E>();
        let ratio = estimate.peak_bytes as f64 / (heap - notes) as f64;
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        println!(
            "{name}: {:.2} MiB estimated, {:.2} MiB of heap, of which notes {:.2}: {ratio:.4}",
            mib(estimate.peak_bytes),
            mib(heap),
            mib(notes)
        );
        println!("{estimate}");
        assert!(
            (0.99..=1.01).contains(&ratio),
            "{name}: {ratio}\n{estimate}"
        );
    }
}

fn once<P>(program: &P) -> Case<'_, P> {
    Case {
        program,
        micro_batches: 1,
        budget_bytes: None,
    }
}

#[test]
fn gpt() {
    let _turn = turn();
    once(&Gpt::new(3, Checkpoint::None)).check::<Autodiff<Flex>, Autodiff<Meta>>("gpt");
}

#[test]
fn gpt_of_two_micro_batches() {
    let _turn = turn();
    let program = Gpt::new(3, Checkpoint::None);
    let case = Case {
        micro_batches: 2,
        ..once(&program)
    };
    case.check::<Autodiff<Flex>, Autodiff<Meta>>("gpt, two micro-batches");
}

/// Also with products kept, in bf16, over two micro-batches.
#[test]
fn gpt_with_all_of_it() {
    let _turn = turn();
    let program = Gpt::new(3, Checkpoint::KeepCompute);
    let case = Case {
        micro_batches: 2,
        ..once(&program)
    };
    case.check::<Autocast<Autodiff<Remat<Flex>>, Bf16>, Autocast<Autodiff<Remat<Meta>>, Bf16>>(
        "gpt in bf16, products kept, two micro-batches",
    );
}

/// An update by the sum of the gradients of some micro-batches.
fn summed<B, P>(program: &P, micro_batches: usize) -> Estimate
where
    B: AutodiffBackend<Device = MetaDevice>,
    P: Program,
{
    let device = MetaDevice::default();
    let mut optimizer = AdamWConfig::new().init::<B, P::Model<B>>();
    let step = |model: P::Model<B>| {
        let mut sums = GradientsAccumulator::new();
        for _ in 0..micro_batches {
            let gradients = program.loss(&model, &device).backward();
            sums.accumulate(&model, GradientsParams::from_grads(gradients, &model));
        }
        optimizer.step(1e-3, model, sums.grads())
    };
    estimate_step::<B, _>(program.model(&device), step).0
}

/// What a window of four takes follows from one of two.
#[test]
fn further_micro_batches_take_as_long_as_the_last() {
    let _turn = turn();
    let device = DeviceProfile::A100;
    for (checkpoint, fused) in [
        (Checkpoint::None, false),
        (Checkpoint::Block, false),
        (Checkpoint::Offload, false),
        (Checkpoint::None, true),
    ] {
        let program = Gpt::new(6, checkpoint);
        let of = |micro_batches| match fused {
            true => summed::<FusedBackward<Autodiff<Remat<Meta>>>, _>(&program, micro_batches),
            false => summed::<Autodiff<Remat<Meta>>, _>(&program, micro_batches),
        };
        let (two, four) = (of(2), of(4));
        let ratio = |two: &Estimate, four: &Estimate| {
            let derived = two.time_with_more(&device, 2);
            derived.as_secs_f64() / four.time(&device).as_secs_f64()
        };
        let shares = Shares {
            ranks: 8,
            optimizer_state: true,
            gradients: true,
            ..Shares::NONE
        };
        let ratios = [
            ratio(&two, &four),
            ratio(&two.shared(shares), &four.shared(shares)),
        ];
        assert!(
            ratios.iter().all(|ratio| (0.99..=1.01).contains(ratio)),
            "{checkpoint:?}, fused {fused}: {ratios:?}"
        );
    }
}

/// `FusedBackward` computes the softmax again in backward, which is no forward pass.
#[test]
fn gradients_of_a_fused_attention_are_gradients() {
    fn gradient_bytes<B: AutodiffBackend<Device = MetaDevice>>() -> u64 {
        let device = MetaDevice::default();
        let layer = |_| {
            LinearConfig::new(64, 64)
                .with_bias(false)
                .init::<B>(&device)
        };
        let mut optimizer = AdamWConfig::new().init::<B, Vec<Linear<B>>>();
        let step = |model: Vec<Linear<B>>| {
            let x = Tensor::<B, 3>::zeros([1, 4, 64], &device);
            let heads = |layer: &Linear<B>| {
                let y = layer.forward(x.clone());
                y.reshape([1, 4, 2, 32]).swap_dims(1, 2)
            };
            let [query, key, value] = [0, 1, 2].map(|nth| heads(&model[nth]));
            let y = attention(query, key, value, None, None, Default::default());
            let gradients = GradientsParams::from_grads(y.sum().backward(), &model);
            optimizer.step(1e-3, model, gradients)
        };
        let model = (0..3).map(layer).collect();
        let (estimate, _) = estimate_step::<B, _>(model, step);
        estimate.bytes_of(Kind::Gradient)
    }
    let _turn = turn();
    let fused = gradient_bytes::<FusedBackward<Autodiff<Meta>>>();
    assert!(fused > 0);
    assert_eq!(fused, gradient_bytes::<Autodiff<Meta>>());
}

#[test]
fn an_empty_device_starts_with_nothing() {
    let (estimate, _) = estimate_run(MetaDevice::new(9), || {
        Tensor::<Meta, 1>::ones([1000], &MetaDevice::new(9)).sum()
    });
    assert_eq!((estimate.start_bytes, estimate.peak_bytes), (0, 4004));
    assert_eq!(estimate.bytes_in_use, [0, 4000, 4004, 4]);
}

#[test]
fn gpt_with_scopes() {
    let _turn = turn();
    once(&Gpt::new(3, Checkpoint::Block))
        .check::<Autodiff<Remat<Flex>>, Autodiff<Remat<Meta>>>("gpt, every block recomputed");
}

#[test]
fn gpt_with_a_budget() {
    let _turn = turn();
    let program = Gpt::new(3, Checkpoint::None);
    let case = Case {
        budget_bytes: Some(24 << 20),
        ..once(&program)
    };
    case.check::<Autodiff<Remat<Flex>>, Autodiff<Remat<Meta>>>("gpt, a budget");
}

/// What a budget and a window hold together.
#[test]
fn encoder_decoder_with_a_budget_of_two_micro_batches() {
    let _turn = turn();
    let program = EncoderDecoder::new(2);
    let case = Case {
        micro_batches: 2,
        budget_bytes: Some(20 << 20),
        ..once(&program)
    };
    case.check::<Autodiff<Remat<Flex>>, Autodiff<Remat<Meta>>>(
        "encoder and decoder, two micro-batches, a budget",
    );
}

/// An estimate's evictions are those of the real run.
#[test]
fn replays_under_a_budget_are_those_of_the_real_run() {
    let _turn = turn();
    for micro_batches in [1, 2] {
        let program = EncoderDecoder::new(2);
        let case = Case {
            micro_batches,
            budget_bytes: Some(20 << 20),
            ..once(&program)
        };
        let real = case.run::<Autodiff<Remat<Flex>>, _>(&Default::default(), |model, step| {
            let model = step(model);
            let before = RematStats::of_thread();
            drop(step(model));
            let after = RematStats::of_thread();
            (
                after.replayed_operations - before.replayed_operations,
                after.searched_tensors - before.searched_tensors,
            )
        });
        assert!(real.0 > 0 && real.1 > 0);
        let Estimate {
            replayed_operations,
            searched_tensors,
            ..
        } = case.estimate::<Autodiff<Remat<Meta>>>();
        let estimated = (replayed_operations, searched_tensors);
        assert_eq!(estimated, real, "{micro_batches}");
    }
}

/// Optimizers compute their state before they touch its parameter.
#[test]
fn state_has_the_name_of_its_parameter() {
    fn check(optimizer: impl Optimizer<Pair, B>, per_parameter: usize) {
        let mut optimizer = optimizer;
        let device = MetaDevice::default();
        let layer = |input, output| LinearConfig::new(input, output).init::<B>(&device);
        let model: Pair = vec![layer(48, 32), layer(32, 16)];
        let (estimate, _) = estimate_step::<B, _>(model, |model| {
            let x = Tensor::<B, 2>::zeros([4, 48], &device);
            let y = model.iter().fold(x, |x, layer| layer.forward(x));
            let gradients = GradientsParams::from_grads(y.sum().backward(), &model);
            optimizer.step(1e-3, model, gradients)
        });
        let state = |holder: &&Holder| holder.kind == Kind::OptimizerState;
        let mut found: Vec<_> = estimate.holders.iter().filter(state).collect();
        found.sort_by_key(|holder| &holder.owner);
        let found: Vec<_> = found
            .into_iter()
            .map(|holder| (holder.owner.as_str(), holder.bytes as usize))
            .collect();
        let bytes = |elements| 4 * per_parameter * elements;
        let expected = [
            ("0.bias", bytes(32)),
            ("0.weight", bytes(48 * 32)),
            ("1.bias", bytes(16)),
            ("1.weight", bytes(32 * 16)),
        ];
        assert_eq!(found, expected, "{estimate}");
    }
    type B = Autodiff<Meta>;
    type Pair = Vec<Linear<B>>;
    let _turn = turn();
    check(AdamWConfig::new().init::<B, Pair>(), 2);
    check(
        AdamWConfig::new().with_weight_decay(0.0).init::<B, Pair>(),
        2,
    );
    let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    check(momentum.init::<B, Pair>(), 1);
}

#[test]
fn gpt_in_bf16() {
    let _turn = turn();
    once(&Gpt::new(3, Checkpoint::None))
        .check::<Autocast<Autodiff<Flex>, Bf16>, Autocast<Autodiff<Meta>, Bf16>>("gpt, bf16");
}

#[test]
fn encoder_decoder_in_f16() {
    let _turn = turn();
    once(&EncoderDecoder::new(2))
        .check::<Autocast<Autodiff<Flex>, F16>, Autocast<Autodiff<Meta>, F16>>(
            "encoder and decoder, f16",
        );
}

#[test]
fn encoder_decoder() {
    let _turn = turn();
    once(&EncoderDecoder::new(2)).check::<Autodiff<Flex>, Autodiff<Meta>>("encoder and decoder");
}

#[test]
fn cnn() {
    let _turn = turn();
    once(&Cnn(16)).check::<Autodiff<Flex>, Autodiff<Meta>>("cnn");
}

#[test]
fn lstm() {
    let _turn = turn();
    once(&Recurrent(32)).check::<Autodiff<Flex>, Autodiff<Meta>>("lstm");
}

#[test]
fn mlp() {
    let _turn = turn();
    once(&Mlp(512)).check::<Autodiff<Flex>, Autodiff<Meta>>("mlp");
}
