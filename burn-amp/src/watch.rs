//! Finds the first operation with a non-finite result, by running a step once more with a look at
//! every result.
#![deny(clippy::missing_trait_methods)]

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, LazyLock};
use std::thread::{self, ThreadId};

use burn::module::{AutodiffModule, ParamId};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::read_sync;
use burn_backend::{Backend, BackendTypes, DType, TensorMetadata};
use burn_decorator::carried::{carry, hide, with};
use burn_decorator::gradient::{Pass, non_finite_on_any_rank, pass};
use burn_decorator::module::{for_each_float, independent, map_floats};
use burn_decorator::types::*;
use burn_decorator::{kind_type, map_operand, map_result};
use parking_lot::Mutex;

use crate::scaler::{saying, watching};

/// A backend that can be looked at by [`first_non_finite`] and [`explain_overflow`]:
/// `Autocast<Autodiff<Watch<Cuda>>, F16>`.
///
/// Put it below `Autodiff`, so that backward operations are seen too. Where nothing looks, an
/// operation costs one thread-local read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Watch<B>(PhantomData<B>);

/// A float tensor of [`Watch`].
#[derive(Clone, Debug)]
pub struct WatchedTensor<T> {
    tensor: T,
    /// The parameter that it is, or is a view or a cast of; only while something looks.
    parameter: Option<Arc<str>>,
    /// Whether an element is infinite on purpose. `None` if it was made while nothing looked: it is
    /// then read where it is an operand.
    infinite: Option<bool>,
}

/// The first operation of a step whose result is not finite.
#[derive(Clone, Debug, PartialEq)]
pub struct FirstNonFinite {
    /// The backend's operation, such as `float_matmul`.
    pub operation: &'static str,
    /// The type of its result.
    pub dtype: DType,
    /// Whether it ran in the backward pass.
    pub backward: bool,
    /// The path of the parameter among its operands; if none is, of the last one used before.
    pub parameter: Option<String>,
    /// The last operations before it, the oldest first, each with the largest magnitude of its
    /// result.
    pub before: Vec<(&'static str, f64)>,
}

impl fmt::Display for FirstNonFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pass = if self.backward { "backward" } else { "forward" };
        let (operation, dtype) = (self.operation, self.dtype.name());
        write!(
            f,
            "the first non-finite result is that of `{operation}` in {dtype}, in the {pass} pass"
        )?;
        if let Some(parameter) = &self.parameter {
            write!(f, ", at parameter `{parameter}`")?;
        }
        f.write_str("; largest magnitudes before it:")?;
        for (operation, largest) in &self.before {
            write!(f, " {operation} {largest:.3e}")?;
        }
        Ok(())
    }
}

/// How many operations before the first bad one are told.
const BEFORE: usize = 4;

#[derive(Default)]
struct Found {
    before: VecDeque<(&'static str, f64)>,
    parameter: Option<Arc<str>>,
    first: Option<FirstNonFinite>,
}

/// The path of the parameter that is made.
struct Made(Arc<str>);

/// Runs `f`, whose operations are no part of the user's step.
pub(crate) fn unseen<R>(f: impl FnOnce() -> R) -> R {
    hide::<Found, _>(f)
}

/// Runs `step`, a forward and a backward pass, on a copy of `module`, and returns the first
/// operation with a non-finite result. An infinity that the step is given (the filling of a mask,
/// in `from_data`, or in a tensor made before it) is none, nor is one computed from it. `None` also
/// where no [`Watch`] is below autodiff.
///
/// The copy shares no running statistics with `module`, which stays as it is. Random numbers are
/// drawn from the backend's generator, which Burn 0.21 can seed but not read: call `Backend::seed`
/// afterwards where those that follow matter.
///
/// # Cost
///
/// Reads every result to the host, and a tensor made before the step each time it is an operand:
/// for finding a fault.
///
/// ```
/// use burn::{backend::Autodiff, nn::LinearConfig, tensor::Tensor};
/// use burn_amp::{Autocast, F16, Watch, first_non_finite};
/// use burn_flex::Flex;
///
/// type B = Autocast<Autodiff<Watch<Flex>>, F16>;
/// let device = Default::default();
/// let linear = LinearConfig::new(2, 2).init::<B>(&device);
/// let found = first_non_finite(&linear, |linear| {
///     let x = Tensor::<B, 2>::full([1, 2], 60_000.0, &device).mul_scalar(1e3);
///     linear.forward(x).sum().backward();
/// });
/// let found = found.unwrap(); // 6e7 is beyond f16
/// assert_eq!((found.operation, found.backward), ("float_cast", false));
/// ```
pub fn first_non_finite<B, M, R>(module: &M, step: impl FnOnce(&M) -> R) -> Option<FirstNonFinite>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    let module = labelled::<B, M>(independent::<B, M>(module));
    let (_, found) = carry(Found::default(), || step(&module));
    found?.first
}

