//! Finding the tensors that a scope returns.
//!
//! A scope keeps its results. It finds them by reading the shape of each, a call that reaches the tensor of
//! [`Remat`](crate::Remat) through every decorator above it.

use std::cell::Cell;
use std::sync::Arc;

use burn::tensor::backend::Backend;
use burn::tensor::{BasicOps, Tensor, TensorKind};

use crate::context;
use crate::entry::AnyEntry;

/// What a scope may return: tensors of any backend, rank and kind, in tuples, `Vec`, `Option`, arrays, `Box`, `Result`, and
/// structs by [`outputs!`](crate::outputs!). A tensor that is left out is evicted with the rest and computed again when it is used: only
/// time is lost.
pub trait Outputs {
    /// Calls [`Outputs::touch`] of every part that holds tensors.
    fn touch(&self);
}

thread_local! {
    static TOUCHED: Cell<usize> = const { Cell::new(0) };
}

/// The number of tensors among the results, and the nodes of the managed ones.
pub(crate) fn collect(results: &impl Outputs) -> (usize, Vec<Arc<dyn AnyEntry>>) {
    TOUCHED.set(0);
    let managed = context::collecting(|| results.touch());
    (TOUCHED.get(), managed)
}

impl<B: Backend, const D: usize, K: TensorKind<B> + BasicOps<B>> Outputs for Tensor<B, D, K> {
    fn touch(&self) {
        TOUCHED.set(TOUCHED.get() + 1);
        let _ = self.shape();
    }
}

impl<T: Outputs + ?Sized> Outputs for &T {
    fn touch(&self) {
        (**self).touch();
    }
}

impl<T: Outputs + ?Sized> Outputs for Box<T> {
    fn touch(&self) {
        (**self).touch();
    }
}

impl<T: Outputs> Outputs for [T] {
    fn touch(&self) {
        self.iter().for_each(Outputs::touch);
    }
}

impl<T: Outputs, const N: usize> Outputs for [T; N] {
    fn touch(&self) {
        self.as_slice().touch();
    }
}

impl<T: Outputs> Outputs for Vec<T> {
    fn touch(&self) {
        self.as_slice().touch();
    }
}

impl<T: Outputs> Outputs for Option<T> {
    fn touch(&self) {
        self.iter().for_each(Outputs::touch);
    }
}

impl<T: Outputs, E> Outputs for Result<T, E> {
    fn touch(&self) {
        self.iter().for_each(Outputs::touch);
    }
}

macro_rules! tuples {
    ($($name:ident)*) => {
        impl<$($name: Outputs),*> Outputs for ($($name,)*) {
            #[allow(non_snake_case, reason = "names of types")]
            fn touch(&self) {
                let ($($name,)*) = self;
                $($name.touch();)*
            }
        }
    };
}

tuples!();
tuples!(A);
tuples!(A B);
tuples!(A B C);
tuples!(A B C D);
tuples!(A B C D E);
tuples!(A B C D E F);
tuples!(A B C D E F G);
tuples!(A B C D E F G H);

macro_rules! plain {
    ($($plain:ty)*) => {
        $(impl Outputs for $plain {
            fn touch(&self) {}
        })*
    };
}

plain!(bool u8 u16 u32 u64 usize i8 i16 i32 i64 isize f32 f64 String &'static str);

/// Implements [`Outputs`] for a struct, by the fields that hold tensors.
///
/// ```
/// use burn::tensor::{Int, Tensor, backend::Backend};
///
/// struct Encoded<B: Backend> {
///     states: Tensor<B, 3>,
///     lengths: Option<Tensor<B, 1, Int>>,
///     name: String,
/// }
/// burn_checkpoint::outputs!(impl[B: Backend] Encoded<B> { states, lengths });
/// ```
#[macro_export]
macro_rules! outputs {
    (impl[$($generics:tt)*] $struct:ty { $($field:ident),* $(,)? }) => {
        impl<$($generics)*> $crate::Outputs for $struct {
            fn touch(&self) {
                $($crate::Outputs::touch(&self.$field);)*
            }
        }
    };
}
