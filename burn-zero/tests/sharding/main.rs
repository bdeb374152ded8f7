//! Laws of sharded training, on threads.

mod agreement;
mod bytes;
mod columns;
mod compose;
mod deepspeed;
mod families;
mod gan;
mod interrupted;
mod layers;
mod missing;
mod mixed;
mod models;
mod norm;
mod offload;
mod optimizers;
mod parity;
mod recorder;
mod refusals;
mod settings;
mod statistics;
mod support;
mod tied;
mod tokens;
mod traced;
mod update;
mod wide;
