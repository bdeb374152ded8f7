//! A limit on the bytes of managed tensors, without annotations (Kirisame et al., Dynamic Tensor
//! Rematerialization, 2021).
//!
//! - `settings.rs`: the user's settings.
//! - `limiter.rs`: counts bytes and decides when to evict.
//! - `candidates.rs`: what may be evicted, cheapest first: by what replaying it costs with the
//!   evicted ones before it.
//! - `memo.rs`: the evictions of the last step, which this one repeats.
//! - `need.rs`: which limit is too small for a step; `thrashing.rs`: which one costs too much time.

mod candidates;
mod limiter;
mod memo;
mod need;
mod settings;
mod thrashing;

pub(crate) use limiter::Budget;
pub use settings::MemoryBudget;
