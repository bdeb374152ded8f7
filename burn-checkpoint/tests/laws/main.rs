//! Checkpointed is plain, bit for bit.

#[path = "../block/mod.rs"]
mod block;
mod budgets;
mod devices;
mod long;
mod models;
mod programs;
mod robust;
mod scopes;
mod twin;
mod verify;
