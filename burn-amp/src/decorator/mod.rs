//! The backend decorator.
//!
//! `ops.rs` makes every operation from its row, except attention, which `attention.rs` composes,
//! and those in `stable/`, whose formula in Burn fails in a low type; `origin.rs` is what a tensor
//! remembers of its computation; `autodiff.rs` is the backward pass; `bring.rs` casts an operand;
//! `check.rs` refuses devices without the low type; `custom.rs` runs operations of your own.

mod attention;
mod autodiff;
mod backend;
mod bring;
mod check;
mod custom;
mod ops;
mod origin;
mod stable;
mod tensor;

pub use autodiff::ScaledGradients;
pub use backend::Autocast;
pub(crate) use check::check_dtype;
pub use custom::custom_op;
pub use tensor::AutocastTensor;
