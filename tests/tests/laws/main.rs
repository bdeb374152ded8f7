//! The laws of the suite that need no seed.

mod attention;
mod errors;
mod fused;
mod golden;
mod linear_cross_entropy;
mod links;
mod mixed_operands;
mod numerics;
mod operands;
mod outer_products;
mod precision;
mod sharded;
mod table;
