//! Finding the tensors that a scope returns.
//!
//! A scope keeps its results. It finds them by reading the shape of each: a call that reaches the
//! tensor of `Remat` through all decorators.

use std::sync::Arc;

use burn::nn::attention::MhaOutput;
use burn::nn::{LstmState, RnnState};
use burn::tensor::backend::Backend;
use burn::tensor::{BasicOps, Tensor, TensorKind};
use burn::train::{
    ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput,
};

use burn_decorator::carried::{carry, with};

use crate::node::entry::AnyEntry;
use crate::record::context;

/// What a scope may return: tensors of any backend, rank and kind, in tuples, `Vec`, `Option`,
/// arrays, `Box`, `Result`, the structs that burn-nn's modules and a
/// [`TrainStep`](burn::train::TrainStep) return, and structs of your own by
/// [`outputs!`](crate::outputs!). A struct of another crate cannot have it: return that from
/// [`checkpoint_listing`](crate::checkpoint_listing). A tensor that is left out is evicted with the
/// rest and computed again when it is used: only time is lost.
#[diagnostic::on_unimplemented(
    message = "a checkpoint scope cannot return `{Self}`: which tensors it holds is not known",
    label = "the tensors of this result are not known",
    note = "for a struct of your own: `burn_checkpoint::outputs!(impl[B: Backend] {Self} {{ field, .. }})`, with the fields that hold tensors",
    note = "for a struct of another crate: `checkpoint_listing(policy, || .., |result, tensors| {{ tensors.add(&result.field); }})`"
)]
pub trait Outputs {
    /// Calls [`Outputs::touch`] of every part that holds tensors.
    fn touch(&self);
}

/// The number of tensors that were touched.
#[derive(Default)]
struct Touched(usize);

/// Runs a function that touches results. Returns the number of tensors among them, and the nodes of
/// the managed ones.
pub(crate) fn collect(touch: impl FnOnce()) -> (usize, Vec<Arc<dyn AnyEntry>>) {
    let (managed, touched) = carry(Touched::default(), || context::collecting(touch));
    (touched.unwrap_or_default().0, managed)
}

impl<B: Backend, const D: usize, K: TensorKind<B> + BasicOps<B>> Outputs for Tensor<B, D, K> {
    fn touch(&self) {
        with(|touched: &mut Touched| touched.0 += 1);
        let _ = self.shape();
    }
}

/// Implements [`Outputs`] for types: how a value of them is touched, and the types with their
/// generics.
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

// What modules of burn-nn return. The fields of `TransformerDecoderInput`, which a layer of its
// decoder returns, are private, and so are those of the caches of inference.
outputs!(impl[B: Backend, const D: usize] LstmState<B, D> { cell, hidden });
outputs!(impl[B: Backend, const D: usize] RnnState<B, D> { hidden });
outputs!(impl[B: Backend] MhaOutput<B> { weights, context });

// What the models of burn-train's examples return, with their loss.
outputs!(impl[B: Backend] ClassificationOutput<B> { loss, output, targets });
outputs!(impl[B: Backend] MultiLabelClassificationOutput<B> { loss, output, targets });
outputs!(impl[B: Backend] RegressionOutput<B> { loss, output, targets });
outputs!(impl[B: Backend] SequenceOutput<B> { loss, logits, predictions, targets });
