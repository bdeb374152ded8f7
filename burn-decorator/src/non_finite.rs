//! Finds non-finite gradients: one number per parameter, computed on the device and read as one small vector. With the feature `train`.

use std::collections::HashSet;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use burn::module::{AutodiffModule, ModuleVisitor, Param, ParamId};
use burn::tensor::backend::{AutodiffBackend, Backend, ExecutionError};
use burn::tensor::{BasicOps, Bool, DType, Device, Tensor, TensorData, read_sync};

/// The gradients of a step, in the container of an optimizer decorator.
pub trait GradientsOf {
    /// The gradients of a parameter: none, one, or one per device.
    fn each<I: Backend, const D: usize>(&self, id: ParamId) -> Vec<Tensor<I, D>>;
}

/// What is computed from each gradient, as a tensor of shape `[1]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// Its sum, at least in f32, in one kernel. A finite sum proves that all terms are finite, because infinities and NaNs survive
    /// every addition. A sum of finite numbers may overflow, so a non-finite sum needs a [`Flag`](Self::Flag) to decide.
    Sum,
    /// Whether any element is non-finite.
    Flag,
}

/// The probes of a module's gradients. Making them launches kernels and reads nothing.
pub struct Inspection<I: Backend> {
    ids: HashSet<ParamId>,
    paths: Vec<String>,
    half: Option<(String, DType)>,
    sums: Vec<Tensor<I, 1>>,
    flags: Vec<Tensor<I, 1, Bool>>,
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
                sums: Vec::new(),
                flags: Vec::new(),
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
    pub fn devices(&self) -> Vec<Device<I>> {
        let mut devices = Vec::new();
        let sums = self.sums.iter().map(Tensor::device);
        for device in sums.chain(self.flags.iter().map(Tensor::device)) {
            if !devices.contains(&device) {
                devices.push(device);
            }
        }
        devices
    }

    /// Whether all sums are finite, and the values of `others`, each `[1]`, which the same host read brings.
    pub fn has_finite_sums(&self, others: Vec<Tensor<I, 1>>) -> (bool, Vec<f64>) {
        let mut values = read_numbers(self.sums.iter().cloned().chain(others).collect());
        let others = values.split_off(self.sums.len());
        (values.into_iter().all(f64::is_finite), others)
    }

    /// All flags, as one vector on the first gradient's device.
    ///
    /// # Panics
    ///
    /// If there are no gradients.
    pub fn flags(&self) -> Tensor<I, 1, Bool> {
        joined(&self.flags)
    }

    /// Starts to read `flags`, which [`Self::flags`] returned.
    pub fn read(self, flags: Tensor<I, 1, Bool>) -> NonFiniteRead {
        NonFiniteRead {
            paths: self.paths,
            flags: HostRead::start(flags.into_data_async()),
        }
    }
}

/// The paths of the parameters with a non-finite gradient, in module order. One host read.
pub fn non_finite_paths<B, M>(module: &M, gradients: &impl GradientsOf) -> Vec<String>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    let found = Inspection::new::<B, M>(module, gradients, Probe::Flag);
    if found.ids.is_empty() {
        return Vec::new();
    }
    let flags = found.flags();
    found.read(flags).wait()
}

/// The values of `[1]` tensors, in one host read.
pub fn read_numbers<I: Backend>(tensors: Vec<Tensor<I, 1>>) -> Vec<f64> {
    if tensors.is_empty() {
        return Vec::new();
    }
    let tensors: Vec<_> = tensors.into_iter().map(widen).collect();
    joined(&tensors).into_data().iter().collect()
}

/// All tensors as one vector, on the first one's device.
fn joined<I: Backend, K: BasicOps<I>>(tensors: &[Tensor<I, 1, K>]) -> Tensor<I, 1, K> {
    let device = tensors[0].device();
    let tensors = tensors
        .iter()
        .map(|tensor| match tensor.device() == device {
            true => tensor.clone(),
            false => tensor.clone().to_device(&device),
        });
    Tensor::cat(tensors.collect(), 0)
}

