//! Handing out results.

use burn_backend::{Backend, DType};

use crate::node::drops::Held;
use crate::node::gradient::Gradient;
use crate::node::handle::{Handle, Managed};
use crate::node::kind::{Kind, Value};

/// The results of an operation, in order.
pub(crate) enum Results<'a, B: Backend> {
    One(Option<Managed<B>>),
    Many(std::vec::IntoIter<Option<Managed<B>>>),
    /// What the operation returned: moving a value copies more than 100 bytes.
    Gradient(&'a mut Value<B>, Option<Gradient>),
}

impl<B: Backend> Results<'_, B> {
    /// The next result; `None` where it is absent.
    pub fn next<K: Kind<B>>(&mut self) -> Option<Handle<B, K>> {
        match self {
            Self::One(result) => result.take().map(Handle::Managed),
            Self::Many(results) => results.next().flatten().map(Handle::Managed),
            Self::Gradient(value, gradient) => {
                let tensor = K::unwrap(std::mem::replace(*value, Value::Absent))?;
                Some(Handle::Resident(Held::new(tensor), gradient.take()))
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
            Self::Gradient(value, _) => matches!(value, Value::Quant(_)),
            Self::One(None) | Self::Many(_) => false,
        }
    }
}
