//! Tensors in host memory: copies of activations that a scope offloads, and parameters that are
//! delivered at each use.
//!
//! - `host_copy.rs`: the copy of one tensor. `download.rs` reads it, `prefetch.rs` keeps the order
//!   in which backward uses the copies.
//! - `delivered.rs`: tensors whose elements a function returns. `request.rs` is what asks `Remat`
//!   for one, `ahead.rs` uploads it before its use.

pub(crate) mod ahead;
pub(crate) mod delivered;
pub(crate) mod download;
pub(crate) mod host_copy;
pub(crate) mod prefetch;
pub(crate) mod request;
