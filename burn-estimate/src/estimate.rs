//! What a step takes.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_checkpoint::{ReadsInPlace, RematStats};
use burn_decorator::profile::DeviceProfile;

use crate::client::{MetaDevice, label};
use crate::ledger::{Cost, Phase, Recording, Storage};

/// What memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Parameters, and running statistics: the tensors of the module.
    Parameter,
    /// What backward leaves behind.
    Gradient,
    /// What outlives the step and is no parameter: the optimizer's state.
    OptimizerState,
    /// What forward leaves behind for backward.
    Activation,
    /// Booleans and random numbers that forward leaves behind for backward: masks of attention and dropout.
    Mask,
    /// Data of the host: the batch.
    Input,
    /// What is gone before the phase of the step is over, workspace of kernels too.
    Temporary,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::Parameter,
        Self::Gradient,
        Self::OptimizerState,
        Self::Activation,
        Self::Mask,
        Self::Input,
        Self::Temporary,
    ];
}

/// What holds memory at the peak.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The parameter for parameters and the optimizer's state. For the rest the operation, and behind `after` the parameter that was in
    /// use when it ran, which tells the module.
    pub owner: String,
    /// What it is for.
    pub kind: Kind,
    /// Bytes.
    pub bytes: u64,
    /// In so many storages.
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
    /// Operations that kernels run, replayed ones too.
    pub operations: u64,
    /// Floating-point operations, replayed ones too: of products; of all else one an element of the result.
    pub flops: u64,
    /// Operations that a scope or budget of burn-checkpoint runs again, on this thread.
    pub replayed_operations: u64,
    /// Bytes in use after each change, from the step's beginning to its end.
    pub bytes_in_use: Vec<u64>,
    costs: Vec<Cost>,
}

/// What one training step takes on the default [`MetaDevice`], and the model after it.
///
/// `step` takes the model and gives it back updated, as an optimizer does. It runs twice, and the second time counts: the optimizer has its
/// state then. It runs as it is, on [`Meta`](crate::Meta) below any decorators, with the scopes, budgets and overrides of this thread.
/// What is alive on the device before belongs to the estimate, so that the optimizer's state of a real program is seen too.
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

/// [`estimate_step`] on a device of one's own: steps on one device that run at the same time are counted together.
pub fn estimate_on<B, M>(
    device: MetaDevice,
    model: M,
    mut step: impl FnMut(M) -> M,
) -> (Estimate, M)
where
    B: Backend,
    M: Module<B>,
{
    // Without a second thread, on which tensors would go now and then.
    let _reads = ReadsInPlace::on();
    name_parameters::<B, M>(&model);
    let model = step(model);
    name_parameters::<B, M>(&model);
    let replayed = RematStats::of_thread().replayed_operations;
    let ledger = device.ledger();
    ledger.lock().start();
    let model = step(model);
    let after = RematStats::of_thread().replayed_operations;
    let replayed = after.saturating_sub(replayed);
    // The new parameters.
    name_parameters::<B, M>(&model);
    let recording = ledger.lock().stop();
    (Estimate::of(recording, replayed), model)
}

/// Tells the device the names of a module's parameters.
fn name_parameters<B: Backend, M: Module<B>>(model: &M) {
    struct Names(Vec<String>);
    impl<B: Backend> ModuleVisitor<B> for Names {
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.0.push(name.into());
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.0.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let value = param.val();
            // Any operation that reaches the device through all decorators.
            label(&self.0.join("."), || drop(value.neg()));
        }
    }
    model.visit(&mut Names(Vec::new()));
}

