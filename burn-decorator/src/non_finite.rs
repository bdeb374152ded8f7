//! Finds non-finite gradients: one number per parameter, computed on the device, read at once or
//! later. With the feature `train`.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};

use burn::module::{AutodiffModule, ModuleVisitor, Param, ParamId};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{BasicOps, Bool, DType, Device, StreamId, Tensor, TensorData, Transaction};

use crate::reading_stream;

/// The gradients of a step, in the container of an optimizer decorator.
pub trait GradientsOf {
    /// The gradients of a parameter: none, one, or one per device.
    fn each<I: Backend, const D: usize>(&self, id: ParamId) -> Vec<Tensor<I, D>>;
}

/// What is computed from each gradient: numbers that are finite if all elements of the gradient
/// are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// Nothing.
    None,
    /// Its sum, at least in f32, in one kernel. A finite sum proves that all terms are finite,
    /// because infinities and NaNs survive every addition. A sum of finite numbers may overflow, so
    /// a non-finite sum needs an [`Exact`](Self::Exact) probe to decide.
    Sum,
    /// The sums of its rows, `[rows, 1]`, times a power of two so small that no sum of finite
    /// elements overflows. Two kernels. It does not compute `x * 0`, which fast-math may fold.
    Exact,
}

/// The probes of a module's gradients. Making them launches kernels and reads nothing.
pub struct Inspection<I: Backend> {
    ids: HashSet<ParamId>,
    paths: Vec<String>,
    half: Option<(String, DType)>,
    devices: Vec<Device<I>>,
    /// Those of all parameters, one or none for each path.
    probes: Vec<Tensor<I, 2>>,
    /// The sums of the exact ones by their number of rows, on the first device.
    totals: BTreeMap<usize, Tensor<I, 2>>,
}

impl<I: Backend> Inspection<I> {
    /// Probes the gradients of `module`, in module order.
    pub fn new<B, M>(module: &M, gradients: &impl GradientsOf, probe: Probe) -> Self
    where
        B: AutodiffBackend<InnerBackend = I>,
        M: AutodiffModule<B>,
    {
        let mut inspector = Inspector {
            gradients,
            probe,
            path: Vec::new(),
            found: Self {
                ids: HashSet::new(),
                paths: Vec::new(),
                half: None,
                devices: Vec::new(),
                probes: Vec::new(),
                totals: BTreeMap::new(),
            },
        };
        module.visit(&mut inspector);
        inspector.found
    }

    /// The parameters that have a gradient.
    pub fn ids(&self) -> &HashSet<ParamId> {
        &self.ids
    }

    /// The path and type of the first parameter with a gradient that is itself f16 or bf16.
    pub fn half_precision(&self) -> Option<(String, DType)> {
        self.half.clone()
    }

    /// The devices of the gradients.
    pub fn devices(&self) -> &[Device<I>] {
        &self.devices
    }

    /// Adds an exact probe. Fusion makes one kernel of the addition and what follows, and sometimes
    /// of the probe too.
    fn add(&mut self, sums: Tensor<I, 2>) {
        let (rows, sums) = (sums.dims()[0], on(sums, &self.devices[0]));
        let sums = match self.totals.remove(&rows) {
            Some(total) => total + sums,
            None => sums,
        };
        self.totals.insert(rows, sums);
    }

    /// Whether all probes, which are [sums](Probe::Sum), are finite, and the values of `others`,
    /// each `[1]`, which the same host read brings.
    fn is_finite(&self, others: Vec<Tensor<I, 1>>) -> (bool, Vec<f64>) {
        let probes = self.probes.iter().map(|probe| probe.clone().reshape([1]));
        let mut values = read_numbers(probes.chain(others).collect());
        let others = values.split_off(self.probes.len());
        (values.into_iter().all(f64::is_finite), others)
    }

    /// The paths of the parameters with a non-finite gradient, for probes that are
    /// [sums](Probe::Sum), and the values of `others`, each `[1]`. One host read; a further one
    /// where a sum is not finite, by [exact](Probe::Exact) probes of the same gradients.
    pub fn culprits<B, M>(
        &self,
        module: &M,
        gradients: &impl GradientsOf,
        others: Vec<Tensor<I, 1>>,
    ) -> (Vec<String>, Vec<f64>)
    where
        B: AutodiffBackend<InnerBackend = I>,
        M: AutodiffModule<B>,
    {
        let (is_finite, others) = self.is_finite(others);
        let culprits = if is_finite {
            Vec::new()
        } else {
            non_finite_paths::<B, M>(module, gradients)
        };
        (culprits, others)
    }

