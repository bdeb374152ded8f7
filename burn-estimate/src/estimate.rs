//! What a step takes.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use burn::module::Module;
use burn::tensor::backend::Backend;
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_checkpoint::{ReadsInPlace, Recorder, RematStats, is_delivered};
use burn_decorator::module::for_each_float;
use burn_decorator::profile::{DeviceProfile, KernelWork};
use burn_decorator::simulated::simulate_values;

use crate::classes::{Classes, Kind};
use crate::client::label;
use crate::device::MetaDevice;
use crate::heap::Heap;
use crate::ledger::{Cost, Phase, Recording, Storage, Transfer};
use crate::shares::Shares;
use crate::uses::Traffic;

/// What holds memory at the peak.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The parameter for parameters and the optimizer's state. For the rest the operation, and
    /// behind `after` the parameter that was in use when it ran, which identifies the module.
    pub owner: String,
    /// What it is for.
    pub kind: Kind,
    /// Bytes.
    pub bytes: u64,
    /// The number of storages that have these bytes.
    pub storages: usize,
}

/// What a step takes, from [`estimate_step`].
#[derive(Clone, Debug)]
pub struct Estimate {
    /// The most bytes that are alive at once.
    pub peak_bytes: u64,
    /// The phase of the step at the peak.
    pub peak_phase: Phase,
    /// Bytes that are alive when the step begins.
    pub start_bytes: u64,
    /// What is alive at the peak, the largest first.
    pub holders: Vec<Holder>,
    /// Bytes from the host to the device.
    pub uploaded_bytes: u64,
    /// Bytes from the device to the host.
    pub downloaded_bytes: u64,
    /// Bytes to other ranks, from [`estimate_rank`].
    pub sent_bytes: u64,
    /// Operations that kernels run, replayed ones too.
    pub operations: u64,
    /// Floating-point operations, replayed ones too: those of products, and for other operations
    /// one an element of the result.
    pub flops: u64,
    /// Operations that a scope or budget of burn-checkpoint runs again, on this thread.
    pub replayed_operations: u64,
    /// Tensors that a budget looks at in search of those to evict, on this thread.
    pub searched_tensors: u64,
    /// Bytes that the optimizer reads and writes in host memory, from [`Estimate::shared`].
    pub host_bytes: u64,
    /// Bytes in use after each change, from the step's beginning to its end.
    pub bytes_in_use: Vec<u64>,
    pub(crate) recording: Arc<Recording>,
    pub(crate) shares: Shares,
}

/// What one training step takes on the default [`MetaDevice`], which has burn-flex's kernels, and
/// the model after it. For those of a GPU there is [`estimate_on`] with [`MetaDevice::cuda`] or
/// [`MetaDevice::wgpu`].
///
/// `step` takes the model and returns it updated, as an optimizer does. It runs twice, and the
/// second run counts, because the optimizer has its state then: with accumulation a step is a whole
/// window. `step` runs unchanged, on [`Meta`](crate::Meta) below any decorators, with the scopes,
/// budgets and overrides of this thread. Storages that are alive on the device before the step
/// count too, so that the estimate includes the optimizer's state of a real program.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::nn::LinearConfig;
/// use burn_estimate::{Kind, Meta, estimate_step};
///
/// let model = LinearConfig::new(10, 10).with_bias(false).init(&Default::default());
/// let (estimate, _) = estimate_step::<Autodiff<Meta>, _>(model, |model| model);
/// assert_eq!((estimate.peak_bytes, estimate.bytes_of(Kind::Parameter)), (400, 400));
/// ```
pub fn estimate_step<B, M>(model: M, step: impl FnMut(M) -> M) -> (Estimate, M)
where
    B: Backend,
    M: Module<B>,
{
    estimate_on::<B, M>(MetaDevice::default(), model, step)
}

/// [`estimate_step`] on a device of one's own: steps on one device that run at the same time are
/// counted together.
pub fn estimate_on<B, M>(device: MetaDevice, model: M, step: impl FnMut(M) -> M) -> (Estimate, M)
where
    B: Backend,
    M: Module<B>,
{
    estimate_rank::<B, M>(device, || 0, model, step)
}

