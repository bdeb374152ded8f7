//! A request for a tensor whose elements a function gives at each use.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use burn_backend::{DType, Shape, TensorData};

use crate::op::OpInfo;
use crate::work::Work;

/// The operation that delivers a requested tensor.
pub(crate) const DELIVERED: OpInfo = OpInfo::new("delivered", Work::Fixed, "Remat");

/// A tensor that [`delivered`](crate::delivered()) requests from this thread's `Remat`.
pub(crate) struct Request {
    pub shape: Shape,
    pub dtype: DType,
    /// Returns the elements in the requested type.
    pub data: Arc<dyn Fn(DType) -> TensorData + Send + Sync>,
    /// Whether a type other than the tensor's own may be requested.
    pub has: Option<Arc<dyn Fn(DType) -> bool + Send + Sync>>,
}

impl Request {
    /// The tensor in another type, if its elements may be requested in that type.
    pub fn in_type(&self, dtype: DType) -> Option<Self> {
        let is_there = dtype != self.dtype && self.has.as_ref()?(dtype);
        is_there.then(|| Self {
            shape: self.shape.clone(),
            dtype,
            data: self.data.clone(),
            // A cast back returns the rounded elements, not the original ones.
            has: None,
        })
    }

    /// The elements.
    ///
    /// # Panics
    ///
    /// If they have another shape or type.
    pub fn data(&self) -> TensorData {
        let data = (self.data)(self.dtype);
        let expected = (self.shape.clone(), self.dtype);
        let found = burn_decorator::shape_and_dtype!(data);
        assert!(
            found == expected,
            "a tensor was delivered as {found:?} where {expected:?} was promised"
        );
        data
    }
}

thread_local! {
    /// The parameter that this thread uploads, if it has a name.
    pub(crate) static NAMED: Cell<Option<&'static OpInfo>> = const { Cell::new(None) };
    /// What this thread's next upload takes, and returns in place of its data.
    pub(crate) static REQUEST: RefCell<Option<Request>> = const { RefCell::new(None) };
}
