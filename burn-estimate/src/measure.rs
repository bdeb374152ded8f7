//! What this machine can do, measured.

use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_checkpoint::{MemoryBudget, Remat, RematStats, apart, checkpoint};
use burn_decorator::profile::{DeviceProfile, HostCosts};

/// Operations of a chain.
const CHAIN: u32 = 1000;

/// Repetitions, of which the fastest counts.
const ROUNDS: usize = 5;

/// [`DeviceProfile::measure`] of a device, of its [link](DeviceProfile::link) to the host and of
/// that host: launches with what autodiff notes of them, what it takes to record an operation in a
/// scope and under a budget, to look for a tensor to evict, and to get memory from the system.
/// About half a second on a CPU.
///
/// # Panics
///
/// If the device fails.
///
/// ```
/// use burn::tensor::backend::Backend;
/// use burn_estimate::{DeviceProfile, measure};
///
/// fn profile<B: Backend>(device: &B::Device) -> DeviceProfile {
///     measure::<B>(device, 1024)
/// }
/// ```
pub fn measure<B: Backend>(device: &B::Device, size: usize) -> DeviceProfile {
    let _apart = apart();
    // Frees the largest block that glibc's heap keeps, so that what follows does not wait for
    // memory from the system.
    drop(Tensor::<B, 1>::ones([(31 << 20) / 4], device));
    let chain = |records: bool| {
        fastest(|| {
            let start = Instant::now();
            let x = Tensor::<Autodiff<Remat<B>>, 1>::ones([1], device).require_grad();
            let forward = || (0..CHAIN).fold(x, |x, _| x * 1.5);
            let y = if records {
                checkpoint(forward)
            } else {
                forward()
            };
            drop(y.backward());
            B::sync(device).expect("the device works");
            start.elapsed()
        })
    };
    // A chain runs as many operations forward as backward.
    let bare = chain(false) / (2 * CHAIN);
    let scope = (chain(true) / (2 * CHAIN)).saturating_sub(bare) * 2;
    let budget = {
        let _budget = MemoryBudget::bytes(u64::MAX).install();
        (chain(false) / (2 * CHAIN)).saturating_sub(bare)
    };
    let profile = DeviceProfile::measure::<B>(device, size);
    let runs_kernels = profile.host.runs_kernels;
    DeviceProfile {
        launch: profile.launch.max(bare),
        host: HostCosts {
            runs_kernels,
            scope,
            budget,
            look: look::<B>(device),
            fresh_bytes_per_second: match runs_kernels {
                true => fresh::<B>(device),
                false => f64::INFINITY,
            },
        },
        ..profile
    }
}

fn fastest(mut run: impl FnMut() -> Duration) -> Duration {
    (0..ROUNDS).map(|_| run()).min().expect("there are rounds")
}

/// The time that a budget takes to look at a tensor.
fn look<B: Backend>(device: &B::Device) -> Duration {
    let before = RematStats::of_thread();
    {
        let _budget = MemoryBudget::bytes(u64::from(CHAIN) * 1024 / 4).install();
        let x = Tensor::<Autodiff<Remat<B>>, 1>::ones([256], device).require_grad();
        let y = (0..CHAIN).fold(x, |x, _| x.exp());
        drop(y.sum().backward());
    }
    let after = RematStats::of_thread();
    let looks = after.searched_tensors - before.searched_tensors;
    let time = after.search_time - before.search_time;
    time / u32::try_from(looks.max(1)).unwrap_or(u32::MAX)
}

/// Bytes a second of memory from the system, from the extra time of a result that no heap keeps
/// over one in its operand's memory.
fn fresh<B: Backend>(device: &B::Device) -> f64 {
    /// More than glibc keeps.
    const BYTES: usize = 40 << 20;
    let ones = Tensor::<B, 1>::ones([BYTES / 4], device);
    let mut own = Some(ones.clone() * 1.5);
    let new = fastest(|| {
        let start = Instant::now();
        drop(black_box(ones.clone() * 1.5));
        start.elapsed()
    });
    let in_place = fastest(|| {
        let start = Instant::now();
        own = own.take().map(|own| own * 1.5);
        start.elapsed()
    });
    match new.saturating_sub(in_place).as_secs_f64() {
        longer if longer > 0.2 * in_place.as_secs_f64() => BYTES as f64 / longer,
        _ => f64::INFINITY,
    }
}