/// [`estimate_on`] of one rank of many. `sent` reads how many bytes the rank has sent so far. The
/// rank trains alone, in a group whose other ranks are simulated:
///
/// ```text
/// let group = Arc::new(SimulatedRank::new(0, 1024)?);
/// let mut update = Update::new(adamw).reduce(ZeroSettings::stage(Stage::Gradients), group.clone())?;
/// let model = update.prepare(model)?;
/// let sent = || group.traffic().total().data_bytes;
/// let (estimate, _) = estimate_rank::<B, _>(device, sent, model, |model| ..);
/// ```
pub fn estimate_rank<B, M>(
    device: MetaDevice,
    sent: impl Fn() -> u64,
    model: M,
    mut step: impl FnMut(M) -> M,
) -> (Estimate, M)
where
    B: Backend,
    M: Module<B>,
{
    // As in the second step, which is `estimate_run`'s.
    let _simulated = (ReadsInPlace::on(), simulate_values());
    name_parameters::<B, M>(&model);
    let model = step(model);
    name_parameters::<B, M>(&model);
    let trained_bytes = trained_bytes::<B, M>(&model);
    let before = sent();
    let (mut estimate, model) = record(device, trained_bytes, || {
        let model = step(model);
        // The new parameters.
        name_parameters::<B, M>(&model);
        model
    });
    estimate.sent_bytes = sent() - before;
    (estimate, model)
}

/// What any program takes on a device while it runs, such as a whole training of the Learner: its
/// peak, traffic and time. The kinds of memory at the peak are known for one step only: see
/// [`estimate_step`].
///
/// ```
/// use burn::tensor::Tensor;
/// use burn_estimate::{Meta, MetaDevice, estimate_run};
///
/// let device = MetaDevice::new(7);
/// let (estimate, sum) = estimate_run(device, || Tensor::<Meta, 1>::ones([1000], &device).sum());
/// assert_eq!((estimate.start_bytes, estimate.peak_bytes, sum.dims()), (0, 4004, [1]));
/// ```
pub fn estimate_run<R>(device: MetaDevice, run: impl FnOnce() -> R) -> (Estimate, R) {
    record(device, None, run)
}

fn record<R>(
    device: MetaDevice,
    trained_bytes: Option<u64>,
    run: impl FnOnce() -> R,
) -> (Estimate, R) {
    // A second thread would free offloaded tensors at times that differ from run to run.
    let _simulated = (ReadsInPlace::on(), simulate_values());
    let before = RematStats::of_thread();
    let ledger = device.ledger();
    device.drain();
    ledger.lock().start();
    let result = run();
    device.drain();
    let after = RematStats::of_thread();
    let mut recording = ledger.lock().stop();
    recording.trained_bytes = trained_bytes;
    let mut estimate = Estimate::of(Arc::new(recording), Shares::NONE);
    let since = u64::saturating_sub;
    estimate.replayed_operations = since(after.replayed_operations, before.replayed_operations);
    estimate.searched_tensors = since(after.searched_tensors, before.searched_tensors);
    (estimate, result)
}

/// Labels a module's parameters on the device with their paths.
fn name_parameters<B: Backend, M: Module<B>>(model: &M) {
    for_each_float(model, |path, _, value: FloatTensor<B>| {
        // A use would deliver the parameter to the device, from the host or from other ranks.
        if !is_delivered::<B>(&value) {
            // Any operation that reaches the device through all decorators. Detached, because a use
            // on the tape would keep the parameter's gradient on the device until backward ends.
            let value = B::float_detach(value);
            label(path, || drop(B::float_neg(value)));
        }
    });
}

/// Bytes of the parameters that are trained, in whatever memory they are. `None` on a backend
/// without autodiff, which says of none that it is trained.
fn trained_bytes<B: Backend, M: Module<B>>(model: &M) -> Option<u64> {
    let mut trained = BTreeMap::new();
    for_each_float(model, |_, id, value: FloatTensor<B>| {
        if B::float_is_require_grad(&value) {
            let bytes = value.shape().num_elements() * value.dtype().size();
            trained.insert(id.val(), bytes as u64);
        }
    });
    (!trained.is_empty()).then(|| trained.values().sum())
}

