//! The backend decorator.
//!
//! `ops.rs` makes every operation from its row, by the kinds of its operands in `operands.rs` and of its results in
//! `results.rs`. `tape.rs` is what a tensor tells decorators above it.

mod backend;
mod operands;
mod ops;
mod quantized;
mod results;
mod tape;

pub use backend::Remat;
