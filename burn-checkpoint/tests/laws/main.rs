//! Checkpointed is plain, bit for bit.

mod budgets;
mod host;
mod long;
mod models;
#[path = "../operations/probe/mod.rs"]
mod probe;
mod programs;
mod robust;
mod scopes;
mod verify;
