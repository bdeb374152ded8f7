//! What ranks that are threads promise.

#[path = "../support/child.rs"]
mod child;
mod faults;
mod hangs;
mod laws;
mod schedules;
#[path = "../support/mod.rs"]
mod support;
mod trace;
