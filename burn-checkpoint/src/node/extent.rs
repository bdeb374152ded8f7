//! The size of a tensor: computed once, and read by every operation on it.

use std::hash::{Hash, Hasher};

use burn_backend::{DType, Shape};
use rustc_hash::FxHasher;

/// The size of a tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub elements: u64,
    pub bytes: u64,
    /// Whether its type is f16 or bf16.
    pub is_half: bool,
    /// A hash of shape and type.
    pub key: u64,
}

impl Extent {
    pub fn of(shape: &Shape, dtype: DType) -> Self {
        let dims = shape.as_slice();
        let mut hasher = FxHasher::default();
        let mut elements = 1;
        hasher.write_usize(dims.len());
        for dim in dims {
            hasher.write_usize(*dim);
            elements *= *dim as u64;
        }
        dtype.hash(&mut hasher);
        Self {
            elements,
            bytes: elements * dtype.size() as u64,
            is_half: matches!(dtype, DType::F16 | DType::BF16),
            key: hasher.finish(),
        }
    }
}
