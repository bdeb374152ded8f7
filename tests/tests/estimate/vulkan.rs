//! The estimate of a step against the memory pools of CubeCL on Vulkan.

use std::cell::RefCell;
use std::rc::Rc;
use std::thread;

use burn::tensor::backend::Backend;
use burn_estimate::{CubePools, estimate_on, estimate_run};
use examples::backend::BackendName;
use examples::pools::{PoolBytes, Pools};
use tests::Vulkan;
use tests::after::{After, after_each};

use super::*;

fn read() -> PoolBytes {
    let pools = Pools::of_this_thread(BackendName::Vulkan);
    pools.read().expect("the runtime tells")
}

/// Waits until the device has allocated all that the host has asked for.
fn keep_up() {
    let _in_order = read();
}

fn layout() -> CubePools {
    let pools = Pools::of_this_thread(BackendName::Vulkan);
    pools.layout().expect("the runtime tells")
}

/// What a program takes on a device.
struct Taken {
    /// The operations of its third update, and the bytes in use after each.
    operations: Vec<(&'static str, u64)>,
    /// Bytes of all pages afterwards.
    reserved: u64,
}

/// Runs a task on a thread of its own, which has a stream of its own, and so new pools.
fn on_a_thread<R: Send>(task: impl FnOnce() -> R + Send) -> R {
    let done = thread::scope(|scope| scope.spawn(task).join());
    done.expect("the task ends")
}

impl<P: Program + Sync> Case<'_, P> {
    fn taken<B: AutodiffBackend>(
        &self,
        device: &B::Device,
        in_use: impl Fn() -> u64 + Copy + 'static,
    ) -> Taken {
        self.run::<B, _>(device, |model, step| {
            // The device keeps up with the host: elsewhere what the host has dropped may be free before what it made earlier is allocated.
            let model = after_each(
                move |_| {
                    in_use();
                },
                || {
                    let model = step(model);
                    step(model)
                },
            );
            let seen = Rc::new(RefCell::new(Vec::new()));
            let then = seen.clone();
            let see = move |operation| then.borrow_mut().push((operation, in_use()));
            drop(after_each(see, || step(model)));
            Taken {
                operations: seen.take(),
                reserved: 0,
            }
        })
    }

    /// Checks that so many bytes are in use on the device after every operation as the estimate has, and that its pools reserve as much,
    /// but for a page, and the few MiB that data of the host pass through.
    fn check_on_vulkan<F, E>(&self, name: &str)
    where
        F: AutodiffBackend,
        E: AutodiffBackend<Device = MetaDevice>,
    {
        let real = on_a_thread(|| {
            let taken = self.taken::<F>(&F::Device::default(), || read().in_use_bytes);
            // Pages stay.
            Taken {
                reserved: read().reserved_bytes,
                ..taken
            }
        });
        let meta = MetaDevice::wgpu(0);
        let before = meta.bytes_in_use();
        let estimated = self.taken::<E>(&meta, move || meta.bytes_in_use() - before);
        let operations = |taken: &Taken| -> Vec<_> {
            let operations = taken.operations.iter();
            operations.map(|(operation, _)| *operation).collect()
        };
        assert_eq!(operations(&real), operations(&estimated), "{name}");
        let mut furthest: f64 = 0.0;
        for ((operation, bytes), (_, estimated)) in
            real.operations.iter().zip(&estimated.operations)
        {
            let differs = estimated.abs_diff(*bytes) as f64 / *bytes as f64;
            assert!(
                differs < 1e-3,
                "{name}, {operation}: {estimated} bytes estimated, {bytes} in use"
            );
            furthest = furthest.max(differs);
        }
        let estimate = self.run::<E, _>(&meta, |model, step| {
            estimate_on::<E, _>(meta, model, step).0
        });
        let pages = estimate.reserved_bytes(&layout()).expect("no large tensor");
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let (peak, pages, reserved) = (mib(estimate.peak_bytes), mib(pages), mib(real.reserved));
        println!(
            "{name}: {} operations, after each within {furthest:.1e}; {peak:.2} MiB at the peak, {pages} in pages, {reserved:.2} reserved",
            real.operations.len()
        );
        // A page of the smallest pool.
        const PAGE: f64 = 8.0;
        assert!(
            (pages - PAGE..pages + PAGE).contains(&reserved),
            "{name}: {pages} MiB in pages, {reserved} reserved"
        );
    }
}

type Plain = Autodiff<After<Vulkan>>;
type PlainMeta = Autodiff<After<Meta>>;
type Recomputing = Autodiff<Remat<After<Vulkan>>>;
type RecomputingMeta = Autodiff<Remat<After<Meta>>>;

#[test]
fn layers_take_what_is_estimated() {
    let _turn = turn();
    once(&Mlp).check_on_vulkan::<Plain, PlainMeta>("wide layers with dropout");
    once(&Cnn).check_on_vulkan::<Plain, PlainMeta>("convolutions, batch norm, pooling");
    once(&Recurrent).check_on_vulkan::<Plain, PlainMeta>("LSTM");
}

#[test]
fn transformers_take_what_is_estimated() {
    let _turn = turn();
    once(&Gpt(Checkpoint::None)).check_on_vulkan::<Plain, PlainMeta>("GPT");
    once(&Gpt(Checkpoint::Block))
        .check_on_vulkan::<Recomputing, RecomputingMeta>("GPT, every block recomputed");
    once(&EncoderDecoder).check_on_vulkan::<Autocast<Plain, F16>, Autocast<PlainMeta, F16>>(
        "encoder and decoder in f16",
    );
    let case = Case {
        micro_batches: 2,
        budget_bytes: Some(20 << 20),
        ..once(&EncoderDecoder)
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
