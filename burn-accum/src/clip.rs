//! Clipping by the norm over all parameters.

use burn::{
    module::{AutodiffModule, ModuleVisitor, Param},
    optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer},
    tensor::{
        DType, Tensor,
        backend::{AutodiffBackend, Backend},
    },
};

use burn_decorator::{exact::Exact, message, non_finite::on};
use burn_update::{Arrived, items_id};

use crate::{AccumError, GradNorm, InvalidValue, counted::constant, multi_steps::raise};

/// Clips gradients by their norm over all parameters, in a [`burn_update::Update`]: `clip_norm(1.0)`
/// of [`ClipByNorm`](crate::ClipByNorm) is `clip(ClipNorm::new(1.0)?)`. [`ClipGlobalNorm`] has the
/// formula.
#[derive(Clone, Debug)]
pub struct ClipNorm {
    max_norm: f32,
    norm: GradNorm,
}

impl ClipNorm {
    /// Clips to a norm of at most `max_norm`. Infinity measures the norm and clips nothing.
    ///
    /// # Errors
    ///
    /// [`AccumError::InvalidValue`] unless `max_norm` is above 0.
    pub fn new(max_norm: f32) -> Result<Self, AccumError> {
        InvalidValue::unless(max_norm > 0.0, "max_norm", max_norm.into(), "above 0")?;
        Ok(Self {
            max_norm,
            norm: GradNorm::default(),
        })
    }

    /// A handle to read the last norm, also when the update is out of reach.
    pub fn norm(&self) -> GradNorm {
        self.norm.clone()
    }

    /// The gradients of `arrived`, clipped, and the norm that they had; `None` if there are none anywhere.
    /// `of_all_ranks` is the norm where these gradients are a rank's shards, f32 `[1]`.
    pub(crate) fn clip<B, M>(
        &self,
        module: &M,
        arrived: Arrived,
        of_all_ranks: Option<Tensor<B::InnerBackend, 1>>,
    ) -> (GradientsParams, Option<Tensor<B::InnerBackend, 1>>)
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let mut measure = Measure {
            arrived,
            merged: GradientsParams::new(),
            norms: Vec::new(),
        };
        module.visit(&mut measure);
        let Measure {
            arrived,
            merged,
            norms,
        } = measure;
        let Some(device) = norms.first().map(Tensor::<B::InnerBackend, 1>::device) else {
            // A rank without a shard: the norm is that of all ranks there too.
            if let Some(norm) = &of_all_ranks {
                self.norm.publish(norm.clone());
            }
            return (
                arrived.pass_items_on::<B::InnerBackend>(merged),
                of_all_ranks,
            );
        };

        let provided = self.norm.take_provided();
        let norm = match (of_all_ranks, provided) {
            (Some(norm), _) => on(norm, &device),
            (None, Some(norm)) => constant(norm.into(), &device),
            (None, None) => norm_of(norms),
        };
        self.norm.publish(norm.clone());
        let scale = self.max_norm.is_finite().then(|| {
            let scale = norm
                .clone()
                .add_scalar(1e-6)
                .recip()
                .mul_scalar(self.max_norm);
            scale.clamp_max(1.0)
        });
        let mut shrink = Shrink {
            gradients: merged,
            clipped: GradientsParams::new(),
            scale,
        };
        module.visit(&mut shrink);
        let clipped = arrived.pass_items_on::<B::InnerBackend>(shrink.clipped);
        (clipped, Some(norm))
    }
}

/// An optimizer whose gradients are clipped by their norm over all parameters
/// (`torch.nn.utils.clip_grad_norm_`, optax's `clip_by_global_norm`), as training recipes do.
/// Burn's own clipping clips each tensor by its own norm.
///
/// Each gradient is multiplied with `min(1, max_norm / (norm + 1e-6))`. A norm that is below the
/// bound by more than 1e-6 multiplies with exactly 1, which changes no bit. A non-finite gradient
/// is not hidden: infinity times 0 is NaN. Whether a NaN norm makes the other gradients NaN too, as
/// in PyTorch, depends on the backend's minimum of 1 and NaN.
///
/// ```
/// use burn::{backend::Autodiff, module::Param, optim::{GradientsParams, Optimizer, SgdConfig}, prelude::*};
/// use burn_accum::ClipGlobalNorm;
///
/// type B = Autodiff<burn_flex::Flex>;
/// let device = Default::default();
/// let mut model = nn::LinearConfig::new(2, 1).with_bias(false).init::<B>(&device);
/// model.weight = Param::from_data([[0.0], [0.0]], &device);
///
/// let mut optimizer = ClipGlobalNorm::new(SgdConfig::new().init(), 1.0)?;
/// let loss = model.forward(Tensor::<B, 2>::from_data([[3.0, 4.0]], &device)).sum();
/// let gradients = GradientsParams::from_grads(loss.backward(), &model);
/// let model = optimizer.step(1.0, model, gradients);
///
/// assert_eq!(optimizer.norm().last(), Some(5.0));
/// let clipped = burn::tensor::TensorData::from([[-0.6], [-0.8]]);
/// model.weight.val().into_data().assert_approx_eq::<f32>(&clipped, Default::default());
/// # Ok::<(), burn_accum::AccumError>(())
/// ```
///
/// # Panics
///
/// A step, if an optimizer inside reduces gradients over ranks (burn-zero's `ZeroOptimizer`): clip
/// inside of that one.
///
/// # Cost
///
/// Reads the gradients once, for their squares, and reads and writes them once. No host read: the
/// norm is read only by [`GradNorm::last`].
#[derive(Clone, Debug)]
pub struct ClipGlobalNorm<O> {
    inner: O,
    clip: ClipNorm,
    order_checked: bool,
}

