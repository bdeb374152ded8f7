//! The backend decorator.
//!
//! `ops.rs` makes every operation from its row, by the kinds of its operands in `operands.rs` and of its results in
//! `results.rs`.

mod backend;
mod operands;
mod ops;
mod quantized;
mod results;

pub use backend::Remat;
