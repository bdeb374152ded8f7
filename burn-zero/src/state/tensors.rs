//! Tensors that came in pieces.

use std::collections::HashMap;

use crate::record::Piece;

/// Pieces and their elements.
pub(crate) type Pieces = Vec<(Piece, Vec<u8>)>;

/// A tensor, as far as this rank has it.
#[derive(Default)]
pub(crate) struct Loaded {
    /// Of the whole tensor.
    pub(crate) shape: Vec<usize>,
    /// The elements of its pieces, one behind the other.
    pub(crate) bytes: Vec<u8>,
}

/// Pieces as tensors, by names.
pub(crate) fn by_name(
    pieces: impl IntoIterator<Item = (Piece, Vec<u8>)>,
) -> HashMap<String, Loaded> {
    let mut tensors: HashMap<String, Loaded> = HashMap::new();
    for (piece, bytes) in pieces {
        let tensor = tensors.entry(piece.tensor.name).or_default();
        tensor.shape = piece.tensor.shape;
        tensor.bytes.extend(bytes);
    }
    tensors
}
