//! Recomputation and mixed precision for programs on Burn 0.22.1 whose `Cargo.toml` puts a
//! decorated burn-dispatch in place of Burn's:
//!
//! ```toml
//! [patch.crates-io]
//! burn-dispatch = { path = ".." }
//! ```
//!
//! Nothing else changes: no type parameter, no backend alias. What happens is chosen when the
//! program runs:
//!
//! ```
//! use burn::tensor::{Device, DType, Tensor};
//! use burn_decorated::{AmpConfig, checkpoint};
//!
//! AmpConfig::bf16().install()?;
//! let x = Tensor::<2>::ones([64, 64], &Device::flex().autodiff()).require_grad();
//! let y = checkpoint(|| x.clone().matmul(x.clone()).exp()); // only `y` stays
//! assert_eq!(x.clone().matmul(x.clone()).dtype(), DType::BF16);
//! let grads = y.mean().backward();
//! assert_eq!(x.grad(&grads).unwrap().dtype(), DType::F32);
//! # Ok::<(), burn_decorated::AmpError>(())
//! ```
//!
//! Without the patch the same program compiles, and its first call of this crate panics and says
//! what is missing: see [`is_on`].

mod amp;
mod on;
mod recompute;

pub use amp::{AmpConfig, ScaledOptimizer, autocast};
pub use burn_amp::{
    AmpError, Bf16, Cast, F16, F32, GradScaler, GradScalerConfig, Off, Policy as Precision,
    PolicyName, op_table,
};
pub use burn_checkpoint::{InstalledBudget, Policy, RematError, RematStats};
pub use burn_decorator::gradient::update;
pub use on::is_on;
pub use recompute::{MemoryBudget, Outputs, checkpoint, checkpoint_with, evict};
