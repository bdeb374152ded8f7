//! What a user sees of it.
//!
//! - `stats.rs`: counters; `metric.rs`: the Learner's.
//! - `trace.rs`: events of a thread's tensors; `record_all.rs`: of all of them. `snapshot.rs` reads
//!   a trace; `parameters.rs` gives parameters the names that it shows.

pub(crate) mod metric;
pub(crate) mod parameters;
pub(crate) mod record_all;
pub mod snapshot;
pub(crate) mod stats;
pub mod trace;
