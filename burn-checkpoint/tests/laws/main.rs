//! Checkpointed is plain, bit for bit.

mod models;
mod scopes;