impl Estimate {
    pub(crate) fn of(recording: Arc<Recording>, shares: Shares) -> Self {
        let classes = Classes::new(&recording);
        let weighed = Weighed::new(&classes, &shares);
        let at = weighed.peak_at;
        let mut holders: BTreeMap<(Kind, String), (u64, usize)> = BTreeMap::new();
        for storage in &recording.storages {
            let kind = classes.kind(storage);
            let mut spans = classes.spans(storage, kind, &shares).into_iter();
            let Some((_, bytes @ 1..)) = spans.find(|(during, _)| during.contains(&at)) else {
                continue;
            };
            let held = holders.entry((kind, owner(storage, kind))).or_default();
            held.0 += bytes;
            held.1 += 1;
        }
        let mut holders: Vec<_> = holders
            .into_iter()
            .map(|((kind, owner), (bytes, storages))| Holder {
                owner,
                kind,
                bytes,
                storages,
            })
            .collect();
        let known = holders.iter().map(|holder| holder.bytes).sum::<u64>();
        if let added @ 1.. = weighed.peak_bytes.saturating_sub(known) {
            holders.push(Holder {
                owner: "buckets and shards".into(),
                kind: Kind::Temporary,
                bytes: added,
                storages: 1,
            });
        }
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        let costs = || recording.costs.iter();
        // An optimizer on the host moves what `Uses::traffic` says.
        let transfers = || {
            let all = recording.transfers.iter();
            all.filter(|moved| !(shares.offload && classes.is_of_update(moved.at)))
        };
        Self {
            peak_bytes: weighed.peak_bytes,
            peak_phase: classes.phase(at),
            start_bytes: weighed.bytes_in_use[0],
            holders,
            uploaded_bytes: transfers().map(|moved| moved.uploaded_bytes).sum(),
            downloaded_bytes: transfers().map(|moved| moved.downloaded_bytes).sum(),
            sent_bytes: 0,
            operations: costs().filter(|cost| cost.bytes > 0).count() as u64,
            flops: costs().map(|cost| cost.flops).sum(),
            replayed_operations: 0,
            searched_tensors: 0,
            host_bytes: 0,
            bytes_in_use: weighed.bytes_in_use,
            recording: recording.clone(),
            shares,
        }
    }

    /// The same step with optimizer, gradients and parameters where `shares` puts them: without
    /// another run, and without the host memory that burn-zero would take. What moves is by
    /// formula; against a run with burn-zero's ranks peak and traffic are within 2 %
    /// (docs/out-of-memory.md).
    ///
    /// Meant for the result of [`estimate_step`]: this rank's step on one device. A step that
    /// accumulates micro-batches must note where each backward pass ends:
    /// [`MetaDevice::backward_ended`].
    pub fn shared(&self, shares: Shares) -> Self {
        let shared = Self::of(self.recording.clone(), shares);
        let classes = Classes::new(&self.recording);
        let uses = classes.uses(&shares);
        let traffic = uses.traffic(&shares, uses.backwards);
        Self {
            uploaded_bytes: shared.uploaded_bytes + traffic.uploaded_bytes,
            downloaded_bytes: shared.downloaded_bytes + traffic.downloaded_bytes,
            sent_bytes: traffic.sent_bytes,
            host_bytes: traffic.host_bytes,
            replayed_operations: self.replayed_operations,
            searched_tensors: self.searched_tensors,
            ..shared
        }
    }

    /// Bytes of one kind at the peak.
    pub fn bytes_of(&self, kind: Kind) -> u64 {
        let of_kind = self.holders.iter().filter(|holder| holder.kind == kind);
        of_kind.map(|holder| holder.bytes).sum()
    }

    /// The step's time on a device: the sum over operations of the longest of launch, bytes and
    /// arithmetic, but at least the host's time to launch and record operations and to look for
    /// tensors to evict. Where the [host runs kernels](crate::HostCosts::runs_kernels) itself, it
    /// is the sum of all these, and of the time to get memory from the system. Added is the time of
    /// what moves, one after the other: between host and device at the speed of each direction, to
    /// other ranks and in the host's memory at that of the slower one.
    pub fn time(&self, device: &DeviceProfile) -> Duration {
        self.time_with_more(device, 0)
    }

