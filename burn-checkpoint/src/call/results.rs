//! Handing out results.

use burn_backend::{Backend, DType, TensorPrimitive};

use crate::budget::Gradient;
use crate::decorator::Remat;
use crate::handle::{Handle, Managed};
use crate::kind::{Kind, Value};
use crate::unwound::Held;

/// The results of an operation, in order.
pub(crate) enum Results<B: Backend> {
    One(Option<Managed<B>>),
    Many(std::vec::IntoIter<Option<Managed<B>>>),
    /// Absent once it is handed out.
    Gradient(Value<B>, Gradient),
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
            Self::Gradient(value, gradient) => {
                let tensor = K::unwrap(std::mem::replace(value, Value::Absent))?;
                Some(Handle::Resident(Held::new(tensor), Some(gradient.clone())))
            }
        }
    }

    /// The next result, which every run of the operation gives.
    pub fn expect<K: Kind<B>>(&mut self) -> Handle<B, K> {
        self.next().expect("an operation gives what its row says")
    }

    /// The only result, whose kind is known by now.
    pub fn tensor(&mut self) -> TensorPrimitive<Remat<B>> {
        let is_quantized = match self {
            Self::One(Some(result)) => matches!(result.node().meta.dtype, DType::QFloat(_)),
            Self::Gradient(value, _) => matches!(value, Value::Quant(_)),
            Self::One(None) | Self::Many(_) => false,
        };
        match is_quantized {
            true => TensorPrimitive::QFloat(self.expect()),
            false => TensorPrimitive::Float(self.expect()),
        }
    }
}
