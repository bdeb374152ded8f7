//! Which gradients are non-finite: one number a parameter, made on the device and read as one small vector.

use std::{
    collections::HashSet,
    future::Future,
    pin::Pin,
    task::{Context, Poll, Waker},
};

use burn::{
    module::{AutodiffModule, ModuleVisitor, Param, ParamId},
    tensor::{
        BasicOps, Bool, DType, Device, Tensor, TensorData,
        backend::{AutodiffBackend, Backend, ExecutionError},
        read_sync,
    },
};

use super::gradients::StepGradients;
use crate::AmpError;

/// What is made of each gradient, `[1]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Probe {
    /// Its sum, in one kernel. A sum of finite numbers may overflow, but a finite sum has only finite terms: infinities and NaNs
    /// survive every addition. So finite sums are proof, and others ask for a [`Flag`](Self::Flag).
    Sum,
    /// Whether any element is non-finite.
    Flag,
}

/// The parameters of a module that have a gradient, and the probes of those.
pub(super) struct Inspection<I: Backend> {
    ids: HashSet<ParamId>,
    paths: Vec<String>,
    sums: Vec<Tensor<I, 1>>,
    flags: Vec<Tensor<I, 1, Bool>>,
}

impl<I: Backend> Inspection<I> {
    /// Launches the kernels; reads nothing.
    ///
    /// # Errors
    ///
    /// [`AmpError::HalfPrecisionParameter`] for the first parameter with a gradient that is itself f16 or bf16.
    pub(super) fn new<B, M>(
        module: &M,
        gradients: &StepGradients,
        probe: Probe,
    ) -> Result<Self, AmpError>
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
                sums: Vec::new(),
                flags: Vec::new(),
            },
            refused: None,
        };
        module.visit(&mut inspector);
        match inspector.refused {
            Some(error) => Err(error),
            None => Ok(inspector.found),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The parameters that have a gradient.
    pub(super) fn ids(&self) -> &HashSet<ParamId> {
        &self.ids
    }

    /// The devices that the gradients lie on.
    pub(super) fn devices(&self) -> Vec<Device<I>> {
        let mut devices = Vec::new();
        let sums = self.sums.iter().map(Tensor::device);
        for device in sums.chain(self.flags.iter().map(Tensor::device)) {
            if !devices.contains(&device) {
                devices.push(device);
            }
        }
        devices
    }

    /// Whether all sums are finite. One host read.
    pub(super) fn has_finite_sums(&self) -> bool {
        let sums = joined(&self.sums).into_data();
        sums.iter::<f64>().all(f64::is_finite)
    }

    /// All flags, as one vector on the first gradient's device.
    ///
    /// # Panics
    ///
    /// If there are no gradients.
    pub(super) fn flags(&self) -> Tensor<I, 1, Bool> {
        joined(&self.flags)
    }

    /// Starts to read `flags`.
    pub(super) fn read(self, flags: Tensor<I, 1, Bool>) -> CulpritRead {
        CulpritRead {
            paths: self.paths,
            flags: HostRead::start(flags.into_data_async()),
        }
    }
}

/// All as one vector, on the first one's device.
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

/// The paths of the parameters with a non-finite gradient, on their way to the host.
pub(super) struct CulpritRead {
    paths: Vec<String>,
    flags: HostRead,
}

impl CulpritRead {
    /// Waits for the flags.
    pub(super) fn wait(self) -> Vec<String> {
        let flags = self.flags.wait();
        self.paths
            .into_iter()
            .zip(flags.iter::<bool>())
            .filter_map(|(path, non_finite)| non_finite.then_some(path))
            .collect()
    }
}

type Data = Result<TensorData, ExecutionError>;

/// A copy to the host that has been started.
enum HostRead {
    Arrived(Data),
    Underway(Pin<Box<dyn Future<Output = Data> + Send>>),
}

impl HostRead {
    /// Futures do nothing until they are polled: one poll enqueues the copy right behind the kernels that it waits for.
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

struct Inspector<'a, I: Backend> {
    gradients: &'a StepGradients,
    probe: Probe,
    path: Vec<String>,
    found: Inspection<I>,
    refused: Option<AmpError>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Inspector<'_, B::InnerBackend> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(gradient) = self.gradients.get::<B::InnerBackend, D>(param.id) else {
            return;
        };
        // A shared parameter is met several times, and has one gradient.
        if !self.found.ids.insert(param.id) {
            return;
        }
        let path = self.path.join(".");
        let dtype = param.val().dtype();
        if matches!(dtype, DType::F16 | DType::BF16) {
            self.refused
                .get_or_insert(AmpError::HalfPrecisionParameter { path, dtype });
            return;
        }
        self.found.paths.push(path);
        match self.probe {
            Probe::Sum => self.found.sums.push(gradient.sum()),
            Probe::Flag => self.found.flags.push(non_finite(gradient)),
        }
    }
}

/// Exact, unlike a sum, and no `x * 0`, which fast-math may fold.
fn non_finite<I: Backend, const D: usize>(tensor: Tensor<I, D>) -> Tensor<I, 1, Bool> {
    tensor.clone().is_nan().bool_or(tensor.is_inf()).any()
}

#[cfg(test)]
mod tests {
    use core::future::poll_fn;

    use burn::tensor::{Tensor, TensorData};
    use burn_flex::Flex;

    use super::*;

    #[test]
    fn a_copy_that_takes_its_time_is_started_at_once_and_waited_for_later() {
        let polls = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let seen = polls.clone();
        let slow = poll_fn(move |context| {
            if seen.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < 2 {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            Poll::Ready(Ok(TensorData::from([false, true])))
        });
        let culprits = CulpritRead {
            paths: vec!["one".to_owned(), "other".to_owned()],
            flags: HostRead::start(slow),
        };
        assert_eq!(polls.load(std::sync::atomic::Ordering::Relaxed), 1);
        assert_eq!(culprits.wait(), ["other"]);
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
}