    /// The time of an update with this many micro-batches more than the step has: each takes as
    /// long as the step's last one, from the beginning of its forward pass to the optimizer's first
    /// result. What a window does once before that, such as a mean of its gradients, counts in
    /// each.
    pub fn time_with_more(&self, device: &DeviceProfile, micro_batches: u32) -> Duration {
        let classes = Classes::new(&self.recording);
        let (last, update) = (classes.last_forward(), classes.update);
        let more = f64::from(micro_batches);
        // Sums and norms of gradients that have left the device are computed where they are.
        let is_of_update =
            |at| at >= update || (self.shares.offload && classes.phase(at) == Phase::Update);
        let times = |at| match at {
            _ if is_of_update(at) => self.shares.update(),
            _ if at >= last => 1.0 + more,
            _ => 1.0,
        };
        let (mut kernels, mut host) = (0.0, 0.0);
        for cost in &self.recording.costs {
            let work = cost.on(device);
            kernels += device.seconds(&work) * times(cost.at);
            let launch = if cost.bytes > 0 {
                device.launch
            } else {
                Duration::ZERO
            };
            host += (launch + work.recording).as_secs_f64() * times(cost.at);
        }
        let in_last = |moved: &&Transfer| (last..update).contains(&moved.at);
        let transfers = self.recording.transfers.iter().filter(in_last);
        let again = transfers.map(|transfer| {
            let Transfer {
                uploaded_bytes,
                downloaded_bytes,
                ..
            } = *transfer;
            let traffic = Traffic {
                uploaded_bytes,
                downloaded_bytes,
                ..Traffic::default()
            };
            traffic.seconds(&device.link)
        });
        let uses = classes.uses(&self.shares);
        let shared = |backwards| {
            let traffic = uses.traffic(&self.shares, backwards);
            traffic.seconds(&device.link)
        };
        let backwards = uses.backwards.max(1);
        let again = again.sum::<f64>() + shared(backwards) - shared(backwards - 1);
        let traffic = Traffic {
            sent_bytes: self.sent_bytes,
            downloaded_bytes: self.downloaded_bytes,
            uploaded_bytes: self.uploaded_bytes,
            host_bytes: self.host_bytes,
        };
        let transfers = traffic.seconds(&device.link) + again * more;
        // The budget looks at as many tensors in each micro-batch.
        let looks = self.searched_tensors as f64 * (1.0 + more / backwards as f64);
        let looks = looks * device.host.look.as_secs_f64();
        let busy = match device.host.runs_kernels {
            true => kernels + looks + self.fresh_seconds(device, times),
            // A device waits for a host that is slower.
            false => kernels.max(host + looks),
        };
        Duration::from_secs_f64(busy + transfers)
    }

    /// Bytes that a process gets from the system during the step, if its heap returns free memory
    /// as glibc's does: where allocator and system are those of the kernels, as for burn-flex.
    pub fn fresh_bytes(&self) -> u64 {
        self.heap().fresh().iter().map(|(_, bytes)| bytes).sum()
    }

    /// The heap of a process that has run the step a few times.
    fn heap(&self) -> Heap {
        let mut heap = Heap::new();
        let _ = Classes::new(&self.recording).allocate_in(&self.shares, &mut heap);
        heap
    }

    /// Seconds that the system takes to give memory to the process. `times` is how often the step
    /// repeats what it does at a time.
    fn fresh_seconds(&self, device: &DeviceProfile, times: impl Fn(u64) -> f64) -> f64 {
        let rate = device.host.fresh_bytes_per_second;
        if rate.is_infinite() {
            return 0.0;
        }
        let heap = self.heap();
        let bytes = heap
            .fresh()
            .iter()
            .map(|&(at, bytes)| bytes as f64 * times(at));
        bytes.sum::<f64>() / rate
    }
}

impl Cost {
    /// What the operation does on a device.
    fn on(&self, device: &DeviceProfile) -> KernelWork {
        KernelWork {
            bytes: self.bytes as f64,
            flops: self.flops as f64,
            functions: self.functions as f64,
            reordered: self.reordered as f64,
            is_half: self.is_half,
            recording: match self.recorder {
                Recorder::None => Duration::ZERO,
                Recorder::Scope => device.host.scope,
                Recorder::Budget => device.host.budget,
            },
        }
    }
}

