//! The update: AdamW on the device or on the host, clipped, over ranks, in windows, with a loss
//! scale.

use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;
use burn_accum::{AccumConfig, ClipNorm, GradNorm};
use burn_amp::GradScaler;
use burn_update::{Update, UpdateError};
use burn_zero::{HostAdamWConfig, PlacedAdamW, RankReduction, ReduceOverRanks, ZeroConfig};

/// What an update is made of, with one rank or several.
#[derive(Debug)]
pub struct UpdateParts<'a> {
    /// The optimizer, wherever its state is.
    pub adamw: &'a HostAdamWConfig,
    /// Clipping, and where the optimizer's state is.
    pub zero: &'a ZeroConfig,
    /// The ranks.
    pub reduction: &'a RankReduction,
    /// Micro-batches of an update.
    pub window: AccumConfig,
    /// How losses are scaled.
    pub scaler: &'a GradScaler,
}

impl UpdateParts<'_> {
    /// The update, and a handle to its gradient norm, which is also measured where nothing is
    /// clipped.
    ///
    /// # Errors
    ///
    /// A number that cannot work.
    pub fn update<M, B>(self) -> Result<(Update<M, B>, GradNorm), UpdateError>
    where
        M: AutodiffModule<B> + 'static,
        B: AutodiffBackend,
    {
        let max_norm = self.zero.gradient_clipping.unwrap_or(f64::INFINITY);
        let clip = ClipNorm::new(max_norm as f32)?;
        let norm = clip.norm();
        let adamw = PlacedAdamW::new(self.adamw.clone(), self.zero.offload_optimizer)?;
        let update = Update::new(adamw)
            .clip(clip)?
            .reduce_by(self.reduction)?
            .accumulate(self.window)?
            .scale(self.scaler.clone())?;
        Ok((update, norm))
    }
}
