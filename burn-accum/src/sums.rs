//! The accumulators of a window, one per parameter, in f32 on every backend, and its micro-steps
//! that the host has not read yet.

use std::{
    any::Any,
    collections::{HashMap, HashSet},
    sync::Arc,
};

use burn::{
    module::{AutodiffModule, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{
        Tensor, TensorPrimitive,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_decorator::non_finite::{Outcome, Verdict, on, read_together};
use burn_update::Arrived;

use crate::tally::Step;

/// The sums of a window's gradients on the backend `I`. Parameters that got none have no entry.
pub(crate) type Sums<I> = HashMap<ParamId, TensorPrimitive<I>>;

/// A window on the backend `I`.
#[derive(Clone)]
pub(crate) struct Window<I: Backend> {
    sums: Sums<I>,
    /// The order of the parameters in the module.
    places: HashMap<ParamId, usize>,
    unread: Vec<Unread<I>>,
    /// The parameters with a sum before the first unread micro-step.
    certain: HashSet<ParamId>,
}

/// A micro-step that is in the sums unless the device found it non-finite.
#[derive(Clone)]
pub(crate) struct Unread<I: Backend> {
    pub(crate) step: Step,
    pub(crate) verdict: Arc<Verdict<I>>,
    /// f32 `[1]` each
    pub(crate) counts: Vec<Tensor<I, 1>>,
}

/// A micro-step whose outcome the host knows.
pub(crate) struct Known {
    pub(crate) step: Step,
    pub(crate) culprits: Vec<String>,
    pub(crate) counts: Vec<f64>,
}

impl<I: Backend> From<Sums<I>> for Window<I> {
    fn from(sums: Sums<I>) -> Self {
        Self {
            certain: HashSet::new(),
            places: HashMap::new(),
            unread: Vec::new(),
            sums,
        }
    }
}

impl<I: Backend> Window<I> {
    /// Adds the gradients of a micro-step, in place: reads each gradient, reads and writes each
    /// sum. The first ones of a window are not copied, but become the sums. The device leaves them
    /// out if the verdict of `unread` says so.
    pub(crate) fn add<B, M>(&mut self, module: &M, arrived: Arrived, unread: Option<Unread<I>>)
    where
        B: AutodiffBackend<InnerBackend = I>,
        M: AutodiffModule<B>,
    {
        if self.unread.is_empty() {
            self.certain = self.sums.keys().copied().collect();
        }
        let verdict = unread.as_ref().map(|unread| unread.verdict.clone());
        self.unread.extend(unread);
        module.visit(&mut Adder {
            arrived,
            verdict: verdict.as_deref(),
            sums: &mut self.sums,
            places: &mut self.places,
        });
    }

    /// The micro-steps that have not been read.
    pub(crate) fn unread(&self) -> &[Unread<I>] {
        &self.unread
    }

    /// Reads them, in one host read, and takes out what none of the finite ones has brought. With
    /// `probe_sums` the same read tells whether the sum of the elements of each accumulator is
    /// finite.
    pub(crate) fn read(&mut self, probe_sums: bool) -> (Vec<Known>, bool) {
        let unread = core::mem::take(&mut self.unread);
        let verdicts: Vec<_> = unread.iter().map(|unread| &*unread.verdict).collect();
        let counts = unread.iter().flat_map(|unread| unread.counts.clone());
        let mut numbers: Vec<_> = counts.collect();
        if probe_sums {
            let mut sums: Vec<_> = self.sums.iter().collect();
            // Each run has the same operations in the same order.
            sums.sort_by_key(|(id, _)| self.places.get(id));
            numbers.extend(sums.into_iter().map(|(_, sum)| {
                let sum = sum.clone();
                let sum = TensorPrimitive::Float(I::float_sum(sum.tensor()));
                Tensor::<I, 1>::from_primitive(sum)
            }));
        }
        let mut numbers = read_together(&verdicts, numbers).into_iter();
        let known: Vec<_> = unread
            .iter()
            .map(|unread| Known {
                step: unread.step,
                culprits: unread.verdict.culprits().to_vec(),
                counts: numbers.by_ref().take(unread.counts.len()).collect(),
            })
            .collect();
        if known.iter().any(|known| !known.culprits.is_empty()) {
            let finite = unread.iter().zip(&known);
            let finite = finite.filter(|(_, known)| known.culprits.is_empty());
            for (unread, _) in finite {
                self.certain.extend(unread.verdict.ids());
            }
            self.sums.retain(|id, _| self.certain.contains(id));
        }
        (known, numbers.all(f64::is_finite))
    }

    /// A copy that shares the tensors.
    pub(crate) fn sums(&self) -> Sums<I> {
        self.sums.clone()
    }

    /// Ends the window: the sums divided by `divisor`, in the data types of the parameters.
    pub(crate) fn divide<B, M>(&mut self, module: &M, divisor: f64) -> GradientsParams
    where
        B: AutodiffBackend<InnerBackend = I>,
        M: AutodiffModule<B>,
    {
        let mut divider = Divider {
            sums: core::mem::take(&mut self.sums),
            divisor,
            gradients: GradientsParams::new(),
        };
        module.visit(&mut divider);
        divider.gradients
    }
}

/// A [`Window`] with the backend's type erased: only the methods of the optimizer know it, not its
/// type.
#[derive(Default)]
pub(crate) struct AnyWindow(Option<Box<dyn Erased>>);

trait Erased: Any + Send {
    fn duplicate(&self) -> Box<dyn Erased>;
}

impl<I: Backend> Erased for Window<I> {
    fn duplicate(&self) -> Box<dyn Erased> {
        Box::new(self.clone())
    }
}

impl Clone for AnyWindow {
    /// Shares the tensors until one of the two adds to them.
    fn clone(&self) -> Self {
        Self(self.0.as_ref().map(|window| window.duplicate()))
    }
}

impl<I: Backend> From<Sums<I>> for AnyWindow {
    fn from(sums: Sums<I>) -> Self {
        Self(Some(Box::new(Window::from(sums))))
    }
}

impl AnyWindow {
    /// The window, for changing it.
    pub(crate) fn of<I: Backend>(&mut self) -> &mut Window<I> {
        let window = self
            .0
            .get_or_insert_with(|| Box::new(Window::<I>::from(Sums::<I>::new())));
        let window: &mut dyn Any = window.as_mut();
        let expectation = "the gradients of a window are of one backend";
        window.downcast_mut().expect(expectation)
    }
}

struct Adder<'a, I: Backend> {
    arrived: Arrived,
    verdict: Option<&'a Verdict<I>>,
    sums: &'a mut Sums<I>,
    places: &'a mut HashMap<ParamId, usize>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Adder<'_, B::InnerBackend> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        // Removed from the map for the addition, because only a tensor with one owner is
        // overwritten in place.
        let sum = self.sums.remove(&param.id).map(Tensor::from_primitive);
        // Burn loads a window to the default device. On several devices a gradient says where its
        // sum belongs.
        let sum = match self.arrived.is_of_one_device() {
            true => sum.map(|sum| on(sum, &param.val().device())),
            false => sum,
        };
        let non_finite = self.verdict.and_then(Verdict::non_finite);
        let sum = self
            .arrived
            .add_to::<B::InnerBackend, D>(param.id, sum, non_finite);
        if let Some(sum) = sum {
            let place = self.places.len();
            self.places.entry(param.id).or_insert(place);
            self.sums.insert(param.id, sum.into_primitive());
        }
    }
}

struct Divider<I: Backend> {
    sums: Sums<I>,
    divisor: f64,
    gradients: GradientsParams,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Divider<B::InnerBackend> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(sum) = self.sums.remove(&param.id) else {
            return;
        };
        let mut sum = Tensor::<B::InnerBackend, D>::from_primitive(sum);
        if self.divisor != 1.0 {
            sum = sum.div_scalar(self.divisor);
        }
        let dtype = param.val().dtype();
        if sum.dtype() != dtype {
            sum = sum.cast(dtype);
        }
        self.gradients.register(param.id, sum);
    }
}
