//! Measuring the blocks of a chain.

use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};

use crate::node::bytes;
use crate::plan::{BlockProfile, PlanError, Profile, TailProfile};
use crate::policy::{Policy, SavePolicy};
use crate::stats::RematStats;
use crate::{checkpoint, checkpoint_with, context};

/// How often everything runs; the shortest times count.
const ROUNDS: usize = 3;

/// Runs every block of a chain forward and backward, alone, and says what it takes: the input of
/// [`plan`](crate::plan::plan).
///
/// `x` is a typical input of the first block; what a block gives is the input of the next. Bytes are those of tensors that
/// [`Remat`](crate::Remat) counts, the same in every run: not the scratch memory inside of an operation, nor what an
/// allocator keeps to itself, so leave a margin to the limit of a device. Times are the shortest of three. What follows
/// the chain is measured by [`profile_tail`].
///
/// # Cost
///
/// Seven forward and six backward passes over the chain, one block's memory at a time. The thread's [`RematStats`] begin anew. A
/// budget of the thread is not in force meanwhile, so what it counts stays as it is and the profile comes on top.
///
/// # Errors
///
/// [`PlanError::NoRemat`] if a block's backend has no `Remat` in it.
pub fn profile_chain<B: AutodiffBackend, const D: usize, Block>(
    blocks: &[Block],
    x: Tensor<B, D>,
    forward: impl Fn(&Block, Tensor<B, D>) -> Tensor<B, D>,
) -> Result<Profile, PlanError> {
    context::without_budget(|| of_chain(blocks, x, forward))
}

fn of_chain<B: AutodiffBackend, const D: usize, Block>(
    blocks: &[Block],
    x: Tensor<B, D>,
    forward: impl Fn(&Block, Tensor<B, D>) -> Tensor<B, D>,
) -> Result<Profile, PlanError> {
    let mut x = x.detach();
    let mut profile = Profile {
        base_bytes: bytes_of(&x),
        ..Profile::default()
    };
    for (number, block) in blocks.iter().enumerate() {
        let subject = Subject {
            x,
            forward: |x| forward(block, x),
        };
        let (measured, out) = subject.measure();
        if !context::met() {
            return Err(PlanError::NoRemat { block: number });
        }
        profile.blocks.push(measured);
        x = out;
    }
    Ok(profile)
}

/// Runs what follows a chain, from the chain's output to the loss, forward and backward and says what it takes: the
/// [`Profile::tail`].
///
/// # Cost
///
/// One pass. The thread's [`RematStats`] begin anew, and a budget is not in force meanwhile.
pub fn profile_tail<B: AutodiffBackend, const D: usize>(
    x: Tensor<B, D>,
    loss: impl FnOnce(Tensor<B, D>) -> Tensor<B, 1>,
) -> TailProfile {
    context::without_budget(|| of_tail(x, loss))
}

fn of_tail<B: AutodiffBackend, const D: usize>(
    x: Tensor<B, D>,
    loss: impl FnOnce(Tensor<B, D>) -> Tensor<B, 1>,
) -> TailProfile {
    let device = x.device();
    let x = x.detach().require_grad();
    let mut profile = TailProfile::default();
    counted(|| {
        let input_bytes = bytes_of(&x);
        let (grads, pass) = measured::<B, _>(&device, || loss(x.clone()).backward());
        drop(grads);
        profile = TailProfile {
            peak_bytes: pass.peak_bytes.saturating_sub(pass.before_bytes),
            gradient_bytes: pass
                .after_bytes
                .saturating_sub(pass.before_bytes + input_bytes),
        };
    });
    profile
}

/// Runs something in a scope that evicts nothing: in a scope all tensors are counted.
fn counted(run: impl FnOnce()) {
    checkpoint_with(Policy::per_operation(|_| SavePolicy::Keep), run);
}

/// A block and its input.
struct Subject<B: Backend, const D: usize, F> {
    x: Tensor<B, D>,
    forward: F,
}

