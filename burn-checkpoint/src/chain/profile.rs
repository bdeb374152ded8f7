//! Measuring the blocks of a chain.

use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};

use crate::context;
use crate::node::bytes;
use crate::plan::{BlockProfile, PlanError, Profile, TailProfile};
use crate::scope::{checkpoint, keeping};
use crate::stats::RematStats;

/// How often everything runs; the shortest times count.
const ROUNDS: usize = 3;

/// Runs every block of a chain forward and backward, alone, and measures its bytes and times: the input of [`plan`](crate::plan::plan).
///
/// `x` is a typical input of the first block; each block's output is the input of the next. Bytes are those of tensors that
/// [`Remat`](crate::Remat) counts, the same in every run: not the scratch memory inside of an operation, nor what an allocator keeps to
/// itself, so leave a margin to the limit of a device. Times are the shortest of three. What follows the chain is measured by
/// [`profile_tail`].
///
/// # Cost
///
/// Seven forward and six backward passes over the chain, one block's memory at a time. Resets the thread's [`RematStats`]. A budget of the
/// thread is suspended meanwhile: its counters stay as they are, and the profile's bytes come on top.
///
/// # Errors
///
/// [`PlanError::NoRemat`] if a block's backend has no `Remat` in it.
pub fn profile_chain<B: AutodiffBackend, const D: usize, Block>(
    blocks: &[Block],
    x: Tensor<B, D>,
    forward: impl Fn(&Block, Tensor<B, D>) -> Tensor<B, D>,
) -> Result<Profile, PlanError> {
    context::without_budget(|| {
        let mut x = x.detach();
        let mut profile = Profile {
            base_bytes: bytes_of(&x),
            ..Profile::default()
        };
        for (number, block) in blocks.iter().enumerate() {
            let (measured, out) = of_block(&x, |x| forward(block, x));
            if !context::met() {
                return Err(PlanError::NoRemat { block: number });
            }
            profile.blocks.push(measured);
            x = out;
        }
        Ok(profile)
    })
}

/// Runs what follows a chain, from the chain's output to the loss, forward and backward and measures it: the [`Profile::tail`].
///
/// # Cost
///
/// One pass. Resets the thread's [`RematStats`]; a budget is suspended meanwhile.
pub fn profile_tail<B: AutodiffBackend, const D: usize>(
    x: Tensor<B, D>,
    loss: impl FnOnce(Tensor<B, D>) -> Tensor<B, 1>,
) -> TailProfile {
    context::without_budget(|| {
        let device = x.device();
        let x = x.detach().require_grad();
        // In a scope all tensors are counted.
        keeping(|| {
            let before_bytes = context::current_stats().live_bytes;
            let backward = || loss(x.clone()).backward();
            let (grads, pass) = measured::<B, _>(&device, before_bytes, backward);
            drop(grads);
            TailProfile {
                peak_bytes: pass.peak_bytes,
                gradient_bytes: pass.left_bytes.saturating_sub(bytes_of(&x)),
            }
        })
    })
}

/// What a block takes, and its output for `x`.
fn of_block<B: AutodiffBackend, const D: usize>(
    x: &Tensor<B, D>,
    forward: impl Fn(Tensor<B, D>) -> Tensor<B, D>,
) -> (BlockProfile, Tensor<B, D>) {
    let out = forward(x.clone()).detach();
    let gradient = out.ones_like();
    let mut profile = BlockProfile::default();
    let mut shortest = [u64::MAX; 3];
    for _ in 0..ROUNDS {
        let plain = step(x, &gradient, &forward);
        let scoped = step(x, &gradient, |x| checkpoint(|| forward(x)));
        profile = BlockProfile {
            kept_bytes: scoped.tape_bytes.saturating_sub(scoped.output_bytes),
            ..plain
        };
        let times = [plain.forward_ns, plain.backward_ns, scoped.backward_ns];
        for (shortest, time) in shortest.iter_mut().zip(times) {
            *shortest = time.min(*shortest);
        }
    }
    let [forward_ns, backward_ns, with_replay_ns] = shortest;
    let profile = BlockProfile {
        forward_ns,
        backward_ns,
        replay_ns: with_replay_ns.saturating_sub(backward_ns).min(forward_ns),
        ..profile
    };
    (profile, out)
}

/// One forward and one backward pass.
fn step<B: AutodiffBackend, const D: usize>(
    x: &Tensor<B, D>,
    gradient: &Tensor<B, D>,
    forward: impl Fn(Tensor<B, D>) -> Tensor<B, D>,
) -> BlockProfile {
    let device = x.device();
    let x = x.clone().detach().require_grad();
    keeping(|| {
        let before_bytes = context::current_stats().live_bytes;
        let (out, first) = measured::<B, _>(&device, before_bytes, || forward(x.clone()));
        let output_bytes = bytes_of(&out);
        // Not the plain sum, whose gradient would be a view of one number.
        let weighted = || (out * gradient.clone()).sum().backward();
        let (grads, last) = measured::<B, _>(&device, before_bytes, weighted);
        drop(grads);
        BlockProfile {
            output_bytes,
            tape_bytes: first.left_bytes,
            kept_bytes: 0,
            forward_peak_bytes: first.peak_bytes,
            backward_peak_bytes: last.peak_bytes,
            gradient_bytes: last.left_bytes.saturating_sub(bytes_of(&x)),
            forward_ns: first.time.as_nanos() as u64,
            replay_ns: 0,
            backward_ns: last.time.as_nanos() as u64,
        }
    })
}

/// What a whole pass takes. Bytes are those beyond the ones before; they may fall below where the pass drops tensors.
struct Pass {
    peak_bytes: u64,
    left_bytes: u64,
    time: Duration,
}

fn measured<B: Backend, R>(
    device: &B::Device,
    before_bytes: u64,
    pass: impl FnOnce() -> R,
) -> (R, Pass) {
    synchronize::<B>(device);
    RematStats::reset_thread();
    let start = Instant::now();
    let result = pass();
    synchronize::<B>(device);
    let time = start.elapsed();
    let stats = context::current_stats();
    let pass = Pass {
        peak_bytes: stats.peak_bytes.saturating_sub(before_bytes),
        left_bytes: stats.live_bytes.saturating_sub(before_bytes),
        time,
    };
    (result, pass)
}

fn synchronize<B: Backend>(device: &B::Device) {
    // A backend that failed reports it when a result is next read; here only a time would be wrong.
    if let Err(error) = B::sync(device) {
        log::warn!("the device could not be waited for, times are wrong: {error}");
    }
}

fn bytes_of<B: Backend, const D: usize>(x: &Tensor<B, D>) -> u64 {
    bytes(x.shape().num_elements(), x.dtype())
}
