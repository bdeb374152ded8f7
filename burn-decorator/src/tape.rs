//! Access to autodiff's tensors below decorators, for code that is generic over any backend.
//!
//! Such code can neither ask autodiff whether a tensor that is no leaf is tracked, nor put an
//! operation of its own on the tape: it cannot name the backend that autodiff differentiates. A
//! decorator of that backend can, so it [`offer`]s a [`Tape`] for the tensors of autodiff above it,
//! and a decorator above autodiff [`wrap`]s the tape for its own tensors. Both do so in
//! `TensorMetadata::rank`, which [`find`] calls, because every tensor passes that call on to the
//! one inside of it.
//!
//! ```
//! use burn_decorator::tape::{self, Tape};
//!
//! struct Inner(f32);
//! struct Outer(Inner);
//! impl Inner {
//!     fn rank(&self) -> usize {
//!         tape::offer(|| Tape::<Inner>::new(|x| x.0 > 0.0, |loss, _, _| loss));
//!         1
//!     }
//! }
//! impl Outer {
//!     fn rank(&self) -> usize {
//!         let rank = self.0.rank();
//!         tape::wrap(|x: &Outer| &x.0, |x: Outer| x.0, Outer);
//!         rank
//!     }
//! }
//!
//! let x = Outer(Inner(2.0));
//! let tape = tape::find::<Outer>(|| x.rank()).unwrap();
//! assert!(tape.is_tracked(&x));
//! assert!(tape::find::<Inner>(|| x.rank()).is_none(), "the tape is of other tensors");
//! ```

use std::any::Any;

use crate::carried::{carry, with};

/// What can be done with tensors `T` of a backend with autodiff.
pub struct Tape<T> {
    is_tracked: Box<dyn Fn(&T) -> bool>,
    attach: Box<dyn Fn(T, T, T) -> T>,
}

impl<T: 'static> Tape<T> {
    /// See [`Self::is_tracked`] and [`Self::attach`].
    pub fn new(
        is_tracked: impl Fn(&T) -> bool + 'static,
        attach: impl Fn(T, T, T) -> T + 'static,
    ) -> Self {
        Self {
            is_tracked: Box::new(is_tracked),
            attach: Box::new(attach),
        }
    }

    /// Whether autodiff tracks the tensor, a leaf or not: whether backward computes a gradient of
    /// it.
    pub fn is_tracked(&self, tensor: &T) -> bool {
        (self.is_tracked)(tensor)
    }

    /// Returns `loss`, a scalar of shape `[1]`, with `gradient` added to its gradient with respect
    /// to `operand`. Backward multiplies `gradient` by the gradient of the loss, in place if
    /// nothing else holds it. `gradient` is a constant of the operand's shape; all three have one
    /// type.
    pub fn attach(&self, loss: T, operand: T, gradient: T) -> T {
        (self.attach)(loss, operand, gradient)
    }
}

/// The [`Tape`] that was found so far, of the tensors that the question has come to on its way out.
struct Found(Option<Box<dyn Any>>);

/// The tape of tensors `T`, where `rank` is `TensorMetadata::rank` of one of them; `None` where no
/// decorator below autodiff offers one.
pub fn find<T: 'static>(rank: impl FnOnce() -> usize) -> Option<Tape<T>> {
    let (_, found) = carry(Found(None), rank);
    let tape = found?.0?.downcast().ok()?;
    Some(*tape)
}

/// Offers the tape of the tensors of autodiff directly above, if [`find`] asks.
#[inline]
pub fn offer<T: 'static>(tape: impl FnOnce() -> Tape<T>) {
    with(|found: &mut Found| found.0 = Some(Box::new(tape())));
}

/// Converts the tape of inner tensors `T`, if one was offered, to one of tensors `W`, each of which
/// holds one `T`.
#[inline]
pub fn wrap<T: 'static, W: 'static>(peek: fn(&W) -> &T, unwrap: fn(W) -> T, wrap: fn(T) -> W) {
    with(|found: &mut Found| {
        let inner = found.0.take_if(|tape| tape.is::<Tape<T>>());
        let Some(inner) = inner.and_then(|tape| tape.downcast::<Tape<T>>().ok()) else {
            return;
        };
        let Tape { is_tracked, attach } = *inner;
        let outer = Tape::<W>::new(
            move |tensor| is_tracked(peek(tensor)),
            move |loss, operand, gradient| {
                wrap(attach(unwrap(loss), unwrap(operand), unwrap(gradient)))
            },
        );
        found.0 = Some(Box::new(outer));
    });
}