    /// Lets the device decide by [exact](Probe::Exact) probes: about one addition per parameter, no
    /// host read.
    pub fn into_verdict(self) -> Arc<Verdict<I>> {
        let totals = self.totals.into_iter().map(|(rows, sums)| match rows {
            1 => sums,
            _ => sums.sum_dim(0),
        });
        let total = totals.reduce(|total, other| total + other);
        let total = total.map(|total| total.reshape([1]));
        let non_finite = total.map(|total| total.clone().is_nan().bool_or(total.is_inf()));
        Arc::new(Verdict {
            culprits: match non_finite {
                None => OnceLock::from(Vec::new()),
                Some(_) => OnceLock::new(),
            },
            ids: self.ids,
            paths: self.paths,
            probes: Mutex::new(self.probes),
            non_finite,
            read: Mutex::new(None),
        })
    }
}

/// Which parameters of a step have a non-finite gradient. It may be known to the device only; then
/// the first question reads it.
pub trait Outcome: core::fmt::Debug + Send + Sync {
    /// The paths of the parameters, in module order.
    fn culprits(&self) -> &[String];

    /// Whether [`Self::culprits`] answers without a host read.
    fn is_known(&self) -> bool;
}

/// Whether all gradients of a step are finite: the device knows it at once, the host when it reads
/// it.
///
/// The numbers of the parameters are kept until then, and read only if one is non-finite.
#[derive(Debug)]
pub struct Verdict<I: Backend> {
    ids: HashSet<ParamId>,
    paths: Vec<String>,
    probes: Mutex<Vec<Tensor<I, 2>>>,
    non_finite: Option<Tensor<I, 1, Bool>>,
    read: Mutex<Option<JoinHandle<bool>>>,
    culprits: OnceLock<Vec<String>>,
}

impl<I: Backend> Verdict<I> {
    /// One that the host knows.
    pub fn known(culprits: Vec<String>) -> Arc<Self> {
        Arc::new(Self {
            ids: HashSet::new(),
            paths: Vec::new(),
            probes: Mutex::default(),
            non_finite: None,
            read: Mutex::default(),
            culprits: OnceLock::from(culprits),
        })
    }

    /// The parameters with a gradient.
    pub fn ids(&self) -> &HashSet<ParamId> {
        &self.ids
    }

    /// `[1]` on the device: whether a gradient is non-finite. `None` if the host knew from the
    /// beginning.
    pub fn non_finite(&self) -> Option<&Tensor<I, 1, Bool>> {
        self.non_finite.as_ref()
    }

    /// Starts to read. A read of some backends (CubeCL's CUDA) waits for the device at its first
    /// poll, so another thread does it, from a view on the [`reading_stream`].
    pub fn start_reading(self: &Arc<Self>) {
        if let Some(flag) = self.non_finite.clone().filter(|_| !self.is_known()) {
            let stream = reading_stream(StreamId::current());
            // Of another shape: Fusion's reshape to the same one is no operation.
            let view = stream.executes(|| flag.reshape([1, 1]));
            let read = move || stream.executes(|| is_set(&view.into_data()));
            if let Ok(mut reading) = self.read.lock() {
                *reading = Some(thread::spawn(read));
            }
        }
    }

    fn decide(&self, non_finite: bool) -> &[String] {
        self.culprits.get_or_init(|| {
            let probes = self
                .probes
                .lock()
                .map(|mut probes| core::mem::take(&mut *probes));
            let probes = probes.unwrap_or_default();
            match non_finite {
                true => name(&self.paths, probes),
                false => Vec::new(),
            }
        })
    }
}

impl<I: Backend> Outcome for Verdict<I> {
    fn culprits(&self) -> &[String] {
        if let Some(culprits) = self.culprits.get() {
            return culprits;
        }
        let started = self.read.lock().ok().and_then(|mut read| read.take());
        let non_finite = match started {
            Some(read) => read.join().expect("the flag can be read from its device"),
            None => {
                let flag = self.non_finite.clone();
                flag.is_some_and(|flag| is_set(&flag.into_data()))
            }
        };
        self.decide(non_finite)
    }

