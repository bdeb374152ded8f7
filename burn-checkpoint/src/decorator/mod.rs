//! The backend decorator.
//!
//! `ops.rs` makes every operation from its row, by the kinds of its operands in `operands.rs` and
//! of its results in `results.rs`; `bits.rs` keeps dropout's draws; `custom.rs` is for operations
//! that are not in the table. `tape.rs` is what decorators above read of a tensor.

mod backend;
mod bits;
mod custom;
mod operands;
mod ops;
mod quantized;
mod results;
mod tape;

pub use backend::Remat;
