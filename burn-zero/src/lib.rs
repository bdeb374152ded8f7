//! ZeRO for Burn: sharded optimizer state and gradients over real process groups, and host offload.

pub mod record;
