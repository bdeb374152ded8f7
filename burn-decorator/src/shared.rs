//! Data on the host whose clones share one allocation.

use burn_backend::{Bytes, Shape, TensorData};

/// The same data, with clones that share one allocation and a reference to which an upload takes
/// without a copy. Whoever writes into a clone gets elements of its own: a copy at the first write.
///
/// ```
/// use burn_backend::TensorData;
/// use burn_decorator::shared;
///
/// let data = shared(TensorData::from([1.0f32, 2.0]));
/// let mut other = data.clone();
/// assert_eq!(data.as_bytes().as_ptr(), other.as_bytes().as_ptr());
/// other.as_mut_slice::<f32>()?[0] = 3.0;
/// assert_eq!(data, TensorData::from([1.0f32, 2.0]));
/// # Ok::<(), burn_backend::DataError>(())
/// ```
pub fn shared(data: TensorData) -> TensorData {
    /// `bytes::Bytes` owns what refers to bytes.
    struct Owner(Bytes);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    let (shape, dtype) = crate::shape_and_dtype!(data);
    let bytes = data.into_bytes();
    let property = bytes.property();
    let bytes = bytes::Bytes::from_owner(Owner(bytes));
    TensorData::from_bytes(Bytes::from_shared(bytes, property), shape, dtype)
}

/// The same elements in another shape of as many.
pub fn in_shape(data: TensorData, shape: Shape) -> TensorData {
    let (_, dtype) = crate::shape_and_dtype!(data);
    TensorData::from_bytes(data.into_bytes(), shape, dtype)
}
