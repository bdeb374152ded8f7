//! Buffers in host memory, in the types that ranks exchange.

use std::fmt;

use bytemuck::Pod;
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

/// A flat buffer in host memory. Collectives take it by value and return one, so that it moves to another thread without a copy.
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
            $crate::group::HostBuffer::F32($values) => $body,
            $crate::group::HostBuffer::Bf16($values) => $body,
            $crate::group::HostBuffer::F16($values) => $body,
        }
    };
}
pub(crate) use with_values;

impl HostBuffer {
    /// A buffer of zeros.
    pub fn zeros(dtype: BufferDtype, elements: usize) -> Self {
        match dtype {
            BufferDtype::F32 => Self::F32(vec![0.0; elements]),
            BufferDtype::Bf16 => Self::Bf16(vec![bf16::ZERO; elements]),
            BufferDtype::F16 => Self::F16(vec![f16::ZERO; elements]),
        }
    }

    /// Rounds f32 values to `dtype`, to the nearest, ties to even.
    pub fn from_f32(dtype: BufferDtype, values: Vec<f32>) -> Self {
        match dtype {
            BufferDtype::F32 => Self::F32(values),
            BufferDtype::Bf16 => Self::Bf16(rounded(&values)),
            BufferDtype::F16 => Self::F16(rounded(&values)),
        }
    }

    /// The values as f32, exact. An f32 buffer is not copied.
    pub fn into_f32(self) -> Vec<f32> {
        match self {
            Self::F32(values) => values,
            Self::Bf16(values) => widened(&values),
            Self::F16(values) => widened(&values),
        }
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
        with_values!(self, values => bytemuck::cast_slice(values))
    }
}

impl From<Vec<f32>> for HostBuffer {
    fn from(values: Vec<f32>) -> Self {
        Self::F32(values)
    }
}

impl From<Vec<bf16>> for HostBuffer {
    fn from(values: Vec<bf16>) -> Self {
        Self::Bf16(values)
    }
}

impl From<Vec<f16>> for HostBuffer {
    fn from(values: Vec<f16>) -> Self {
        Self::F16(values)
    }
}

/// An element that can be reduced: through f32.
pub(crate) trait Element: Pod + Send + Sync {
    /// Widens `values` into `out`, exactly.
    fn widen(values: &[Self], out: &mut [f32]);

    /// Rounds `values` into `out`.
    fn round(values: &[f32], out: &mut [Self]);

    /// The vector inside a buffer of this type.
    fn unwrap(buffer: HostBuffer) -> Option<Vec<Self>>;
}

fn rounded<E: Element>(values: &[f32]) -> Vec<E> {
    let mut out = vec![E::zeroed(); values.len()];
    E::round(values, &mut out);
    out
}

fn widened<E: Element>(values: &[E]) -> Vec<f32> {
    let mut out = vec![0.0; values.len()];
    E::widen(values, &mut out);
    out
}

impl Element for f32 {
    fn widen(values: &[Self], out: &mut [f32]) {
        out.copy_from_slice(values);
    }

    fn round(values: &[f32], out: &mut [Self]) {
        out.copy_from_slice(values);
    }

    fn unwrap(buffer: HostBuffer) -> Option<Vec<Self>> {
        match buffer {
            HostBuffer::F32(values) => Some(values),
            _ => None,
        }
    }
}

/// For a type of two bytes, by its variant of the buffer.
macro_rules! half_element {
    ($half:ident, $variant:ident) => {
        impl Element for $half {
            fn widen(values: &[Self], out: &mut [f32]) {
                values.convert_to_f32_slice(out);
            }

            fn round(values: &[f32], out: &mut [Self]) {
                out.convert_from_f32_slice(values);
            }

            fn unwrap(buffer: HostBuffer) -> Option<Vec<Self>> {
                match buffer {
                    HostBuffer::$variant(values) => Some(values),
                    _ => None,
                }
            }
        }
    };
}

half_element!(bf16, Bf16);
half_element!(f16, F16);
