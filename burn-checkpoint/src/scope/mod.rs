//! Scopes: tensors that are made in a scope and only saved for backward are evicted at its end.
//!
//! - `checkpoint.rs`: opens and ends a scope. `region.rs`: a scope as its tensors refer to it.
//! - `policy.rs`: what becomes of a tensor at the end of its scope; `tiny.rs`: which stay under any
//!   policy.
//! - `outputs.rs` and `listed_tensors.rs`: which tensors a scope returns.
//! - `sequential.rs` and `module.rs`: scopes for lists of blocks and for modules.
//! - `units.rs`, `checkpoint_units.rs` and `parameter_unit.rs`: scopes that begin and end by
//!   themselves, for models that cannot be edited.

pub(crate) mod checkpoint;
pub(crate) mod checkpoint_units;
pub(crate) mod listed_tensors;
pub(crate) mod module;
pub(crate) mod outputs;
pub(crate) mod parameter_unit;
pub(crate) mod policy;
pub(crate) mod region;
pub(crate) mod sequential;
pub(crate) mod tiny;
pub(crate) mod units;
