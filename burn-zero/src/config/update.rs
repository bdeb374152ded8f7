//! The update that a DeepSpeed file asks for.

use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;
use burn_accum::{AccumConfig, Accumulation, ClipNorm};
use burn_amp::GradScaler;
use burn_ranks::ProcessGroup;
use burn_update::{Update, UpdateError};

use super::{BatchSizes, DeepSpeedConfig};
use crate::error::ConfigFault;
use crate::offload::{HostAdamWConfig, PlacedAdamW};
use crate::settings::Memory;
use crate::update::{RankReduction, ReduceOverRanks};

/// `Update::from_deepspeed(&config, group)`: the update that a DeepSpeed file asks for.
///
/// | in the file | in the update |
/// |---|---|
/// | `optimizer` | `Update::new(..)` of a [`PlacedAdamW`] |
/// | `zero_optimization.offload_optimizer` | its place, and that of the gradients |
/// | `gradient_clipping` | `.clip_norm(..)` |
/// | `zero_optimization`, `communication_data_type` | `.reduce(..)` |
/// | `train_batch_size`, `train_micro_batch_size_per_gpu`, `gradient_accumulation_steps` | `.accumulate(..)`, of the mean |
/// | `fp16` | `.scale(..)` |
///
/// ```
/// use std::sync::Arc;
/// use burn::{backend::Autodiff, nn, prelude::*};
/// use burn_amp::{Autocast, Configured};
/// use burn_update::Update;
/// use burn_zero::{DeepSpeedConfig, FromDeepSpeed, GroupOptions, Sharded, ThreadGroup};
///
/// type B = Autocast<Sharded<Autodiff<burn_flex::Flex>>, Configured>;
///
/// let config = DeepSpeedConfig::from_json(
///     r#"{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": true},
///         "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}"#,
/// )?;
/// config.precision.amp().install()?;
/// let lr = config.learning_rate.unwrap();
///
/// let updates = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
///     let device = Default::default();
///     let mut update = Update::from_deepspeed(&config, Arc::new(group))?;
///     let mut model: nn::Linear<B> = update.prepare(nn::LinearConfig::new(4, 3).init(&device))?;
///     for _ in 0..4 {
///         let x = Tensor::<B, 2>::ones([8, 4], &device);
///         let gradients = update.backward(&model, model.forward(x).mean());
///         model = update.step(lr, model, gradients)?;
///     }
///     Ok::<_, burn_update::UpdateError>(update.updates())
/// })?;
/// assert_eq!(*updates[0].as_ref().unwrap(), 2); // of two micro-batches on each rank
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The program sets the precision ([`precision.amp()`](super::DeepSpeedPrecision::amp), with a
/// backend `Autocast<.., Configured>`), puts parameters in host memory if
/// [`offload_param`](super::ZeroConfig::offload_param) says so and no rank could hold them before
/// (`offload_parameters`), and has the schedule. [`DeepSpeedParts`] has the handles.
pub trait FromDeepSpeed: Sized {
    /// The update for a loop of your own, over the ranks of `group`; with one rank
    /// [`SingleRank`](crate::SingleRank). All ranks call it.
    ///
    /// # Errors
    ///
    /// [`ZeroError::Config`](crate::ZeroError::Config) ([`UpdateError::cause`]) for batch sizes
    /// that are not those of so many ranks, and for a file without `optimizer`; those of
    /// [`RankReduction::new`].
    fn from_deepspeed(
        config: &DeepSpeedConfig,
        group: Arc<dyn ProcessGroup>,
    ) -> Result<Self, UpdateError>;

    /// The update for a Learner, with the strategy `update.strategy().threads(ranks)` or
    /// `.process(group)`, which must have so many ranks.
    ///
    /// # Errors
    ///
    /// As [`from_deepspeed`](Self::from_deepspeed).
    fn from_deepspeed_in_learner(
        config: &DeepSpeedConfig,
        ranks: usize,
    ) -> Result<Self, UpdateError>;
}

impl<M, B> FromDeepSpeed for Update<M, B>
where
    M: AutodiffModule<B> + 'static,
    B: AutodiffBackend,
{
    fn from_deepspeed(
        config: &DeepSpeedConfig,
        group: Arc<dyn ProcessGroup>,
    ) -> Result<Self, UpdateError> {
        DeepSpeedParts::new(config, group)?.into_update()
    }

    fn from_deepspeed_in_learner(
        config: &DeepSpeedConfig,
        ranks: usize,
    ) -> Result<Self, UpdateError> {
        DeepSpeedParts::in_learner(config, ranks)?.into_update()
    }
}

/// The parts of the update that a DeepSpeed file asks for: handles to read, and settings that a
/// file does not have.
///
/// ```no_run
/// # use burn::{backend::Autodiff, nn::Linear, train::Interrupter};
/// # use burn_update::{Update, UpdateError};
/// # use burn_zero::{DeepSpeedConfig, DeepSpeedParts};
/// # type B = burn_zero::Sharded<Autodiff<burn_flex::Flex>>;
/// # fn of_file(config: &DeepSpeedConfig, interrupter: Interrupter) -> Result<(), UpdateError> {
/// let mut parts = DeepSpeedParts::in_learner(config, 4)?;
/// parts.reduction = parts.reduction.with_seed(7);
/// parts.scaler = parts.scaler.with_interrupter(interrupter);
/// let scaler = parts.scaler.clone();
/// let update: Update<Linear<B>, B> = parts.into_update()?;
/// // .. train ..
/// println!("{} steps were skipped", scaler.skipped_steps());
/// # let _ = update;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct DeepSpeedParts {
    /// The ranks, and what is sharded over them.
    pub reduction: RankReduction,
    /// All batch sizes, for the data.
    pub batch: BatchSizes,
    /// AdamW's numbers.
    pub adamw: HostAdamWConfig,
    /// Where AdamW's state is.
    pub state: Memory,
    /// Clipping by the norm over all ranks.
    pub clip: Option<ClipNorm>,
    /// The micro-batches of an update: of the mean, as DeepSpeed's.
    pub windows: Accumulation,
    /// The scale of losses.
    pub scaler: GradScaler,
}

