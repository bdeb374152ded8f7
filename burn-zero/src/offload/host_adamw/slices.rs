//! What goes in and out of a step.

use half::{bf16, f16};

/// Gradients of a range of parameters.
#[derive(Clone, Copy, Debug)]
pub enum Gradients<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Brain floating point, widened exactly.
    Bf16(&'a [bf16]),
    /// Half precision, widened exactly.
    F16(&'a [f16]),
}

/// Where a low-precision copy of the updated parameters goes: for the upload, half the bytes of the f32 master.
///
/// Rounded to nearest, ties to even. f16 overflows to infinity from 65520 on.
#[derive(Debug)]
pub enum ParamsOut<'a> {
    /// Brain floating point.
    Bf16(&'a mut [bf16]),
    /// Half precision.
    F16(&'a mut [f16]),
}

impl<'a> Gradients<'a> {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(slice) => slice.len(),
            Self::Bf16(slice) => slice.len(),
            Self::F16(slice) => slice.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::F32(slice) => {
                let (head, tail) = slice.split_at(at);
                (Self::F32(head), Self::F32(tail))
            }
            Self::Bf16(slice) => {
                let (head, tail) = slice.split_at(at);
                (Self::Bf16(head), Self::Bf16(tail))
            }
            Self::F16(slice) => {
                let (head, tail) = slice.split_at(at);
                (Self::F16(head), Self::F16(tail))
            }
        }
    }
}

impl<'a> ParamsOut<'a> {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Self::Bf16(slice) => slice.len(),
            Self::F16(slice) => slice.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::Bf16(slice) => {
                let (head, tail) = slice.split_at_mut(at);
                (Self::Bf16(head), Self::Bf16(tail))
            }
            Self::F16(slice) => {
                let (head, tail) = slice.split_at_mut(at);
                (Self::F16(head), Self::F16(tail))
            }
        }
    }
}
