//! Recording an operation: its operands are brought back, its result becomes a node, or is counted
//! if it is a gradient.
//!
//! - `context.rs`: what a thread is doing: its open scopes, the budget in force, its counters.
//!   `flags.rs`: what of it operations read. `step.rs`: where in a step it is.
//! - `call.rs`: one operation that is recorded. `operands.rs` inspects its operands, `shares.rs`
//!   says whose storage a view has, `results.rs` hands the result out.
//! - `given.rs`: nodes that no recorded operation computes. `room.rs`: the size of new tensors.
//! - `op.rs`: operations, as the table describes them. `work.rs`, `products.rs` and `cost.rs`: what
//!   they cost.

mod call;
pub(crate) mod context;
pub(crate) mod cost;
pub(crate) mod flags;
mod given;
pub(crate) mod op;
mod operands;
mod products;
mod results;
mod room;
mod shares;
pub(crate) mod step;
pub(crate) mod work;

pub(crate) use call::Call;
pub(crate) use given::{Promised, delivered, derived, in_type, parameter};
pub(crate) use results::Results;
pub(crate) use room::Room;
