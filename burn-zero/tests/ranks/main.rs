//! What ranks that are threads promise.

mod faults;
mod laws;
#[path = "../support/mod.rs"]
mod support;