impl Estimate {
    fn of(recording: Recording, replayed_operations: u64) -> Self {
        let classes = Classes::new(&recording);
        let at = recording.peak_at;
        let mut holders: BTreeMap<(Kind, String), (u64, usize)> = BTreeMap::new();
        let alive = |storage: &&Storage| storage.born <= at && at < storage.died;
        for storage in recording.storages.iter().filter(alive) {
            let kind = classes.kind(storage);
            let held = holders.entry((kind, owner(storage, kind))).or_default();
            held.0 += storage.bytes;
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
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        Self {
            peak_bytes: recording.peak_bytes,
            peak_phase: classes.phase(at),
            start_bytes: recording.start_bytes,
            holders,
            uploaded_bytes: recording.uploaded_bytes,
            downloaded_bytes: recording.downloaded_bytes,
            operations: recording.costs.iter().filter(|cost| cost.bytes > 0).count() as u64,
            flops: recording.costs.iter().map(|cost| cost.flops).sum(),
            replayed_operations,
            bytes_in_use: curve(&recording),
            costs: recording.costs,
        }
    }

    /// Bytes of one kind at the peak.
    pub fn bytes_of(&self, kind: Kind) -> u64 {
        let of_kind = self.holders.iter().filter(|holder| holder.kind == kind);
        of_kind.map(|holder| holder.bytes).sum()
    }

    /// The step's time on a device: for each operation the longest of its launch, its bytes and its arithmetic, and the transfers between
    /// host and device, one after the other.
    pub fn time(&self, device: &DeviceProfile) -> Duration {
        let kernels: f64 = self
            .costs
            .iter()
            .map(|cost| device.seconds(cost.bytes as f64, cost.flops as f64, cost.is_half))
            .sum();
        let transfers = (self.uploaded_bytes + self.downloaded_bytes) as f64;
        Duration::from_secs_f64(kernels + transfers / device.host_bytes_per_second)
    }
}

/// Bytes in use after each change.
fn curve(recording: &Recording) -> Vec<u64> {
    let mut changes = BTreeMap::<u64, i64>::new();
    for storage in &recording.storages {
        if storage.born > recording.start {
            *changes.entry(storage.born).or_default() += storage.bytes as i64;
        }
        if storage.died != u64::MAX {
            *changes.entry(storage.died).or_default() -= storage.bytes as i64;
        }
    }
    let mut bytes = recording.start_bytes;
    let after = changes.into_values().map(|change| {
        bytes = bytes.saturating_add_signed(change);
        bytes
    });
    std::iter::once(recording.start_bytes)
        .chain(after)
        .collect()
}

/// Where a step's phases begin, and so what its storages are for.
struct Classes<'a> {
    recording: &'a Recording,
    /// When the optimizer begins: with the first of what outlives the step.
    update: u64,
}

impl<'a> Classes<'a> {
    fn new(recording: &'a Recording) -> Self {
        let backward = recording
            .phases
            .iter()
            .rfind(|(_, phase)| *phase == Phase::Backward);
        let backward = backward.map_or(recording.start, |(at, _)| *at);
        let outlives = |storage: &&Storage| storage.died == u64::MAX && storage.born > backward;
        let survivors = recording.storages.iter().filter(outlives);
        let update = survivors.map(|storage| storage.born).min();
        Self {
            recording,
            update: update.unwrap_or(u64::MAX),
        }
    }

    fn phase(&self, at: u64) -> Phase {
        if at >= self.update {
            return Phase::Update;
        }
        let before = self
            .recording
            .phases
            .iter()
            .rfind(|(begun, _)| *begun <= at);
        before.map_or(Phase::Forward, |(_, phase)| *phase)
    }

    /// When the phase ends that a storage is born in.
    fn end(&self, born: u64) -> u64 {
        let mut later = self.recording.phases.iter().map(|(begun, _)| *begun);
        let next = later.find(|begun| *begun >= born).unwrap_or(u64::MAX);
        next.min(self.update)
    }

    fn kind(&self, storage: &Storage) -> Kind {
        if storage.parameter.is_some() {
            return Kind::Parameter;
        }
        if storage.row.name.ends_with("_from_data") {
            return Kind::Input;
        }
        if storage.born <= self.recording.start || storage.died == u64::MAX {
            return Kind::OptimizerState;
        }
        let stays = storage.died > self.end(storage.born);
        match self.phase(storage.born) {
            Phase::Forward if stays && storage.is_mask => Kind::Mask,
            Phase::Forward if stays => Kind::Activation,
            Phase::Backward if stays => Kind::Gradient,
            _ => Kind::Temporary,
        }
    }
}

fn owner(storage: &Storage, kind: Kind) -> String {
    let after = storage.owner.as_deref().unwrap_or("");
    match (kind, &storage.parameter) {
        (_, Some(parameter)) => parameter.to_string(),
        (Kind::OptimizerState, None) if !after.is_empty() => after.into(),
        (_, None) if after.is_empty() => storage.row.name.into(),
        (_, None) => format!("{} after {after}", storage.row.name),
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
            "{} operations, {} replayed; {:.3e} floating-point operations; {} to the device, {} from it",
            self.operations,
            self.replayed_operations,
            self.flops as f64,
            in_units(self.uploaded_bytes),
            in_units(self.downloaded_bytes)
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
