//! Measuring the blocks of a chain.

use std::time::Instant;

use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};

use burn_decorator::module::independent;

use crate::context;
use crate::extent::Extent;
use crate::plan::{BlockProfile, PlanError, Profile, TailProfile};
use crate::scope::{checkpoint, keeping};
use crate::stats::RematStats;

/// Runs every block of a chain forward and backward, alone, and measures its bytes and times: the
/// input of [`plan`](crate::plan::plan).
///
/// `x` is a typical input of the first block; each block's output is the input of the next. Bytes
/// are those of tensors that [`Remat`](crate::Remat) counts, the same in every run: not the scratch
/// memory inside of an operation, nor what an allocator keeps to itself, so leave a margin to the
/// limit of a device. Times are the shortest of three. What follows the chain is measured by
/// [`profile_tail`].
///
/// The blocks stay as they are: their copies run, which share no running statistics with them
/// ([`independent`]). Random numbers are drawn from the backend's generator, which Burn 0.21 can
/// seed but not read: call `Backend::seed` afterwards where those that follow matter.
///
/// # Cost
///
/// Seven forward and six backward passes over the chain, one block's memory at a time. Resets the
/// thread's [`RematStats`]. A budget of the thread is suspended meanwhile: its counters stay as
/// they are, and the profile's bytes come on top.
///
/// # Errors
///
/// [`PlanError::NoRemat`] if a block's backend has no `Remat` in it.
pub fn profile_chain<B: AutodiffBackend, const D: usize, Block: AutodiffModule<B>>(
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
            let block = independent::<B, Block>(block);
            let (measured, out) = of_block(&x, |x| forward(&block, x));
            if !context::met() {
                return Err(PlanError::NoRemat { block: number });
            }
            profile.blocks.push(measured);
            x = out;
        }
        Ok(profile)
    })
}

/// Runs what follows a chain, from the chain's output to the loss, forward and backward and
/// measures it: the [`Profile::tail`].
///
/// `loss` runs as it is: where it uses a module with running statistics, such as BatchNorm, give it
/// an [`independent`] copy.
///
/// # Cost
///
/// One pass. Resets the thread's [`RematStats`]; a budget is suspended meanwhile.
pub fn profile_tail<B: AutodiffBackend, const D: usize>(
    x: Tensor<B, D>,
    loss: impl FnOnce(Tensor<B, D>) -> Tensor<B, 1>,
) -> TailProfile {
    context::without_budget(|| {
        let tail = step(&x.detach(), loss, |loss| loss);
        TailProfile {
            peak_bytes: tail.forward_peak_bytes.max(tail.backward_peak_bytes),
            gradient_bytes: tail.gradient_bytes,
        }
    })
}

/// What a block takes, and its output for `x`.
fn of_block<B: AutodiffBackend, const D: usize>(
    x: &Tensor<B, D>,
    forward: impl Fn(Tensor<B, D>) -> Tensor<B, D>,
) -> (BlockProfile, Tensor<B, D>) {
    let out = forward(x.clone()).detach();
    let gradient = out.ones_like();
    // Not the plain sum, whose gradient would be a view of one number.
    let loss = |out: Tensor<B, D>| (out * gradient.clone()).sum();
    // Bytes are the same in every round; of the times the shortest counts.
    let rounds = [(); 3].map(|()| {
        let plain = step(x, &forward, loss);
        let scoped = step(x, |x| checkpoint(|| forward(x)), loss);
        (plain, scoped)
    });
    let shortest = |time: fn(&(_, _)) -> u64| rounds.iter().map(time).min().unwrap_or(0);
    let forward_ns = shortest(|(plain, _)| plain.forward_ns);
    let backward_ns = shortest(|(plain, _)| plain.backward_ns);
    let with_replay_ns = shortest(|(_, scoped)| scoped.backward_ns);
    let (plain, scoped) = rounds[2];
    let profile = BlockProfile {
        kept_bytes: scoped.tape_bytes.saturating_sub(scoped.output_bytes),
        forward_ns,
        replay_ns: with_replay_ns.saturating_sub(backward_ns).min(forward_ns),
        backward_ns,
        ..plain
    };
    (profile, out)
}

/// One forward pass, and one backward pass of the loss of its result.
fn step<B: AutodiffBackend, const D: usize, const R: usize>(
    x: &Tensor<B, D>,
    forward: impl FnOnce(Tensor<B, D>) -> Tensor<B, R>,
    loss: impl FnOnce(Tensor<B, R>) -> Tensor<B, 1>,
) -> BlockProfile {
    let device = x.device();
    let x = x.clone().detach().require_grad();
    let synchronize = || {
        // A backend that failed reports it when a result is next read; here only a time would be
        // wrong.
        if let Err(error) = B::sync(&device) {
            burn_decorator::warn_user!(
                "the device could not be waited for, times are wrong: {error}"
            );
        }
    };
    let begin = || {
        synchronize();
        RematStats::reset_thread();
        Instant::now()
    };
    // In a scope all tensors are counted.
    keeping(|| {
        let before_bytes = context::current_stats().live_bytes;
        // Peak bytes, the bytes that are left and nanoseconds of a pass. Live bytes may fall below
        // those before where it drops tensors.
        let end = |start: Instant| {
            synchronize();
            let time_ns = start.elapsed().as_nanos() as u64;
            let stats = context::current_stats();
            let beyond = |bytes: u64| bytes.saturating_sub(before_bytes);
            [beyond(stats.peak_bytes), beyond(stats.live_bytes), time_ns]
        };
        let start = begin();
        let out = forward(x.clone());
        let [forward_peak_bytes, tape_bytes, forward_ns] = end(start);
        let output_bytes = bytes_of(&out);
        let start = begin();
        let _grads = loss(out).backward();
        let [backward_peak_bytes, left_bytes, backward_ns] = end(start);
        BlockProfile {
            output_bytes,
            tape_bytes,
            forward_peak_bytes,
            backward_peak_bytes,
            gradient_bytes: left_bytes.saturating_sub(bytes_of(&x)),
            forward_ns,
            backward_ns,
            ..BlockProfile::default()
        }
    })
}

fn bytes_of<B: Backend, const D: usize>(x: &Tensor<B, D>) -> u64 {
    Extent::of(&x.shape(), x.dtype()).bytes
}
