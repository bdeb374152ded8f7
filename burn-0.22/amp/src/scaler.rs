//! The loss scale: one handle that backward reads and a step updates.
//!
//! The 0.21 crate also defers the check, shares a scale between optimizers and names the parameters
//! to blame; here is PyTorch's synchronous form.

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::{AmpError, LossScale, ScaleUpdate};

#[path = "../../../burn-amp/src/scaler/config.rs"]
mod config;
pub use config::GradScalerConfig;

thread_local! {
    static OF_THREAD: RefCell<Weak<Mutex<LossScale>>> = const { RefCell::new(Weak::new()) };
}

/// The loss scale of the losses that are differentiated on the thread that made it, while a clone
/// of it lives.
#[derive(Clone)]
pub struct GradScaler(Arc<Mutex<LossScale>>);

impl GradScaler {
    /// A scaler for this thread.
    ///
    /// # Errors
    ///
    /// If the configuration is not valid.
    pub fn new(config: &GradScalerConfig) -> Result<Self, AmpError> {
        config.validate()?;
        let scaler = Self(Arc::new(Mutex::new(LossScale::new(config))));
        OF_THREAD.set(Arc::downgrade(&scaler.0));
        Ok(scaler)
    }

    /// What the next loss is multiplied with.
    pub fn scale(&self) -> f32 {
        self.0.lock().scale()
    }

    /// Moves the scale after a step, which `found_inf` gradients that are infinite or NaN.
    pub fn update(&self, found_inf: bool) -> ScaleUpdate {
        self.0.lock().update(found_inf)
    }
}

/// The scale of this thread's scaler.
pub(crate) fn active() -> Option<f32> {
    OF_THREAD
        .with_borrow(Weak::upgrade)
        .map(|scale| scale.lock().scale())
}
