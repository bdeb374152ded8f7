//! Checkpointed is plain, bit for bit.

#[path = "../apart/mod.rs"]
mod apart;
#[path = "../block/mod.rs"]
mod block;
mod budgets;
mod delivered;
mod devices;
mod dropout;
mod full;
mod guards;
mod host;
mod input;
mod long;
#[path = "../many/mod.rs"]
mod many;
mod metrics;
mod models;
mod order;
mod outputs;
mod passes;
#[path = "../operations/probe/mod.rs"]
mod probe;
mod programs;
mod robust;
mod scopes;
mod small;
mod snapshot;
mod statistics;
mod twin;
mod units;
mod verified;
