//! `Autocast` above burn-dispatch.
//!
//! burn-tensor names burn-dispatch's tensor, so this decorator's tensor has no room for a mark.
//! What 0.21 marks, the gradients and what an optimizer computes from them, is told apart by what
//! the tensor shows already: whether it belongs to autodiff ([`Recorded`]).

mod autodiff;
mod backend;
#[path = "../../../../burn-amp/src/decorator/bring.rs"]
mod bring;
#[path = "../../../../burn-amp/src/decorator/check.rs"]
mod check;
mod ops;

pub use autodiff::ScaledGradients;
pub use backend::{Autocast, Recorded};
pub(crate) use check::check_dtype;
pub use ops::autocast;