/// The paths of the parameters with a non-finite gradient, while the flags are copied to the host.
pub struct NonFiniteRead {
    paths: Vec<String>,
    flags: HostRead,
}

impl NonFiniteRead {
    /// Waits for the flags. Each path once, in module order.
    pub fn wait(self) -> Vec<String> {
        let flags = self.flags.wait();
        let paths = self.paths.into_iter().zip(flags.iter::<bool>());
        let mut paths: Vec<_> = paths
            .filter_map(|(path, non_finite)| non_finite.then_some(path))
            .collect();
        // A path occurs once for each device.
        paths.dedup();
        paths
    }
}

type Data = Result<TensorData, ExecutionError>;

/// A copy to the host that has been started.
enum HostRead {
    Arrived(Data),
    Underway(Pin<Box<dyn Future<Output = Data> + Send>>),
}

impl HostRead {
    /// A future does nothing until it is polled, so one poll enqueues the copy directly after the kernels that it waits for.
    fn start(data: impl Future<Output = Data> + Send + 'static) -> Self {
        let mut data = Box::pin(data);
        match data.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(data) => Self::Arrived(data),
            Poll::Pending => Self::Underway(data),
        }
    }

    fn wait(self) -> TensorData {
        let data = match self {
            Self::Arrived(data) => data,
            Self::Underway(data) => read_sync(data),
        };
        data.expect("the flags can be read from their device")
    }
}

struct Inspector<'a, I: Backend, G> {
    gradients: &'a G,
    probe: Probe,
    path: Vec<String>,
    found: Inspection<I>,
}

impl<B: AutodiffBackend, G: GradientsOf> ModuleVisitor<B> for Inspector<'_, B::InnerBackend, G> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

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
            self.found.paths.push(path.clone());
            match self.probe {
                Probe::Sum => self.found.sums.push(widen(gradient).sum()),
                Probe::Flag => self.found.flags.push(non_finite(gradient)),
            }
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

/// Exact, unlike a sum. It does not compute `x * 0`, which fast-math may fold.
fn non_finite<I: Backend, const D: usize>(tensor: Tensor<I, D>) -> Tensor<I, 1, Bool> {
    tensor.clone().is_nan().bool_or(tensor.is_inf()).any()
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
    use core::future::poll_fn;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use burn_flex::Flex;

    use super::*;

    #[test]
    fn a_copy_that_takes_its_time_is_started_at_once_and_waited_for_later() {
        let polls = Arc::new(AtomicUsize::new(0));
        let seen = polls.clone();
        let slow = poll_fn(move |context| {
            if seen.fetch_add(1, Ordering::Relaxed) < 2 {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            Poll::Ready(Ok(TensorData::from([false, true])))
        });
        let read = NonFiniteRead {
            paths: vec!["one".to_owned(), "other".to_owned()],
            flags: HostRead::start(slow),
        };
        assert_eq!(polls.load(Ordering::Relaxed), 1);
        assert_eq!(read.wait(), ["other"]);
    }

    #[test]
    fn only_non_finite_elements_set_the_flag() {
        let flag = |values: [f32; 3]| {
            let tensor = Tensor::<Flex, 1>::from_data(values, &Default::default());
            non_finite(tensor).into_data()
        };
        let (set, unset) = (TensorData::from([true]), TensorData::from([false]));
        flag([f32::MAX, f32::MAX, 1.0]).assert_eq(&unset, false);
        flag([f32::MAX, f32::MIN, f32::MIN_POSITIVE]).assert_eq(&unset, false);
        flag([0.0, f32::NAN, 0.0]).assert_eq(&set, false);
        flag([f32::NEG_INFINITY, 0.0, 0.0]).assert_eq(&set, false);
        flag([f32::INFINITY, f32::NEG_INFINITY, 0.0]).assert_eq(&set, false);
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
