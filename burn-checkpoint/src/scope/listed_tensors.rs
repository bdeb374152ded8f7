//! The tensors of a result that a scope returns, as its caller lists them.

use crate::scope::outputs::Outputs;

/// Takes the tensors of a result that has no [`Outputs`], in
/// [`checkpoint_listing`](crate::checkpoint_listing).
#[derive(Debug)]
pub struct ListedTensors {
    _private: (),
}

impl ListedTensors {
    pub(crate) fn new() -> Self {
        Self { _private: () }
    }

    /// Lists a part of the result: a tensor, or anything with [`Outputs`], such as a `Vec` of
    /// tensors.
    pub fn add(&mut self, part: &impl Outputs) -> &mut Self {
        part.touch();
        self
    }
}
