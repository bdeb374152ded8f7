//! The rows, one file a trait.

mod activation;
mod bool;
mod float;
mod int;
mod module;
mod quantized;
mod transaction;
