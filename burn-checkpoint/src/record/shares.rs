//! The storage that the result of a view takes from its operand.

use burn_backend::Backend;

use crate::node::gradient::Gradient;
use crate::node::source::Source;

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
