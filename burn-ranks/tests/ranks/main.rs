//! What ranks that are threads promise.

mod child;
mod faults;
mod hangs;
mod laws;
mod observed;
mod schedules;
mod support;