impl<O> ClipGlobalNorm<O> {
    /// Wraps `inner`, which sees gradients of a norm of at most `max_norm`. Infinity measures the
    /// norm and clips nothing, as `torch.nn.utils.clip_grad_norm_(.., inf)` is used.
    ///
    /// # Errors
    ///
    /// [`AccumError::InvalidValue`] unless `max_norm` is above 0.
    pub fn new(inner: O, max_norm: f32) -> Result<Self, AccumError> {
        Ok(Self {
            inner,
            clip: ClipNorm::new(max_norm)?,
            order_checked: false,
        })
    }

    /// The largest norm that the wrapped optimizer sees.
    pub fn max_norm(&self) -> f32 {
        self.clip.max_norm
    }

    /// A handle to read the last norm, or to provide the next one, also when the optimizer is out
    /// of reach.
    pub fn norm(&self) -> GradNorm {
        self.clip.norm()
    }

    /// The wrapped optimizer.
    pub fn inner(&self) -> &O {
        &self.inner
    }

    /// Gives the wrapped optimizer back.
    pub fn into_inner(self) -> O {
        self.inner
    }

    /// Refuses an optimizer inside that reduces gradients over ranks: this rank's gradients have
    /// another norm than the reduced ones.
    fn check_order<B, M>(&mut self, lr: LearningRate, module: M) -> M
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        if core::mem::replace(&mut self.order_checked, true) {
            return module;
        }
        let (module, inside) =
            message::describe(|| self.inner.step(lr, module, GradientsParams::new()));
        if inside.ranks {
            let inner = message::short_name::<O>();
            raise(Err::<(), _>(AccumError::ClipAroundRanks { inner }))
        }
        module
    }
}

/// The norm of all is the norm of their norms.
fn norm_of<I: Backend>(norms: Vec<Tensor<I, 1>>) -> Tensor<I, 1> {
    let device = norms[0].device();
    let norms = norms.into_iter().map(|norm| on(norm, &device)).collect();
    Tensor::cat(norms, 0).square().sum().sqrt()
}

impl<O, M, B> Optimizer<M, B> for ClipGlobalNorm<O>
where
    O: Optimizer<M, B>,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    type Record = Exact<O::Record>;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        if message::received().is_some() {
            let module = self.inner.step(lr, module, grads);
            message::report(|inside| inside.checks = false); // it would get clipped gradients
            return module;
        }
        let module = self.check_order(lr, module);
        let gradients = self.clip.clip::<B, M>(&module, grads.into(), None).0;
        self.inner.step(lr, module, gradients)
    }

    /// Clips the sum over the devices.
    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        let module = self.check_order(lr, module);
        let gradients = self.clip.clip::<B, M>(&module, grads.into(), None).0;
        self.inner.step(lr, module, gradients)
    }

    fn to_record(&self) -> Self::Record {
        Exact(self.inner.to_record())
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        self.inner = self.inner.load_record(record.into_inner());
        self
    }
}

/// Adds the devices' gradients up and takes the norm of each parameter's.
struct Measure<I: Backend> {
    arrived: Arrived,
    merged: GradientsParams,
    /// f32 `[1]` each
    norms: Vec<Tensor<I, 1>>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Measure<B::InnerBackend> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        // A count is no gradient; it is passed on unchanged.
        if param.id == items_id() {
            return;
        }
        let gradient = self
            .arrived
            .add_to::<B::InnerBackend, D>(param.id, None, None);
        if let Some(gradient) = gradient {
            let norm = gradient.clone().square().sum().sqrt();
            self.norms.push(norm.cast(DType::F32));
            self.merged.register(param.id, gradient);
        }
    }
}

/// Multiplies the gradients, and gives them the data types of their parameters.
struct Shrink<I: Backend> {
    gradients: GradientsParams,
    /// Apart from `gradients`, as a tied parameter is visited more than once.
    clipped: GradientsParams,
    /// The factor, `[1]`; none leaves the gradients as they are.
    scale: Option<Tensor<I, 1>>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Shrink<B::InnerBackend> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(gradient) = self.gradients.remove::<B::InnerBackend, D>(param.id) else {
            return;
        };
        let clipped = match &self.scale {
            None => gradient,
            Some(scale) => {
                let scale = on(scale.clone(), &gradient.device()).cast(gradient.dtype());
                gradient.mul(scale.reshape([1; D]))
            }
        };
        let clipped = clipped.cast(param.val().dtype());
        self.clipped.register(param.id, clipped);
    }
}
