//! Plans for chains of blocks: which scopes, and which in which.
//!
//! [`plan`] finds the fastest nesting of scopes that keeps a training step below a byte limit, from
//! a [`Profile`] of the chain. `checkpoint_chain` runs a [`Plan`], [`simulate`] computes its bytes
//! and time. All of it is integers, deterministic and free of Burn.
//!
//! # What a plan does
//!
//! ```text
//! plan      0  [1  2]  [3  [4]  5]  6
//!
//! forward   0 stays on the tape; of the first scope x3 stays, of the second x6; 6 stays
//! backward  6
//!           3 runs again and stays, 4 runs again for x5, which stays, 5 is brought back;  backward 5
//!                        4 is brought back;                                               backward 4
//!                                                                                         backward 3
//!           1 runs again and stays, 2 is brought back;                                    backward 2, 1
//!           0
//! ```
//!
//! - Outside of scopes a block's forward pass leaves its tape (`x` is the input of the block with
//!   the same number).
//! - When a scope ends, only its output and the random numbers in it stay: all else in it is
//!   evicted, outputs of inner scopes included.
//! - When the backward pass reaches a scope, the first access replays the scope from its input to
//!   the tensor that is read: what belongs to the scope itself comes back and stays, outputs of
//!   inner scopes included. Inner scopes are passed through, holding no more than one block's input
//!   and own bytes at a time. The last block is brought back in part, as far as its backward pass
//!   reads it ([`BlockProfile::replay_ns`]).
//! - A scope at the end of another scope is brought back with it, as if its brackets were not
//!   there.
//! - What a block's backward pass has read is freed with it; gradients of its parameters stay.

mod error;
mod front;
mod model;
mod nesting;
mod profile;
mod schedule;
mod simulate;

pub use error::PlanError;
pub use nesting::{Node, Plan};
pub use profile::{BlockProfile, Profile, TailProfile};
pub use schedule::plan;
pub use simulate::{Simulation, simulate};