    fn is_known(&self) -> bool {
        self.culprits.get().is_some()
    }
}

/// Settles `verdicts` and returns the values of `numbers`, each `[1]`, with one host read; a second
/// one follows for each verdict with a non-finite gradient, to name it.
pub fn read_together<I: Backend>(verdicts: &[&Verdict<I>], numbers: Vec<Tensor<I, 1>>) -> Vec<f64> {
    let unread = verdicts.iter().filter(|verdict| !verdict.is_known());
    let unread: Vec<_> = unread
        .filter_map(|verdict| Some((verdict, verdict.non_finite.clone()?)))
        .collect();
    let devices = unread.iter().map(|(_, flag)| flag.device());
    let Some(device) = devices.chain(numbers.iter().map(Tensor::device)).next() else {
        return Vec::new();
    };
    let mut transaction = Transaction::default();
    for (_, flag) in &unread {
        transaction = transaction.register(on(flag.clone(), &device));
    }
    for number in numbers {
        transaction = transaction.register(on(widen(number), &device));
    }
    let mut data = transaction.execute().into_iter();
    for ((verdict, _), flag) in unread.iter().zip(data.by_ref()) {
        verdict.decide(is_set(&flag));
    }
    data.flat_map(|number| number.iter::<f64>().collect::<Vec<_>>())
        .collect()
}

/// The paths of the parameters with a non-finite gradient, in module order. One host read.
pub fn non_finite_paths<B, M>(module: &M, gradients: &impl GradientsOf) -> Vec<String>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    let found = Inspection::new::<B, M>(module, gradients, Probe::Exact);
    name(&found.paths, found.probes)
}

/// The paths whose probes are non-finite, each once. One host read.
fn name<I: Backend>(paths: &[String], probes: Vec<Tensor<I, 2>>) -> Vec<String> {
    let values = read_numbers(probes.into_iter().map(Tensor::sum).collect());
    let culprits = paths
        .iter()
        .zip(values)
        .filter(|(_, value)| !value.is_finite());
    let mut culprits: Vec<_> = culprits.map(|(path, _)| path.clone()).collect();
    // A path occurs once for each device.
    culprits.dedup();
    culprits
}

/// The values of `[1]` tensors, in one host read and without a kernel.
pub fn read_numbers<I: Backend>(tensors: Vec<Tensor<I, 1>>) -> Vec<f64> {
    read_together(&[], tensors)
}

fn is_set(flag: &TensorData) -> bool {
    flag.iter::<bool>().any(|set| set)
}

/// `tensor` on `device`.
pub fn on<I: Backend, const D: usize, K: BasicOps<I>>(
    tensor: Tensor<I, D, K>,
    device: &Device<I>,
) -> Tensor<I, D, K> {
    match tensor.device() == *device {
        true => tensor,
        false => tensor.to_device(device),
    }
}

struct Inspector<'a, I: Backend, G> {
    gradients: &'a G,
    probe: Probe,
    path: Vec<String>,
    found: Inspection<I>,
}

impl<B: AutodiffBackend, G: GradientsOf> ModuleVisitor<B> for Inspector<'_, B::InnerBackend, G> {
    crate::follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let gradients = self.gradients.each::<B::InnerBackend, D>(param.id);
        // A shared parameter is visited several times.
        if gradients.is_empty() || !self.found.ids.insert(param.id) {
            return;
        }
        let path = self.path.join(".");
        let dtype = param.val().dtype();
        if matches!(dtype, DType::F16 | DType::BF16) {
            self.found.half.get_or_insert((path.clone(), dtype));
        }
        for gradient in gradients {
            let device = gradient.device();
            if !self.found.devices.contains(&device) {
                self.found.devices.push(device);
            }
            let probe = match self.probe {
                Probe::None => continue,
                Probe::Sum => widen(gradient).sum().reshape([1, 1]),
                Probe::Exact => {
                    let sums = of_rows(gradient);
                    self.found.add(sums.clone());
                    sums
                }
            };
            self.found.paths.push(path.clone());
            self.found.probes.push(probe);
        }
    }
}

