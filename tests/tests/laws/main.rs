//! The laws of the suite that need no seed.

mod attention;
mod errors;
mod golden;
mod golden_training;
mod mixed_operands;
mod precision;
mod sharded;
mod table;
