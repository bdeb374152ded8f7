//! Which settings fit, and which of them is the fastest.

use std::time::Duration;

use crate::classes::Kind;
use crate::estimate::Estimate;
use crate::pools::DeviceMemory;

/// A setting with its estimate.
#[derive(Clone, Debug)]
pub struct Planned<S> {
    /// The setting.
    pub setting: S,
    /// What a step takes.
    pub estimate: Estimate,
    /// Bytes of the device that it needs: its peak, or the pages of the device's pools.
    pub needed_bytes: u64,
    /// An update's time.
    pub time: Duration,
}

/// Settings by whether they fit, from [`plan`].
#[derive(Clone, Debug)]
pub struct Plan<S> {
    /// Those that fit, the fastest first.
    pub fitting: Vec<Planned<S>>,
    /// Those that do not, the one that needs the least first.
    pub too_large: Vec<Planned<S>>,
}

/// Estimates settings in their order, and sorts them: those for which the device's memory is enough
/// by time, the others by the bytes that they need. A setting for which `estimate` returns `None`
/// is left out, such as one that cannot fit because a smaller one did not, or one that offloads to
/// the host where [`link.memory`](crate::LinkProfile::memory) of the device's profile is
/// [`Shared`](crate::LinkedMemory::Shared): its bytes are no others than the host's.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::nn::Linear;
/// use burn::tensor::Tensor;
/// use burn_estimate::{DeviceMemory, DeviceProfile, Meta, estimate_step, plan};
///
/// type B = Autodiff<Meta>;
/// type NoLayers = Vec<Linear<B>>;
/// let update = |rows: usize| estimate_step::<B, NoLayers>(vec![], |model| {
///     let _ = Tensor::<B, 2>::ones([rows, 1 << 20], &Default::default()).exp();
///     model
/// });
/// let plan = plan([1, 8, 64], DeviceMemory::heap(128 << 20), |&rows, _| {
///     let (estimate, _) = update(rows);
///     let time = estimate.time(&DeviceProfile::A100) * (64 / rows as u32);
///     Some((estimate, time))
/// });
/// let fitting: Vec<_> = plan.fitting.iter().map(|planned| planned.setting).collect();
/// assert_eq!(fitting, [8, 1]);
/// assert_eq!(plan.too_large[0].setting, 64);
/// ```
pub fn plan<S>(
    settings: impl IntoIterator<Item = S>,
    memory: DeviceMemory,
    mut estimate: impl FnMut(&S, &[Planned<S>]) -> Option<(Estimate, Duration)>,
) -> Plan<S> {
    let mut plan = Plan {
        fitting: Vec::new(),
        too_large: Vec::new(),
    };
    for setting in settings {
        if let Some((estimate, time)) = estimate(&setting, &plan.too_large) {
            let planned = Planned {
                setting,
                needed_bytes: memory.needed(&estimate),
                estimate,
                time,
            };
            plan.add(planned, memory);
        }
    }
    plan
}

impl<S> Plan<S> {
    /// Inserts a setting, in the order of its list.
    pub fn add(&mut self, planned: Planned<S>, memory: DeviceMemory) {
        if planned.needed_bytes <= memory.bytes {
            let faster = |other: &Planned<S>| other.time <= planned.time;
            let place = self.fitting.partition_point(faster);
            self.fitting.insert(place, planned);
        } else {
            let smaller = |other: &Planned<S>| other.needed_bytes <= planned.needed_bytes;
            let place = self.too_large.partition_point(smaller);
            self.too_large.insert(place, planned);
        }
    }

    /// Where nothing fits, the kind of memory that takes the most in the setting that needs the
    /// least, and its bytes there.
    pub fn obstacle(&self) -> Option<(Kind, u64)> {
        let smallest = self.fitting.is_empty().then(|| self.too_large.first())??;
        let of_kind = |kind| (kind, smallest.estimate.bytes_of(kind));
        Kind::ALL
            .map(of_kind)
            .into_iter()
            .max_by_key(|(_, bytes)| *bytes)
    }
}
