//! Recording an operation: its operands are brought back, its result becomes a node.
//!
//! `operands.rs` looks at what goes in, `order.rs` says how the result lies in memory, `recorded.rs` makes the node, `results.rs`
//! hands it out, `given.rs` is for tensors that no recipe of this thread makes, and `room.rs` knows the size of new ones.

mod given;
mod operands;
mod order;
mod recorded;
mod results;
mod room;

pub(crate) use given::{Promised, delivered, derived, fixed, in_type, parameter, source};
pub(crate) use recorded::Call;
pub(crate) use results::Results;
pub(crate) use room::Room;
