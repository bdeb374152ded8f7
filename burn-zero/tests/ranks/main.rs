//! What ranks that are threads promise.

mod faults;
mod laws;
mod schedules;
#[path = "../support/mod.rs"]
mod support;
