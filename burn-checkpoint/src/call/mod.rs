//! Recording an operation: its operands are brought back, its result becomes a node, or is counted
//! if it is a gradient.
//!
//! `operands.rs` inspects operands, `shares.rs` says whose storage a view has, `order.rs` knows the
//! order of a result's elements in memory, `recorded.rs` makes the node, `results.rs` hands it out,
//! `given.rs` makes nodes that no recorded operation computes, and `room.rs` computes the size of
//! new tensors.

mod given;
mod operands;
mod order;
mod recorded;
mod results;
mod room;
mod shares;

pub(crate) use given::{Promised, delivered, derived, in_type, parameter};
pub(crate) use recorded::Call;
pub(crate) use results::Results;
pub(crate) use room::Room;
