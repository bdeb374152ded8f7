//! What is measured.

mod elements;
mod moves;
mod products;

use burn::tensor::{Distribution, Tensor};
use burn_flex::Flex;

use crate::samples::Rows;

/// Shapes of 4 KiB, 256 KiB and 16 MiB: for the start of an operation, for a core's cache, and for
/// memory.
const SIZES: [[usize; 2]; 3] = [[16, 64], [256, 256], [4096, 1024]];

pub fn all() -> Rows {
    let mut rows = Rows::default();
    for size in SIZES {
        elements::add(&mut rows, size);
        moves::add(&mut rows, size);
    }
    products::add(&mut rows);
    rows
}

/// Numbers where every function is defined.
fn random<const D: usize>(shape: [usize; D]) -> Tensor<Flex, D> {
    Tensor::random(shape, Distribution::Uniform(0.1, 0.9), &Default::default())
}
