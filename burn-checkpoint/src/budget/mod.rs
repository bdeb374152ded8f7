//! A limit on the bytes of managed tensors, without annotations (Kirisame et al., Dynamic Tensor
//! Rematerialization, 2021).
//!
//! - `settings.rs`: the user's settings. `install.rs` puts them into force, `in_force.rs` and
//!   `stack.rs` say which of several count.
//! - `account.rs`: what each thread holds under a budget. `memory.rs`: its counters on a device,
//!   with the budget that its tensors are under. `counted.rs`: the bytes of a storage, counted
//!   there while it is resident.
//! - `limiter.rs`: counts bytes and decides when to evict.
//! - `candidates.rs`: what may be evicted, cheapest first: by what replaying it costs with the
//!   evicted ones before it.
//! - `memo.rs`: the evictions of the last step, which this one repeats.
//! - `need.rs`: which limit is too small for a step; `thrashing.rs`: which one costs too much time.
//! - `again.rs`: out of device memory.

pub(crate) mod account;
pub(crate) mod again;
mod candidates;
pub(crate) mod counted;
pub(crate) mod in_force;
pub(crate) mod install;
mod limiter;
mod memo;
pub(crate) mod memory;
mod need;
mod settings;
pub(crate) mod stack;
mod thrashing;

pub(crate) use limiter::Budget;
pub use settings::MemoryBudget;
