//! Checkpointed is plain, bit for bit.

mod budgets;
mod devices;
mod long;
mod models;
mod programs;
mod robust;
mod scopes;
mod twin;
mod verify;
