//! The laws of the suite that need no seed.

mod attention;
mod errors;
mod golden;
mod golden_training;
mod linear_cross_entropy;
mod mixed_operands;
mod precision;
mod sharded;
mod table;