/// Runs `step` on `model` and `input`, in `TrainStep::step`: if the loss or a gradient is infinite
/// or NaN, runs it once more, at the same scale, and tells the [`FirstNonFinite`] operation: in a
/// warning, in [`explained`], and where there is a [`GradScaler`](crate::GradScaler) in
/// [`first_non_finite`](crate::GradScaler::first_non_finite). That happens once for each model and
/// thread. It works under every policy of [`Autocast`](crate::Autocast), with and without a scaler.
///
/// The gradients are those that `step` reads, as Burn's `TrainOutput::new` and
/// `GradientsParams::from_grads` do. Where ranks train together all of them call it, and all repeat
/// the step, which one of them found.
///
/// Until then it keeps a copy of the input during the step, and reads one number from the device
/// after it. The repetition leaves running statistics as they are. It draws new random numbers, so
/// those that follow are others: Burn's generator can be seeded but not read.
///
/// ```
/// use burn::{backend::Autodiff, module::Param, nn::{Linear, LinearConfig}, optim::GradientsParams, tensor::Tensor};
/// use burn_amp::{Autocast, Watch, explain_overflow, explained};
/// use burn_flex::Flex;
///
/// type B = Autocast<Autodiff<Watch<Flex>>>; // bf16
/// let device = Default::default();
/// let model = LinearConfig::new(1, 1).init::<B>(&device);
/// let x = Tensor::<B, 2>::zeros([1, 1], &device);
/// let _gradients = explain_overflow(&model, x, |model, x| {
///     let loss = (model.forward(x.clone()) - model.forward(x)).log().mean().log(); // of a number below 0
///     GradientsParams::from_grads(loss.backward(), model)
/// });
/// assert_eq!(explained::<B, _>(&model).unwrap().operation, "float_log");
/// ```
pub fn explain_overflow<B, M, I, R>(model: &M, input: I, step: fn(&M, I) -> R) -> R
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    I: Clone,
{
    let key = key::<B, M>(model);
    if looks() || EXPLAINED.lock().contains_key(&key) {
        return step(model, input);
    }
    let again = input.clone();
    let (result, mut seen) = watching(|| step(model, input));
    let own = if seen.found_non_finite() {
        vec!["a loss or a gradient".to_owned()]
    } else {
        Vec::new()
    };
    if non_finite_on_any_rank(own).is_empty() {
        return result;
    }
    let found = saying(seen.said(), || {
        first_non_finite(model, |model| step(model, again))
    });
    match &found {
        Some(found) => burn_decorator::warn_user!(
            "a step with a loss or a gradient that is not finite, run once more: {found}"
        ),
        None => burn_decorator::warn_user!(
            "a step with a loss or a gradient that is not finite, run once more: no result was, or there is no burn_amp::Watch \
             below autodiff"
        ),
    }
    seen.tell(found.clone());
    EXPLAINED.lock().insert(key, found);
    result
}

/// What [`explain_overflow`] has found for a model.
pub fn explained<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> Option<FirstNonFinite> {
    let (_, model) = key::<B, M>(model);
    let explained = EXPLAINED.lock();
    let mut of_model = explained.iter().filter(|((_, other), _)| *other == model);
    of_model.find_map(|(_, found)| found.clone())
}

/// By thread, because ranks that are threads must decide alike, and by the model's first parameter.
type Explained = HashMap<(ThreadId, Option<ParamId>), Option<FirstNonFinite>>;

static EXPLAINED: LazyLock<Mutex<Explained>> = LazyLock::new(Mutex::default);

/// The key of a model on this thread.
fn key<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> (ThreadId, Option<ParamId>) {
    let mut first = None;
    for_each_float::<B, M>(model, |_, id, _| {
        first.get_or_insert(id);
    });
    (thread::current().id(), first)
}

/// The module with parameters that know their paths.
fn labelled<B: AutodiffBackend, M: AutodiffModule<B>>(module: M) -> M {
    map_floats(module, |path, _, tensor: FloatTensor<B>| {
        let is_require_grad = B::float_is_require_grad(&tensor);
        let again = || B::InnerBackend::float_mul_scalar(B::inner(tensor), Scalar::Float(1.0));
        let (tensor, _) = carry(Made(path.into()), again);
        B::float_set_require_grad(B::from_inner(tensor), is_require_grad)
    })
}

/// Whether something looks at results: until the first operation is found.
fn looks() -> bool {
    with(|found: &mut Found| found.first.is_none()) == Some(true)
}

fn read<B: Backend>(tensor: &B::FloatTensorPrimitive) -> TensorData {
    let data = read_sync(B::float_into_data(tensor.clone()));
    data.expect("a tensor can be read from its device")
}

