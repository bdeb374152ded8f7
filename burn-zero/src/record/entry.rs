//! What a rank saves to a record or loads from it: a contiguous slice of a named tensor.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use safetensors::Dtype;

use super::RecordFault;

/// Bytes of a slice under one checksum, the smallest unit that is read.
pub(super) const CHUNK_BYTES: usize = 1 << 20;

/// A tensor of a record as a whole: the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Section and path, such as `model/blocks.0.mlp.weight`.
    pub name: String,
    /// Type of the elements.
    pub dtype: Dtype,
    /// The whole tensor's shape; `[]` is a scalar.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// A tensor of `shape`.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: impl Into<Vec<usize>>) -> Self {
        Self {
            name: name.into(),
            dtype,
            shape: shape.into(),
        }
    }

    /// Elements of the whole tensor; `None` if that overflows `usize`.
    pub fn elements(&self) -> Option<usize> {
        let mut dims = self.shape.iter();
        dims.try_fold(1_usize, |product, &dim| product.checked_mul(dim))
    }

    /// Bytes of one element.
    pub(crate) fn element_bytes(&self) -> usize {
        self.dtype.bitsize() / 8
    }

    /// Checks that `range` is in the tensor and can be addressed on this machine.
    pub(super) fn check(&self, range: &Range<usize>) -> Result<(), RecordFault> {
        if !self.dtype.bitsize().is_multiple_of(8) {
            let dtype = self.dtype;
            return Err(self.error(format!("is {dtype}, whose elements are no whole bytes")));
        }
        let elements = self.elements().unwrap_or(usize::MAX);
        let addressable = elements.checked_mul(self.element_bytes()).is_some();
        if !addressable || range.start > range.end || range.end > elements {
            let shape = &self.shape;
            return Err(self.error(format!(
                "of shape {shape:?} has {elements} elements, of which {range:?} are no range"
            )));
        }
        Ok(())
    }

    /// An error with this tensor.
    pub(super) fn error(&self, reason: String) -> RecordFault {
        RecordFault::Entry {
            name: self.name.clone(),
            reason,
        }
    }
}

/// A range of a tensor's flat elements in row-major order: the elements that one rank saves or
/// loads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSlice {
    /// The tensor.
    pub tensor: TensorSpec,
    /// The elements of the flattened tensor, counted from 0; may be empty.
    pub range: Range<usize>,
}

impl TensorSlice {
    /// The elements `range` of `tensor`.
    pub fn new(tensor: TensorSpec, range: Range<usize>) -> Self {
        Self { tensor, range }
    }

    /// All elements of `tensor`.
    ///
    /// # Panics
    ///
    /// If their number overflows `usize`.
    pub fn whole(tensor: TensorSpec) -> Self {
        let elements = tensor.elements();
        let elements = elements.expect("a tensor in memory has a countable number of elements");
        Self::new(tensor, 0..elements)
    }

    /// Bytes of the slice.
    pub fn bytes(&self) -> usize {
        self.range.len() * self.tensor.element_bytes()
    }
}

/// Error of the caller's code that provides or receives the bytes of a slice.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A slice and its bytes: little-endian elements, nothing between them.
pub struct Entry<'a> {
    slice: TensorSlice,
    read: Box<dyn FnOnce() -> Result<Cow<'a, [u8]>, Failure> + 'a>,
}

impl<'a> Entry<'a> {
    /// A slice with its bytes in memory, borrowed or owned.
    pub fn new(slice: TensorSlice, bytes: impl Into<Cow<'a, [u8]>>) -> Self {
        let bytes = bytes.into();
        Self::lazy(slice, || Ok(bytes))
    }

    /// A slice whose bytes are read, for example from a device, when the entry is written. Entries
    /// are written one after the other, so that there is never a second copy of the state.
    pub fn lazy(
        slice: TensorSlice,
        bytes: impl FnOnce() -> Result<Cow<'a, [u8]>, Failure> + 'a,
    ) -> Self {
        let read = Box::new(bytes);
        Self { slice, read }
    }

    /// The slice.
    pub fn slice(&self) -> &TensorSlice {
        &self.slice
    }

    /// The slice and its bytes, whose number is checked.
    pub(super) fn into_bytes(self) -> Result<(TensorSlice, Cow<'a, [u8]>), RecordFault> {
        let error = |reason| self.slice.tensor.error(reason);
        let bytes = (self.read)();
        let bytes = bytes.map_err(|it| error(format!("cannot be read by its owner: {it}")))?;
        let (given, expected) = (bytes.len(), self.slice.bytes());
        if given != expected {
            let reason = format!("was given {given} bytes for a slice of {expected} bytes");
            return Err(error(reason));
        }
        Ok((self.slice, bytes))
    }
}

impl fmt::Debug for Entry<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Entry").field(&self.slice).finish()
    }
}
