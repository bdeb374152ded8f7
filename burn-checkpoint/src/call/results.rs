//! Handing out results.

use burn_backend::{Backend, DType};

use crate::budget::Gradient;
use crate::handle::{Handle, Managed};
use crate::kind::{Kind, Value};
use crate::unwound::Held;

/// The results of an operation, in order.
pub(crate) enum Results<B: Backend> {
    One(Option<Managed<B>>),
    Many(std::vec::IntoIter<Option<Managed<B>>>),
    Gradient(Option<(Value<B>, Gradient)>),
}

impl<B: Backend> Results<B> {
    pub fn many(results: Vec<Option<Managed<B>>>) -> Self {
        Self::Many(results.into_iter())
    }

    /// The next result; `None` where it is absent.
    pub fn next<K: Kind<B>>(&mut self) -> Option<Handle<B, K>> {
        match self {
            Self::One(result) => result.take().map(Handle::Managed),
            Self::Many(results) => results.next().flatten().map(Handle::Managed),
            Self::Gradient(result) => {
                let (value, gradient) = result.take()?;
                let tensor = Held::new(K::unwrap(value)?);
                Some(Handle::Resident(tensor, Some(gradient)))
            }
        }
    }

    /// The next result, which every run of the operation gives.
    pub fn expect<K: Kind<B>>(&mut self) -> Handle<B, K> {
        self.next().expect("an operation gives what its row says")
    }

    /// Whether the only result is quantized.
    pub fn is_quantized(&self) -> bool {
        match self {
            Self::One(Some(result)) => matches!(result.node().meta.dtype, DType::QFloat(_)),
            Self::Gradient(result) => matches!(result, Some((Value::Quant(_), _))),
            Self::One(None) | Self::Many(_) => false,
        }
    }
}
