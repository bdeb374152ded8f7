//! The backend decorator.
//!
//! `ops.rs` makes every operation from its row; `attention.rs` and `transaction.rs` are the two that cannot be made from a
//! row; `autodiff.rs` is the backward pass.

mod attention;
mod autodiff;
mod backend;
mod check;
mod ops;
mod tensor;
mod transaction;

pub use autodiff::ScaledGradients;
pub use backend::Autocast;
pub(crate) use check::check_dtype;
pub use tensor::AutocastTensor;
