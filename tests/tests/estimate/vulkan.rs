//! The estimate of a step against the memory pools of CubeCL on Vulkan.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;

use burn::tensor::backend::Backend;
use burn_backend::StreamId;
use burn_checkpoint::ReadsInPlace;
use burn_estimate::{CubePools, estimate_on, estimate_run};
use burn_zero::{Sharded, SimulatedRank, Stage};
use examples::backend::BackendName;
use examples::pools::{PoolBytes, Pools};
use tests::after::{After, after_each};
use tests::{Vulkan, VulkanFusion};

use super::ranks::{Layers, PARAMETERS, Places, WIDTH, with_rank};
use super::*;

fn read() -> PoolBytes {
    let pools = Pools::of_this_thread(BackendName::Vulkan);
    pools.read().expect("the runtime tells")
}

/// Waits until the device has allocated all that the host has asked for.
fn keep_up() {
    let _in_order = read();
}

/// The bytes in use when Fusion has run what it runs without being asked.
fn read_settled() -> u64 {
    // A stream without operations.
    let nothing = StreamId { value: u64::MAX };
    nothing.executes(|| VulkanFusion::sync(&Default::default()).expect("the queue's thread runs"));
    read().in_use_bytes
}

fn layout() -> CubePools {
    let pools = Pools::of_this_thread(BackendName::Vulkan);
    pools.layout().expect("the runtime tells")
}

