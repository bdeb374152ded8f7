//! Buffers in host memory, in the types that ranks exchange, and their reduction, defined once for
//! all groups.

use std::fmt;

use bytemuck::{AnyBitPattern, cast_slice, cast_slice_mut};
use half::{bf16, f16, slice::HalfFloatSliceExt};
use serde::{Deserialize, Serialize};

/// Type of a buffer's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BufferDtype {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    Bf16,
    /// 2 bytes.
    F16,
}

impl BufferDtype {
    /// Size of an element.
    pub fn size_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

impl fmt::Display for BufferDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        })
    }
}

/// A flat buffer in host memory. Collectives take it by value and return one, so that it moves to
/// another thread without a copy.
#[derive(Clone, Debug, PartialEq)]
pub enum HostBuffer {
    /// f32 elements.
    F32(Vec<f32>),
    /// bf16 elements.
    Bf16(Vec<bf16>),
    /// f16 elements.
    F16(Vec<f16>),
}

/// Evaluates `$body` with `$values` bound to the buffer's vector, whatever its type.
macro_rules! with_values {
    ($buffer:expr, $values:ident => $body:expr) => {
        match $buffer {
            HostBuffer::F32($values) => $body,
            HostBuffer::Bf16($values) => $body,
            HostBuffer::F16($values) => $body,
        }
    };
}

impl HostBuffer {
    /// A buffer of zeros.
    pub fn zeros(dtype: BufferDtype, elements: usize) -> Self {
        match dtype {
            BufferDtype::F32 => Self::F32(vec![0.0; elements]),
            BufferDtype::Bf16 => Self::Bf16(vec![bf16::ZERO; elements]),
            BufferDtype::F16 => Self::F16(vec![f16::ZERO; elements]),
        }
    }

    /// The elements of `parts`, one part after the other.
    pub(super) fn concat(dtype: BufferDtype, parts: &[&[u8]]) -> Self {
        fn elements<T: AnyBitPattern>(parts: &[&[u8]]) -> Vec<T> {
            let parts: Vec<&[T]> = parts.iter().map(|part| cast_slice(part)).collect();
            parts.concat()
        }
        match dtype {
            BufferDtype::F32 => Self::F32(elements(parts)),
            BufferDtype::Bf16 => Self::Bf16(elements(parts)),
            BufferDtype::F16 => Self::F16(elements(parts)),
        }
    }

    /// Rounds f32 values to `dtype`, to the nearest, ties to even.
    pub fn from_f32(dtype: BufferDtype, values: Vec<f32>) -> Self {
        if dtype == BufferDtype::F32 {
            return Self::F32(values);
        }
        let mut rounded = Self::zeros(dtype, values.len());
        round(dtype, &values, rounded.as_mut());
        rounded
    }

    /// The values as f32, exact. An f32 buffer is not copied.
    pub fn into_f32(self) -> Vec<f32> {
        if let Self::F32(values) = self {
            return values;
        }
        let mut widened = vec![0.0; self.len()];
        widen(self.dtype(), self.as_bytes(), &mut widened);
        widened
    }

    /// The elements' type.
    pub fn dtype(&self) -> BufferDtype {
        match self {
            Self::F32(_) => BufferDtype::F32,
            Self::Bf16(_) => BufferDtype::Bf16,
            Self::F16(_) => BufferDtype::F16,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        with_values!(self, values => values.len())
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size in memory.
    pub fn size_bytes(&self) -> usize {
        self.len() * self.dtype().size_bytes()
    }

    /// The elements as bytes, in this machine's order.
    pub fn as_bytes(&self) -> &[u8] {
        with_values!(self, values => cast_slice(values))
    }

    /// Reduces `parts`, one a rank in the order of ranks, into this buffer. All are equally long.
    pub(super) fn reduce(&mut self, op: ReduceOp, parts: &[&[u8]]) {
        let (dtype, size) = (self.dtype(), self.dtype().size_bytes());
        let (mut sum, mut next) = ([0.0; BLOCK], [0.0; BLOCK]);
        for (index, out) in self.as_mut().chunks_mut(BLOCK * size).enumerate() {
            let at = index * BLOCK * size..index * BLOCK * size + out.len();
            let (sum, next) = (&mut sum[..out.len() / size], &mut next[..out.len() / size]);
            widen(dtype, &parts[0][at.clone()], sum);
            for part in &parts[1..] {
                widen(dtype, &part[at.clone()], next);
                for (sum, next) in sum.iter_mut().zip(&*next) {
                    *sum += next;
                }
            }
            if op == ReduceOp::Mean {
                let ranks = parts.len() as f32;
                sum.iter_mut().for_each(|sum| *sum /= ranks);
            }
            round(dtype, sum, out);
        }
    }
}

impl AsRef<[u8]> for HostBuffer {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl AsMut<[u8]> for HostBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        with_values!(self, values => cast_slice_mut(values))
    }
}

/// How the elements of all ranks become one.
///
/// Both operations add in f32, rank after rank from 0 on, and round to the buffer's type once, at
/// the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReduceOp {
    /// `x0 + x1 + ...`
    Sum,
    /// The sum divided by the world size, before it is rounded.
    Mean,
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
        })
    }
}

/// Elements that are reduced at a time: the f32 accumulators stay in the first-level cache.
const BLOCK: usize = 1024;

/// Widens elements into `to`, exactly.
pub(super) fn widen(dtype: BufferDtype, from: &[u8], to: &mut [f32]) {
    match dtype {
        BufferDtype::F32 => to.copy_from_slice(cast_slice(from)),
        BufferDtype::Bf16 => cast_slice::<u8, bf16>(from).convert_to_f32_slice(to),
        BufferDtype::F16 => cast_slice::<u8, f16>(from).convert_to_f32_slice(to),
    }
}

/// Rounds values into `to`.
fn round(dtype: BufferDtype, from: &[f32], to: &mut [u8]) {
    match dtype {
        BufferDtype::F32 => to.copy_from_slice(cast_slice(from)),
        BufferDtype::Bf16 => cast_slice_mut::<u8, bf16>(to).convert_from_f32_slice(from),
        BufferDtype::F16 => cast_slice_mut::<u8, f16>(to).convert_from_f32_slice(from),
    }
}

/// Conversions from the vectors of each type of element.
macro_rules! from_vec {
    ($($variant:ident: $type:ty),*) => {
        $(impl From<Vec<$type>> for HostBuffer {
            fn from(values: Vec<$type>) -> Self {
                Self::$variant(values)
            }
        })*
    };
}

from_vec!(F32: f32, Bf16: bf16, F16: f16);
