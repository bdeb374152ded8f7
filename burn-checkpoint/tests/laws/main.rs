//! Checkpointed is plain, bit for bit.

mod budgets;
mod models;
mod programs;
mod robust;
mod scopes;
