//! README's lines for an optimizer.

use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::tensor::backend::AutodiffBackend;
use burn_accum::{AccumConfig, ClipByNorm};
use burn_amp::GradScalerConfig;
use burn_update::{Update, UpdateError};

/// The update of an optimizer alone, or with `LINES=all` that with all parts.
pub fn update<M, B>(optimizer: impl Optimizer<M, B> + 'static) -> Result<Update<M, B>, UpdateError>
where
    M: AutodiffModule<B> + 'static,
    B: AutodiffBackend,
{
    if std::env::var("LINES").is_ok_and(|lines| lines == "all") {
        return Update::new(optimizer)
            .clip_norm(1.0)?
            .accumulate(AccumConfig::mean(2))?
            .scale(GradScalerConfig::default());
    }
    Ok(Update::new(optimizer))
}
