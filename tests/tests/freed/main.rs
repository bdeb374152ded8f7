//! Evicted tensors are freed: the tests read the bytes in use, as the runtime below the backend
//! counts them; on Flex those of the heap.
//!
//! The tests run one at a time, because they share the process's heap.

mod dead;
mod dropout;
mod leaks;
mod less;
mod loss;

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor};
use burn_checkpoint::{InstalledBudget, MemoryBudget};
use examples::backend::BackendName;
use examples::gpt::loader::TokenBatch;
use examples::gpt::model::{Gpt, GptConfig};
use examples::pools::Pools;
use examples::training::recompute::Checkpoint;
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Locks the heap for one test.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The counters of an inner backend.
fn counters<I: Backend>() -> BackendName {
    match I::name(&I::Device::default()) {
        _ if tests::is_vulkan::<I>() => BackendName::Vulkan,
        name if name.contains("cuda") => BackendName::Cuda,
        _ => BackendName::Flex,
    }
}

/// Bytes that are in use once all work of this thread is done.
fn in_use<B: Backend>(counters: BackendName) -> u64 {
    B::sync(&B::Device::default()).expect("the device works");
    match counters {
        BackendName::Flex => HEAP.current_usage() as u64,
        device => {
            let pools = Pools::of_this_thread(device).read();
            pools.expect("the runtime tells").in_use_bytes
        }
    }
}

/// The most bytes in use during a task that waits for the device: exact on the heap, on a device at
/// least what it was (see [`Pools::most_reserved`]).
fn most_in_use(counters: BackendName, task: impl FnOnce() + Send) -> u64 {
    match counters {
        BackendName::Flex => {
            HEAP.reset_peak_usage();
            task();
            HEAP.peak_usage() as u64
        }
        device => {
            let pools = Pools::of_this_thread(device);
            pools.most_reserved(task).expect("the runtime tells")
        }
    }
}

/// Bytes that a device reserves, or are on the heap, before a task.
fn idle<B: Backend>(counters: BackendName) -> u64 {
    in_use::<B>(counters);
    most_in_use(counters, || ())
}

/// How activations are held: by the model's scopes, or by a budget of so many bytes.
#[derive(Clone, Copy, Debug)]
enum Hold {
    Scopes(Checkpoint),
    Budget(u64),
}

impl Hold {
    fn checkpoint(self) -> Checkpoint {
        match self {
            Self::Scopes(checkpoint) => checkpoint,
            Self::Budget(_) => Checkpoint::None,
        }
    }

    fn install(self) -> Option<InstalledBudget> {
        match self {
            Self::Scopes(_) => None,
            Self::Budget(bytes) => Some(MemoryBudget::bytes(bytes).install()),
        }
    }
}

/// A small GPT and its batch.
struct Training<B: Backend> {
    model: Gpt<B>,
    batch: TokenBatch<B>,
}

impl<B: Backend> Training<B> {
    fn new(config: &GptConfig, checkpoint: Checkpoint, sequences: usize) -> Self {
        let device = B::Device::default();
        let tokens = Tensor::<B, 2, Int>::zeros([sequences, config.context], &device);
        Self {
            model: config.clone().with_checkpoint(checkpoint).init(&device),
            batch: TokenBatch {
                inputs: tokens.clone(),
                targets: tokens,
            },
        }
    }

    fn loss(&self) -> Tensor<B, 1> {
        self.model.loss(self.batch.clone())
    }
}

impl<B: AutodiffBackend> Training<B> {
    /// A GPT of six blocks after its first pass, which chooses kernels and makes all lasting
    /// allocations.
    fn warm(hold: Hold) -> (Self, Option<InstalledBudget>) {
        let config = GptConfig::new(32, 6, 2, 32).with_vocabulary(32);
        let training = Self::new(&config, hold.checkpoint(), 8);
        let budget = hold.install();
        drop(training.loss().backward());
        (training, budget)
    }

    /// Takes `steps` steps with AdamW; `done` is called after each.
    fn steps(self, steps: usize, mut done: impl FnMut(usize)) {
        let mut optimizer = AdamWConfig::new().init();
        let Self { mut model, batch } = self;
        for step in 0..steps {
            let gradients = model.loss(batch.clone()).backward();
            let gradients = GradientsParams::from_grads(gradients, &model);
            model = optimizer.step(1e-3, model, gradients);
            done(step);
        }
    }
}
