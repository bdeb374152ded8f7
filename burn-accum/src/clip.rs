//! Clipping by the norm over all parameters.

use burn::{
    module::{AutodiffModule, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{
        DType, Tensor,
        backend::{AutodiffBackend, Backend},
    },
};

use burn_decorator::non_finite::{on, widen};

use crate::{AccumError, GradNorm};

/// Clips the gradients of a [`burn_update::Update`] by their norm over all parameters
/// (`torch.nn.utils.clip_grad_norm_`, optax's `clip_by_global_norm`), as training recipes do:
/// `clip_norm(1.0)` of [`ClipByNorm`](crate::ClipByNorm) is `clip(ClipNorm::new(1.0)?)`. Burn's own
/// clipping clips each tensor by its own norm.
///
/// Each gradient is multiplied with `min(1, max_norm / (norm + 1e-6))`. A norm that is below the
/// bound by more than 1e-6 multiplies with exactly 1, which changes no bit. A non-finite gradient
/// is not hidden: infinity times 0 is NaN. Whether a NaN norm makes the other gradients NaN too, as
/// in PyTorch, depends on the backend's minimum of 1 and NaN.
///
/// ```
/// use burn::{backend::Autodiff, module::Param, optim::SgdConfig, prelude::*};
/// use burn_accum::ClipNorm;
/// use burn_update::Update;
///
/// type B = Autodiff<burn_flex::Flex>;
/// let device = Default::default();
/// let mut model = nn::LinearConfig::new(2, 1).with_bias(false).init::<B>(&device);
/// model.weight = Param::from_data([[0.0], [0.0]], &device);
///
/// let clip = ClipNorm::new(1.0)?;
/// let norm = clip.norm();
/// let mut update = Update::new(SgdConfig::new().init()).clip(clip)?;
/// let loss = model.forward(Tensor::<B, 2>::from_data([[3.0, 4.0]], &device)).sum();
/// let gradients = update.backward(&model, loss);
/// let model = update.step(1.0, model, gradients)?;
///
/// assert_eq!(norm.last(), Some(5.0));
/// let clipped = burn::tensor::TensorData::from([[-0.6], [-0.8]]);
/// model.weight.val().into_data().assert_approx_eq::<f32>(&clipped, Default::default());
/// # Ok::<(), burn_update::UpdateError>(())
/// ```
///
/// # Cost
///
/// Reads the gradients once, for their squares, and reads and writes them once. No host read: the
/// norm is read only by [`GradNorm::last`].
#[derive(Clone, Debug)]
pub struct ClipNorm {
    max_norm: f32,
    norm: GradNorm,
}

impl ClipNorm {
    /// Clips to a norm of at most `max_norm`. Infinity measures the norm and clips nothing, as
    /// `torch.nn.utils.clip_grad_norm_(.., inf)` is used.
    ///
    /// # Errors
    ///
    /// [`AccumError::InvalidValue`] unless `max_norm` is above 0.
    pub fn new(max_norm: f32) -> Result<Self, AccumError> {
        AccumError::unless(max_norm > 0.0, "max_norm", max_norm.into(), "above 0")?;
        Ok(Self {
            max_norm,
            norm: GradNorm::default(),
        })
    }

    /// A handle to read the last norm, also when the update is out of reach.
    pub fn norm(&self) -> GradNorm {
        self.norm.clone()
    }

    /// The gradients, clipped, and the norm that they had; `None` if there are none anywhere.
    /// `of_all_ranks` is the norm where these gradients are a rank's shards, f32 `[1]`.
    pub(crate) fn clip<B, M>(
        &self,
        module: &M,
        gradients: GradientsParams,
        of_all_ranks: Option<Tensor<B::InnerBackend, 1>>,
    ) -> (GradientsParams, Option<Tensor<B::InnerBackend, 1>>)
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let mut measure = Measure {
            gradients,
            widened: GradientsParams::new(),
            norms: Vec::new(),
        };
        module.visit(&mut measure);
        let Measure { widened, norms, .. } = measure;
        let Some(device) = norms.first().map(Tensor::<B::InnerBackend, 1>::device) else {
            // A rank without a shard: the norm is that of all ranks there too.
            if let Some(norm) = &of_all_ranks {
                self.norm.publish(norm.clone());
            }
            return (widened, of_all_ranks);
        };

        let norm = match of_all_ranks {
            Some(norm) => on(norm, &device),
            None => norm_of(norms),
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
            gradients: widened,
            clipped: GradientsParams::new(),
            scale,
        };
        module.visit(&mut shrink);
        (shrink.clipped, Some(norm))
    }
}

/// The norm of all is the norm of their norms.
fn norm_of<I: Backend>(norms: Vec<Tensor<I, 1>>) -> Tensor<I, 1> {
    let device = norms[0].device();
    let norms = norms.into_iter().map(|norm| on(norm, &device)).collect();
    Tensor::cat(norms, 0).square().sum().sqrt()
}

/// Takes the norm of each parameter's gradient, in f32.
struct Measure<I: Backend> {
    gradients: GradientsParams,
    /// The gradients in f32.
    widened: GradientsParams,
    /// f32 `[1]` each
    norms: Vec<Tensor<I, 1>>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Measure<B::InnerBackend> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(gradient) = self.gradients.remove::<B::InnerBackend, D>(param.id) {
            let gradient = widen(gradient);
            let norm = gradient.clone().square().sum().sqrt();
            self.norms.push(norm.cast(DType::F32));
            self.widened.register(param.id, gradient);
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
