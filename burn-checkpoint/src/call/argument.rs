//! An argument as a call sees it, and the storage that a view takes from it.

use std::fmt::Debug;

use burn_backend::tensor::Device;
use burn_backend::{Backend, DType, Shape};

use crate::gradient::Gradient;
use crate::node::Source;

/// An argument of an operation.
pub(crate) enum Argument<'a, B: Backend> {
    /// A managed tensor.
    Node(&'a Source<B>),
    /// Another tensor: its shape and type, where it is, and its mark if it is a gradient.
    Leaf(
        &'a dyn Fn() -> (Shape, DType, Device<B>),
        Option<&'a Gradient>,
    ),
    /// The device that the result is to be on, where it need not be that of the operands.
    To(&'a Device<B>),
    /// A plain number, such as a dimension.
    Number(usize),
    /// The type of the result.
    Type(DType),
    /// Any other plain argument, such as the options of a convolution.
    Plain(&'a dyn Debug),
}

/// Whose storage the result of a view operation has.
pub(super) enum Shares<B: Backend> {
    /// Its own: a reshape of an operand that is not contiguous copies.
    Own,
    /// An unmanaged tensor's.
    Leaf,
    /// That of a gradient.
    Gradient(Gradient),
    /// That of a managed tensor.
    With(Source<B>),
}