fn has_infinity(data: &TensorData) -> bool {
    data.iter::<f64>().any(f64::is_infinite)
}

/// An operation.
struct Call {
    op: &'static str,
    looks: bool,
    /// Its result is its operand in another form.
    moves: bool,
    /// Its result may be infinite: it writes a scalar or data, or has an infinite operand.
    may_be_infinite: bool,
    parameter: Option<Arc<str>>,
}

impl Call {
    fn takes<B: Backend>(&mut self, operand: &FloatTensor<Watch<B>>) {
        let infinite = || self.looks && has_infinity(&read::<B>(&operand.tensor));
        self.may_be_infinite = self.may_be_infinite || operand.infinite.unwrap_or_else(infinite);
        if self.parameter.is_none() {
            self.parameter.clone_from(&operand.parameter);
        }
    }

    fn result<B: Backend>(&self, mut tensor: B::FloatTensorPrimitive) -> FloatTensor<Watch<B>> {
        if self.looks && self.op == "float_empty" {
            // Memory that nothing was written to holds anything, also NaN.
            let (device, dtype) = (B::float_device(&tensor), tensor.dtype());
            tensor = B::float_zeros(tensor.shape(), &device, dtype.into());
        }
        let made = with(|made: &mut Made| made.0.clone());
        let infinite = self.looks.then(|| {
            let data = read::<B>(&tensor);
            self.look(&data);
            has_infinity(&data)
        });
        let parameter = made.or_else(|| self.parameter.clone().filter(|_| self.moves));
        WatchedTensor {
            tensor,
            parameter,
            infinite,
        }
    }

    fn look(&self, data: &TensorData) {
        let is_bad = |x: f64| x.is_nan() || x.is_infinite() && !self.may_be_infinite;
        let largest = data.iter::<f64>().map(f64::abs).fold(0.0, f64::max);
        with(|found: &mut Found| {
            if self.parameter.is_some() {
                found.parameter.clone_from(&self.parameter);
            }
            if data.iter::<f64>().any(is_bad) {
                found.first = Some(FirstNonFinite {
                    operation: self.op,
                    dtype: data.dtype,
                    backward: pass() == Some(Pass::Backward),
                    parameter: found.parameter.as_ref().map(|path| path.to_string()),
                    before: found.before.drain(..).collect(),
                });
                return;
            }
            if found.before.len() == BEFORE {
                found.before.pop_front();
            }
            found.before.push_back((self.op, largest));
        });
    }
}

impl<T: TensorMetadata> TensorMetadata for WatchedTensor<T> {
    burn_decorator::forward_metadata!(tensor);
}

impl<B: Backend> BackendTypes for Watch<B> {
    burn_decorator::forward_types!(B, float tensor: WatchedTensor<B::FloatTensorPrimitive>);
}

impl<B: Backend> Backend for Watch<B> {
    burn_decorator::forward_device!(B);
    burn_decorator::forward_dtypes!(B);

    fn name(device: &Self::Device) -> String {
        format!("watch<{}>", B::name(device))
    }
}

/// Whether an operation writes a scalar argument, or data.
const fn fills(op: &str) -> bool {
    matches!(
        op.as_bytes(),
        b"float_from_data" | b"float_full" | b"float_mask_fill"
    )
}

macro_rules! unwrap {
    (FloatRef $x:expr) => {
        &$x.tensor
    };
    ($kind:tt $x:expr) => {
        map_operand!($kind $x, |x: WatchedTensor<_>| x.tensor)
    };
}

/// Looks at an operand.
macro_rules! find {
    (Float $x:ident $call:ident) => {
        $call.takes::<B>(&$x)
    };
    (Follow $x:ident $call:ident) => {
        $call.takes::<B>(&$x)
    };
    (FloatOpt $x:ident $call:ident) => {
        $x.iter().for_each(|x| $call.takes::<B>(x))
    };
    (Floats $x:ident $call:ident) => {
        $x.iter().for_each(|x| $call.takes::<B>(x))
    };
    ($kind:tt $x:ident $call:ident) => {};
}

macro_rules! implement {
    ($trait:ident $($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<B: Backend> $trait<Self> for Watch<B> {
            $(fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
                #[allow(unused_mut, unused_variables, reason = "rows without float tensors")]
                let mut call = Call {
                    op: stringify!($op),
                    looks: looks(),
                    moves: stringify!($work) == "view" || stringify!($op) == "float_cast",
                    may_be_infinite: fills(stringify!($op)),
                    parameter: None,
                };
                $(find!($kind $arg call);)*
                map_result!($ret B::$op($(unwrap!($kind $arg)),*), |tensor| call.result::<B>(tensor))
            })*
        }
    };
}

burn_decorator::every_ops!(implement);
