//! Handing out results.

use burn_backend::Backend;

use crate::handle::Managed;

/// The results of an operation, in order.
pub(crate) enum Results<B: Backend> {
    One(Option<Managed<B>>),
    Many(std::vec::IntoIter<Option<Managed<B>>>),
}

impl<B: Backend> Results<B> {
    pub fn many(results: Vec<Option<Managed<B>>>) -> Self {
        Self::Many(results.into_iter())
    }

    /// The next result; `None` where it is absent.
    pub fn next(&mut self) -> Option<Managed<B>> {
        match self {
            Self::One(result) => result.take(),
            Self::Many(results) => results.next().flatten(),
        }
    }

    /// The next result, which every run of the operation gives.
    pub fn expect(&mut self) -> Managed<B> {
        self.next().expect("an operation gives what its row says")
    }
}