impl DeepSpeedParts {
    /// The parts for a loop of your own, over the ranks of `group`. All ranks call it.
    ///
    /// # Errors
    ///
    /// As [`FromDeepSpeed::from_deepspeed`].
    pub fn new(
        config: &DeepSpeedConfig,
        group: Arc<dyn ProcessGroup>,
    ) -> Result<Self, UpdateError> {
        let ranks = group.world_size();
        Self::of(
            config,
            RankReduction::new(config.zero.settings(), group)?,
            ranks,
        )
    }

    /// The parts for a Learner, whose strategy has so many ranks.
    ///
    /// # Errors
    ///
    /// As [`FromDeepSpeed::from_deepspeed`].
    pub fn in_learner(config: &DeepSpeedConfig, ranks: usize) -> Result<Self, UpdateError> {
        let reduction = RankReduction::in_learner(config.zero.settings()).of_ranks(ranks);
        Self::of(config, reduction, ranks)
    }

    fn of(
        config: &DeepSpeedConfig,
        reduction: RankReduction,
        ranks: usize,
    ) -> Result<Self, UpdateError> {
        let zero = &config.zero;
        let batch = zero.batch.resolve(ranks)?;
        let adamw = config.adamw.clone();
        let no_optimizer = || ConfigFault::key("optimizer", NO_OPTIMIZER);
        let clip = zero.gradient_clipping.map(|norm| {
            let clip = ClipNorm::new(norm as f32);
            clip.map_err(|_| ConfigFault::invalid("gradient_clipping", norm, "above 0"))
        });
        Ok(Self {
            reduction,
            batch,
            adamw: adamw.ok_or_else(no_optimizer)?,
            state: zero.offload_optimizer,
            clip: clip.transpose()?,
            windows: Accumulation::new(AccumConfig::mean(batch.steps as usize))?,
            scaler: GradScaler::new(config.precision.scaler())?,
        })
    }

    /// The update.
    ///
    /// # Errors
    ///
    /// Numbers that cannot work, and those of [`ReduceOverRanks::reduce_by`].
    pub fn into_update<M, B>(self) -> Result<Update<M, B>, UpdateError>
    where
        M: AutodiffModule<B> + 'static,
        B: AutodiffBackend,
    {
        let mut inside = Update::new(PlacedAdamW::new(self.adamw, self.state)?);
        if let Some(clip) = self.clip {
            inside = inside.clip(clip)?;
        }
        inside
            .reduce_by(&self.reduction)?
            .accumulate(self.windows)?
            .scale(self.scaler)
    }
}

const NO_OPTIMIZER: &str = "the file names none, and an update needs one: add the section, or set `DeepSpeedConfig::adamw` in the program";
