//! The laws of the suite that need no seed.

mod mixed_operands;
mod table;
