//! A request for a tensor whose elements are delivered at each use.

use std::sync::Arc;

use burn_backend::{DType, Shape, TensorData};

use crate::host::ahead::UploadPlace;
use crate::host::delivered::Delivery;
use crate::record::op::OpInfo;
use crate::record::work::Work;
use crate::scope::units::Unit;

/// The operation that delivers a requested tensor.
pub(crate) const DELIVERED: OpInfo = OpInfo::new("delivered", Work::Fixed, "Remat");

/// What is known of a parameter.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    /// Its path.
    pub path: &'static OpInfo,
    /// The unit that it is in, if its model's units have scopes.
    pub unit: Option<Arc<Unit>>,
}

/// A tensor that [`delivered`](crate::delivered()) requests from this thread's `Remat`.
#[derive(Clone)]
pub(crate) struct Request {
    pub shape: Shape,
    pub dtype: DType,
    pub delivery: Arc<dyn Delivery>,
    /// Whether it is a cast, whose cast back returns the rounded elements, not the original ones.
    pub is_cast: bool,
    /// Where it is in the order of uploads, if it may be uploaded before its use.
    pub place: Option<UploadPlace>,
}

impl Request {
    /// The tensor in another type, if its elements may be requested in that type.
    pub fn in_type(&self, dtype: DType) -> Option<Self> {
        let is_there = !self.is_cast && dtype != self.dtype && self.delivery.has(dtype);
        is_there.then(|| Self {
            dtype,
            is_cast: true,
            ..self.clone()
        })
    }

    /// The elements.
    ///
    /// # Panics
    ///
    /// If they have another shape or type.
    pub fn data(&self) -> TensorData {
        self.checked(self.delivery.data(self.dtype), self.dtype)
    }

    /// The elements in a type, if they are at hand.
    ///
    /// # Panics
    ///
    /// As [`Self::data`].
    pub fn at_hand(&self, dtype: DType) -> Option<TensorData> {
        Some(self.checked(self.delivery.at_hand(dtype)?, dtype))
    }

    fn checked(&self, data: TensorData, dtype: DType) -> TensorData {
        let expected = (self.shape.clone(), dtype);
        let found = burn_decorator::shape_and_dtype!(data);
        assert!(
            found == expected,
            "a tensor was delivered as {found:?} where {expected:?} was promised"
        );
        data
    }
}
