//! Finding the tensors that a scope returns.
//!
//! A scope keeps its results. It finds them by reading the shape of each: a call that reaches the tensor of `Remat` through all decorators.

use std::cell::Cell;
use std::sync::Arc;

use burn::tensor::backend::Backend;
use burn::tensor::{BasicOps, Tensor, TensorKind};

use crate::context;
use crate::entry::AnyEntry;

/// What a scope may return: tensors of any backend, rank and kind, in tuples, `Vec`, `Option`, arrays, `Box`, `Result`, and structs by
/// [`outputs!`](crate::outputs!). A tensor that is left out is evicted with the rest and computed again when it is used: only time is lost.
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

/// Implements [`Outputs`] for types: how a value of them is touched, and the types with their generics.
macro_rules! touched {
    (|$value:pat_param| $touch:expr; $([$($generics:tt)*] $type:ty),*) => {
        $(impl<$($generics)*> Outputs for $type {
            #[allow(non_snake_case, reason = "names of types")]
            fn touch(&self) {
                let $value = self;
                $touch
            }
        })*
    };
}

touched!(|this| (**this).touch(); [T: Outputs + ?Sized] &T, [T: Outputs + ?Sized] Box<T>);
touched!(|parts| parts.iter().for_each(Outputs::touch);
    [T: Outputs] [T], [T: Outputs, const N: usize] [T; N], [T: Outputs] Vec<T>, [T: Outputs] Option<T>, [T: Outputs, E] Result<T, E>);

/// Of this many types, then one fewer.
macro_rules! tuples {
    ($($name:ident)*) => {
        touched!(|($($name,)*)| { $($name.touch();)* }; [$($name: Outputs),*] ($($name,)*));
        tuples!(@ $($name)*);
    };
    (@) => {};
    (@ $first:ident $($rest:ident)*) => { tuples!($($rest)*); };
}

tuples!(A B C D E F G H);

touched!(|_| {}; [] bool, [] u8, [] u16, [] u32, [] u64, [] usize, [] i8, [] i16, [] i32, [] i64, [] isize, [] f32, [] f64,
    [] String, [] &'static str);

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