/// `tensor` in a type to add in: at least f32.
pub fn widen<I: Backend, const D: usize>(tensor: Tensor<I, D>) -> Tensor<I, D> {
    match tensor.dtype() {
        DType::F32 | DType::F64 => tensor,
        _ => tensor.cast(DType::F32),
    }
}

/// A number that is finite if and only if all elements of `tensor` are.
pub fn exact<I: Backend, const D: usize>(tensor: Tensor<I, D>) -> Tensor<I, 1> {
    of_rows(tensor).sum()
}

/// Numbers that are finite if and only if all elements of `tensor` are: one for each row, f32
/// `[rows, 1]`.
fn of_rows<I: Backend, const D: usize>(tensor: Tensor<I, D>) -> Tensor<I, 2> {
    let tensor = widen(tensor);
    let rows = if D == 1 { 1 } else { tensor.dims()[0] };
    let columns = tensor.shape().num_elements() / rows.max(1);
    let exponent = match tensor.dtype() {
        DType::F64 => -960, // the sum fits f32
        _ => -64,
    };
    let tensor = tensor.reshape([rows, columns]);
    let sums = tensor.mul_scalar(2.0_f64.powi(exponent)).sum_dim(1);
    sums.cast(DType::F32)
}

/// How many paths [`name_some`] spells out.
const NAMED: usize = 8;

/// The first few of `parameters`, and how many there are.
pub fn name_some(parameters: &[String]) -> String {
    let named = parameters[..parameters.len().min(NAMED)].join(", ");
    match parameters.len() {
        0 => "no parameter".to_owned(),
        count if count > NAMED => format!("{named}, ... ({count} parameters)"),
        _ => named,
    }
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;

    use super::*;

    #[test]
    fn only_non_finite_elements_are_found() {
        let probe = |values: [f32; 3]| {
            let tensor = Tensor::<Flex, 1>::from_data(values, &Default::default());
            exact(tensor).into_scalar().is_finite()
        };
        assert!(probe([f32::MAX, f32::MAX, 1.0]));
        assert!(probe([f32::MAX, f32::MIN, f32::MIN_POSITIVE]));
        assert!(!probe([0.0, f32::NAN, 0.0]));
        assert!(!probe([f32::NEG_INFINITY, 0.0, 0.0]));
        assert!(!probe([f32::INFINITY, f32::NEG_INFINITY, 0.0]));
    }

    #[test]
    fn a_verdict_is_the_same_read_at_once_later_and_together() {
        let verdict = |values: [f32; 2]| {
            let device = Default::default();
            let probes = values.map(|value| Tensor::<Flex, 2>::from_data([[value]], &device));
            let mut inspection = Inspection {
                ids: HashSet::new(),
                paths: vec!["one".to_owned(), "other".to_owned()],
                half: None,
                devices: vec![device],
                probes: probes.to_vec(),
                totals: BTreeMap::new(),
            };
            probes.into_iter().for_each(|probe| inspection.add(probe));
            inspection.into_verdict()
        };
        for (values, culprits) in [
            ([1.0, 2.0], &[][..]),
            ([0.0, f32::NAN], &["other"]),
            ([f32::NEG_INFINITY, 0.0], &["one"]),
        ] {
            assert_eq!(verdict(values).culprits(), culprits);
            let started = verdict(values);
            started.start_reading();
            assert_eq!(started.culprits(), culprits);
            let (together, fine) = (verdict(values), verdict([0.0; 2]));
            let number = Tensor::<Flex, 1>::from_data([7.5], &Default::default());
            assert_eq!(read_together(&[&fine, &together], vec![number]), [7.5]);
            assert!(together.is_known());
            assert_eq!(together.culprits(), culprits);
        }
        assert_eq!(Verdict::<Flex>::known(vec![]).culprits(), &[] as &[String]);
    }

    #[test]
    fn long_lists_are_cut() {
        let paths: Vec<_> = (0..10).map(|i| format!("layers.{i}.weight")).collect();
        assert_eq!(name_some(&paths[..2]), "layers.0.weight, layers.1.weight");
        let text = name_some(&paths);
        assert!(
            text.ends_with("layers.7.weight, ... (10 parameters)"),
            "{text}"
        );
    }
}
