//! Checkpointed is plain, bit for bit.

mod budgets;
mod long;
mod models;
mod order;
mod programs;
mod robust;
mod scopes;
mod verify;
