//! Checkpointed is plain, bit for bit.

mod budgets;
mod models;
mod robust;
mod scopes;
