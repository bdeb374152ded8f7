//! Recording an operation: its operands are brought back, its result becomes a node.
//!
//! `operands.rs` looks at what goes in, `order.rs` says how the result lies in memory, `recorded.rs` makes the node, `results.rs`
//! hands it out, and `given.rs` is for tensors that no recipe of this thread makes.

mod given;
mod operands;
mod order;
mod recorded;
mod results;

pub(crate) use given::{Room, fixed, source};
pub(crate) use recorded::Call;