/// Memory over a step, of what stays on the device.
struct Weighed {
    peak_bytes: u64,
    peak_at: u64,
    /// After each change.
    bytes_in_use: Vec<u64>,
}

impl Weighed {
    fn new(classes: &Classes, shares: &Shares) -> Self {
        let recording = classes.recording;
        let (start, update) = (recording.start, classes.update);
        // When, bytes on the device, and bytes of gradients that have left it or wait in buckets.
        let mut changes = vec![(start, 0, 0)];
        let mut add = |at: u64, (bytes, left): (i64, i64), sign: i64| {
            changes.push((at.max(start), sign * bytes, sign * left));
        };
        for storage in &recording.storages {
            let kind = classes.kind(storage);
            for (during, bytes) in classes.spans(storage, kind, shares) {
                add(during.start, (bytes as i64, 0), 1);
                if during.end != u64::MAX {
                    add(during.end, (bytes as i64, 0), -1);
                }
            }
            // Until the pass ends, what has left may still be under way.
            if kind == Kind::Gradient
                && let Some(whole) = classes.until_departure(storage, kind, shares)
            {
                let left = storage.bytes as i64;
                let back = classes.end(storage.born).max(whole.end);
                add(whole.end, (0, left), 1);
                add(back, (0, left), -1);
            }
        }
        let (buckets, shards) = shares.added_bytes(classes.trained_bytes());
        add(start, (classes.kept_parts(shares) as i64, 0), 1);
        if update != u64::MAX {
            add(update, (shards as i64, 0), 1);
        }
        let mut weighed = Self {
            peak_bytes: 0,
            peak_at: start,
            bytes_in_use: Vec::with_capacity(changes.len()),
        };
        let (mut bytes, mut left) = (0_i64, 0_i64);
        changes.sort_unstable_by_key(|(at, ..)| *at);
        for changes in changes.chunk_by(|(before, ..), (at, ..)| before == at) {
            let at = changes[0].0;
            bytes += changes.iter().map(|(_, bytes, _)| bytes).sum::<i64>();
            left += changes.iter().map(|(.., left)| left).sum::<i64>();
            let in_use = (bytes + left.min(buckets as i64)).max(0) as u64;
            weighed.bytes_in_use.push(in_use);
            if in_use > weighed.peak_bytes {
                (weighed.peak_bytes, weighed.peak_at) = (in_use, at);
            }
        }
        weighed
    }
}

fn owner(storage: &Storage, kind: Kind) -> String {
    let after = storage.owner.as_deref().unwrap_or("");
    let state = storage.next.get().filter(|_| kind == Kind::OptimizerState);
    match storage.parameter.as_ref().or(state) {
        Some(parameter) => parameter.to_string(),
        None if after.is_empty() => storage.row.name.into(),
        None => format!("{} after {after}", storage.row.name),
    }
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let peak = in_units(self.peak_bytes);
        writeln!(f, "{peak} at the peak, in {:?}:", self.peak_phase)?;
        for kind in Kind::ALL {
            let name = format!("{kind:?}");
            writeln!(f, "    {name:15}{:>12}", in_units(self.bytes_of(kind)))?;
        }
        writeln!(f, "the largest holders:")?;
        for holder in self.holders.iter().take(10) {
            let bytes = in_units(holder.bytes);
            let kind = format!("{:?}", holder.kind);
            writeln!(f, "    {bytes:>12}  {kind:15}{}", holder.owner)?;
        }
        write!(
            f,
            "{} operations, {} replayed; {:.3e} floating-point operations; {} to the device, {} from it, {} sent",
            self.operations,
            self.replayed_operations,
            self.flops as f64,
            in_units(self.uploaded_bytes),
            in_units(self.downloaded_bytes),
            in_units(self.sent_bytes)
        )
    }
}

fn in_units(bytes: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let fitting = units.into_iter().find(|(_, power)| bytes >= 1 << power);
    match fitting {
        Some((unit, power)) => format!("{:.2} {unit}", bytes as f64 / 2f64.powi(power)),
        None => format!("{bytes} B"),
    }
}