impl<B: AutodiffBackend, const D: usize, F> Subject<B, D, F>
where
    F: Fn(Tensor<B, D>) -> Tensor<B, D>,
{
    /// What the block takes, and what it gives.
    fn measure(self) -> (BlockProfile, Tensor<B, D>) {
        let out = (self.forward)(self.x.clone()).detach();
        let gradient = out.ones_like();
        let mut profile = BlockProfile::default();
        let mut shortest = [u64::MAX; 3];
        for _ in 0..ROUNDS {
            let [plain, scoped] =
                [Mode::Plain, Mode::Scope].map(|mode| self.run(mode, gradient.clone()));
            profile = BlockProfile {
                kept_bytes: scoped
                    .left_bytes
                    .saturating_sub(scoped.profile.output_bytes),
                ..plain.profile
            };
            let times = [plain.forward, plain.backward, scoped.backward];
            for (shortest, time) in shortest.iter_mut().zip(times) {
                *shortest = (*shortest).min(time.as_nanos() as u64);
            }
        }
        let [forward_ns, backward_ns, with_replay_ns] = shortest;
        profile.forward_ns = forward_ns;
        profile.backward_ns = backward_ns;
        profile.replay_ns = with_replay_ns.saturating_sub(backward_ns).min(forward_ns);
        (profile, out)
    }

    /// One forward and one backward pass.
    fn run(&self, mode: Mode, gradient: Tensor<B, D>) -> Run {
        let device = self.x.device();
        let x = self.x.clone().detach().require_grad();
        let mut run = None;
        counted(|| {
            let (out, forward) = measured::<B, _>(&device, || match mode {
                Mode::Plain => (self.forward)(x.clone()),
                Mode::Scope => checkpoint(|| (self.forward)(x.clone())),
            });
            let output_bytes = bytes_of(&out);
            // Not the plain sum, whose gradient would be a view of one number.
            let weighted = || (out * gradient).sum().backward();
            let (grads, backward) = measured::<B, _>(&device, weighted);
            drop(grads);
            let before_bytes = forward.before_bytes;
            let left_bytes = forward.after_bytes.saturating_sub(before_bytes);
            run = Some(Run {
                forward: forward.time,
                backward: backward.time,
                left_bytes,
                profile: BlockProfile {
                    output_bytes,
                    tape_bytes: left_bytes,
                    forward_peak_bytes: forward.peak_bytes.saturating_sub(before_bytes),
                    backward_peak_bytes: backward.peak_bytes.saturating_sub(before_bytes),
                    gradient_bytes: backward
                        .after_bytes
                        .saturating_sub(before_bytes + bytes_of(&x)),
                    ..BlockProfile::default()
                },
            });
        });
        run.expect("a scope runs what it is given")
    }
}

#[derive(Clone, Copy)]
enum Mode {
    /// All that the forward pass leaves stays.
    Plain,
    /// It is evicted and replayed.
    Scope,
}

/// What one forward and backward pass took.
struct Run {
    forward: Duration,
    backward: Duration,
    left_bytes: u64,
    /// Without times.
    profile: BlockProfile,
}

/// Live bytes and the time of a pass, all of it. Bytes are those of tensors that are made while it is measured, and may go down where the pass
/// lets go of something.
struct Pass {
    before_bytes: u64,
    peak_bytes: u64,
    after_bytes: u64,
    time: Duration,
}

fn measured<B: Backend, R>(device: &B::Device, pass: impl FnOnce() -> R) -> (R, Pass) {
    synchronize::<B>(device);
    RematStats::reset_thread();
    let before_bytes = context::current_stats().live_bytes;
    let start = Instant::now();
    let result = pass();
    synchronize::<B>(device);
    let time = start.elapsed();
    let RematStats {
        live_bytes: after_bytes,
        peak_bytes,
        ..
    } = context::current_stats();
    let pass = Pass {
        before_bytes,
        peak_bytes,
        after_bytes,
        time,
    };
    (result, pass)
}

fn synchronize<B: Backend>(device: &B::Device) {
    // A backend that cannot run will say so at the next operation that is read; here only a time would be wrong.
    if let Err(error) = B::sync(device) {
        log::warn!("the device could not be waited for, times are wrong: {error}");
    }
}

fn bytes_of<B: Backend, const D: usize>(x: &Tensor<B, D>) -> u64 {
    bytes(x.shape().num_elements(), x.dtype())
}