/// What a program takes on a device.
struct Taken {
    /// The operations of its second update, and the bytes in use after each.
    operations: Vec<(&'static str, u64)>,
    /// Bytes of all pages afterwards.
    reserved: u64,
}

impl Taken {
    /// The most bytes in use after an operation.
    fn most(&self) -> u64 {
        let bytes = self.operations.iter().map(|(_, bytes)| *bytes);
        bytes.max().expect("there are operations")
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Checks that what is reserved is within a page of the estimate.
fn check_pages(name: &str, estimated: u64, reserved: u64) {
    /// A page of the smallest pool.
    const PAGE: u64 = 8 << 20;
    assert!(
        estimated.abs_diff(reserved) < PAGE,
        "{name}: {estimated} bytes in pages, {reserved} reserved"
    );
}

/// Runs a task on a thread of its own, which has a stream of its own, and so new pools.
fn on_a_thread<R: Send>(task: impl FnOnce() -> R + Send) -> R {
    let done = thread::scope(|scope| scope.spawn(task).join());
    done.expect("the task ends")
}

/// What a step takes in which the device keeps up with the host: elsewhere what the host has
/// dropped may be free before what it made earlier is allocated.
fn taken<M>(
    model: M,
    step: &mut dyn FnMut(M) -> M,
    in_use: impl Fn() -> u64 + Copy + 'static,
) -> Taken {
    let _reads = ReadsInPlace::on();
    let keep_up = move |_| {
        in_use();
    };
    let model = after_each(keep_up, || step(model));
    let seen = Rc::new(RefCell::new(Vec::new()));
    let then = seen.clone();
    // Another stream has pools of its own.
    let stream = StreamId::current();
    let see = move |operation| {
        if StreamId::current() == stream {
            then.borrow_mut().push((operation, in_use()));
        }
    };
    drop(after_each(see, || step(model)));
    Taken {
        operations: seen.take(),
        reserved: read().reserved_bytes,
    }
}

/// Checks that so many bytes are in use after every operation as the estimate has, and tells how
/// far they differ at most.
fn check_each(name: &str, real: &Taken, estimated: &Taken) -> f64 {
    let operations = |taken: &Taken| -> Vec<_> {
        let operations = taken.operations.iter();
        operations.map(|(operation, _)| *operation).collect()
    };
    assert_eq!(operations(real), operations(estimated), "{name}");
    let pairs = real.operations.iter().zip(&estimated.operations);
    // What is read may leave the device a moment later.
    let pairs = pairs.filter(|((operation, _), _)| *operation != "float_into_data");
    let differences = pairs.map(|((operation, bytes), (_, estimated))| {
        // Slices of pages begin at multiples of 32 bytes.
        let differs = estimated.abs_diff(*bytes) as f64 / (*bytes).max(1 << 16) as f64;
        assert!(
            differs < 1e-3,
            "{name}, {operation}: {estimated} bytes estimated, {bytes} in use"
        );
        differs
    });
    differences.fold(0.0, f64::max)
}

/// The bytes in use on a device without memory, beyond those before.
fn in_use_on(meta: MetaDevice) -> impl Fn() -> u64 + Copy {
    // What waits in the queue may free tensors of an earlier run.
    Meta::sync(&meta).expect("the queue runs");
    let before = meta.bytes_in_use();
    move || meta.bytes_in_use() - before
}

impl<P: Program + Sync> Case<'_, P> {
    /// Checks the most bytes in use with Fusion.
    fn check_fused<F, E>(&self, name: &str)
    where
        F: AutodiffBackend,
        E: AutodiffBackend<Device = MetaDevice>,
    {
        let real = on_a_thread(|| {
            self.run::<F, _>(&F::Device::default(), |model, step| {
                taken(model, step, read_settled)
            })
        });
        let meta = MetaDevice::wgpu(0).fused();
        let in_use = in_use_on(meta);
        let estimated = self.run::<E, _>(&meta, |model, step| taken(model, step, in_use));
        check_most(name, &real, &estimated);
        let estimate = self.run::<E, _>(&meta, |model, step| {
            estimate_on::<E, _>(meta, model, step).0
        });
        // Within what the queue runs at once more is in use than afterwards.
        let within = estimate.peak_bytes as f64 / real.most() as f64;
        let pages = estimate.reserved_bytes(&layout()).expect("no large tensor");
        println!(
            "{name}, with Fusion: {within:.4} of them at the estimated peak; {:.2} MiB in pages, {:.2} reserved",
            mib(pages),
            mib(real.reserved)
        );
        assert!(within > 0.98, "{name}: {within}");
        check_pages(name, pages, real.reserved);
    }

    /// Checks the bytes in use after each operation, and that the pools reserve as much as the
    /// estimate says, but for a page, and the few MiB that data of the host pass through.
    fn check_on_vulkan<F, E>(&self, name: &str)
    where
        F: AutodiffBackend,
        E: AutodiffBackend<Device = MetaDevice>,
    {
        let real = on_a_thread(|| {
            self.run::<F, _>(&F::Device::default(), |model, step| {
                taken(model, step, || read().in_use_bytes)
            })
        });
        let meta = MetaDevice::wgpu(0);
        let in_use = in_use_on(meta);
        let estimated = self.run::<E, _>(&meta, |model, step| taken(model, step, in_use));
        let furthest = check_each(name, &real, &estimated);
        let estimate = self.run::<E, _>(&meta, |model, step| {
            estimate_on::<E, _>(meta, model, step).0
        });
        let pages = estimate.reserved_bytes(&layout()).expect("no large tensor");
        println!(
            "{name}: {} operations, after each within {furthest:.1e}; {:.2} MiB at the peak, {} in pages, {:.2} reserved",
            real.operations.len(),
            mib(estimate.peak_bytes),
            mib(pages),
            mib(real.reserved)
        );
        check_pages(name, pages, real.reserved);
    }
}

/// Fusion leaves out tensors between the operations that it joins, and runs operations later.
#[test]
fn fused_programs_take_what_is_estimated() {
    type Plain = Autodiff<After<VulkanFusion>>;
    type Recomputing = Autodiff<Remat<After<VulkanFusion>>>;
    let _turn = turn();
    once(&Mlp(256)).check_fused::<Plain, PlainMeta>("wide layers with dropout");
    once(&Cnn(4)).check_fused::<Plain, PlainMeta>("convolutions, batch norm, pooling");
    once(&Recurrent(8)).check_fused::<Plain, PlainMeta>("LSTM");
    once(&Gpt::small(2, Checkpoint::None)).check_fused::<Plain, PlainMeta>("GPT");
    let recomputed = [
        ("GPT, every block recomputed", Checkpoint::Block),
        ("GPT, every block offloaded", Checkpoint::Offload),
    ];
    for (name, checkpoint) in recomputed {
        once(&Gpt::small(2, checkpoint)).check_fused::<Recomputing, RecomputingMeta>(name);
    }
    once(&EncoderDecoder::small(1)).check_fused::<Autocast<Plain, F16>, Autocast<PlainMeta, F16>>(
        "encoder and decoder in f16",
    );
    let program = EncoderDecoder::small(1);
    let case = Case {
        micro_batches: 2,
        budget_bytes: Some(3 << 20),
        ..once(&program)
    };
    case.check_fused::<Recomputing, RecomputingMeta>(
        "encoder and decoder, two micro-batches, a budget",
    );
}

/// Checks the most bytes in use with Fusion, and tells how far those after each operation are from
/// the estimate.
fn check_most(name: &str, real: &Taken, estimated: &Taken) {
    let pairs = || real.operations.iter().zip(&estimated.operations);
    let same = pairs().filter(|(real, estimated)| real.1.abs_diff(estimated.1) * 1000 <= real.1);
    let [most, expected] = [real, estimated].map(Taken::most);
    let ratio = expected as f64 / most as f64;
    println!(
        "{name}, with Fusion: {most} bytes at most, {ratio:.4} of them estimated; after {} of {} operations within 0.1 %",
        same.count(),
        real.operations.len()
    );
    assert!((0.98..=1.02).contains(&ratio), "{name}: {ratio}");
}

/// What a rank at stage 3 holds of [`Layers`] at most: its part of parameters, gradients and
/// moments, two units in use, the gradients of one, and the inputs and outputs of layers.
fn share_and_units(ranks: u64) -> u64 {
    const FLOAT_BYTES: u64 = 4;
    let unit = PARAMETERS / 4 * FLOAT_BYTES;
    let activations = 2 * 4 * 4 * WIDTH as u64 * FLOAT_BYTES;
    4 * FLOAT_BYTES * PARAMETERS / ranks + 3 * unit + activations
}

/// One rank of eight in each stage, and one rank with all on the host.
#[test]
fn ranks_take_what_is_estimated() {
    fn check<P: Program + Sync>(
        name: &str,
        program: &P,
        stage: Stage,
        ranks: usize,
        offload: bool,
    ) {
        let places = Places::of(offload);
        let group = || Arc::new(SimulatedRank::new(0, ranks).expect("a rank of some"));
        fn real<I: Backend, P: Program + Sync>(
            program: &P,
            stage: Stage,
            group: Arc<SimulatedRank>,
            places: Places,
        ) -> Taken {
            let device = I::Device::default();
            on_a_thread(|| {
                type B<I> = Sharded<Autodiff<Remat<After<I>>>>;
                with_rank::<B<I>, _, _>(program, &device, stage, group, places, |model, step| {
                    taken(model, step, read_settled)
                })
            })
        }
        let meta = MetaDevice::wgpu(0);
        let in_use = in_use_on(meta);
        type E = Sharded<RecomputingMeta>;
        let estimated =
            with_rank::<E, _, _>(program, &meta, stage, group(), places, |model, step| {
                taken(model, step, in_use)
            });
        let name = format!("{name}, {ranks} ranks, {stage:?}, offload {offload}");
        let fused = real::<VulkanFusion, _>(program, stage, group(), places);
        let fused_meta = meta.fused();
        let in_use = in_use_on(fused_meta);
        let estimated_fused = with_rank::<E, _, _>(
            program,
            &fused_meta,
            stage,
            group(),
            places,
            |model, step| taken(model, step, in_use),
        );
        check_most(&name, &fused, &estimated_fused);
        let plain = real::<Vulkan, _>(program, stage, group(), places);
        let furthest = check_each(&name, &plain, &estimated);
        println!(
            "{name}: {} operations, after each within {furthest:.1e}, at most {} bytes",
            plain.operations.len(),
            plain.most()
        );
        if stage == Stage::Parameters && ranks > 1 {
            let formula = share_and_units(ranks as u64);
            for taken in [&plain, &fused] {
                let most = taken.most();
                assert!(most * 100 <= formula * 102, "{name}: {most} of {formula}");
            }
        }
    }
    let _turn = turn();
    for stage in [
        Stage::DataParallel,
        Stage::OptimizerState,
        Stage::Gradients,
        Stage::Parameters,
    ] {
        check("layers", &Layers, stage, 8, false);
    }
    check(
        "GPT",
        &Gpt::small(2, Checkpoint::None),
        Stage::Parameters,
        1,
        true,
    );
}

type Plain = Autodiff<After<Vulkan>>;
type PlainMeta = Autodiff<After<Meta>>;
type Recomputing = Autodiff<Remat<After<Vulkan>>>;
type RecomputingMeta = Autodiff<Remat<After<Meta>>>;

#[test]
fn layers_take_what_is_estimated() {
    let _turn = turn();
    once(&Mlp(256)).check_on_vulkan::<Plain, PlainMeta>("wide layers with dropout");
    once(&Cnn(4)).check_on_vulkan::<Plain, PlainMeta>("convolutions, batch norm, pooling");
    once(&Recurrent(8)).check_on_vulkan::<Plain, PlainMeta>("LSTM");
}

#[test]
fn transformers_take_what_is_estimated() {
    let _turn = turn();
    once(&Gpt::small(2, Checkpoint::None)).check_on_vulkan::<Plain, PlainMeta>("GPT");
    once(&Gpt::small(2, Checkpoint::Block))
        .check_on_vulkan::<Recomputing, RecomputingMeta>("GPT, every block recomputed");
    once(&Gpt::small(2, Checkpoint::Offload))
        .check_on_vulkan::<Recomputing, RecomputingMeta>("GPT, every block offloaded");
    once(&EncoderDecoder::small(1))
        .check_on_vulkan::<Autocast<Plain, F16>, Autocast<PlainMeta, F16>>(
            "encoder and decoder in f16",
        );
    let program = EncoderDecoder::small(1);
    let case = Case {
        micro_batches: 2,
        budget_bytes: Some(3 << 20),
        ..once(&program)
    };
    case.check_on_vulkan::<Recomputing, RecomputingMeta>(
        "encoder and decoder, two micro-batches, a budget",
    );
}

/// Tensors that come and go take the pages that CubeCL reserves for them.
#[test]
fn pages_of_tensors_are_those_of_the_device() {
    fn come_and_go<B: Backend>(device: &B::Device, keep_up: impl Fn()) {
        let mut alive: Vec<Tensor<B, 1>> = Vec::new();
        let mut random = 1_u64;
        for _ in 0..400 {
            random = random
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let number = (random >> 33) as usize;
            // From 1 KiB to 32 MiB.
            let elements = (1 << (8 + number % 16)) + number / 16 % 100;
            alive.push(Tensor::empty([elements], device));
            keep_up();
            if alive.len() > 8 {
                drop(alive.swap_remove(number / 7 % 8));
            }
        }
    }
    let _turn = turn();
    let reserved = on_a_thread(|| {
        let device = Default::default();
        (0..3).for_each(|_| come_and_go::<Vulkan>(&device, keep_up));
        read().reserved_bytes
    });
    let meta = MetaDevice::wgpu(1);
    let (estimate, ()) = estimate_run(meta, || come_and_go::<Meta>(&meta, || ()));
    assert_eq!(estimate.reserved_bytes(&layout()), Some(reserved));
}
