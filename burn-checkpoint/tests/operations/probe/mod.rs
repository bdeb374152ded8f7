//! A backend that counts what runs, and lends what the inner backend has not. `transfer.rs` decides
//! about transfers to the host and back.

mod transfer;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::convert::identity;
use std::marker::PhantomData;
use std::rc::Rc;

use burn_backend::{Backend, BackendTypes, TensorMetadata};
use burn_decorator::types::*;
use burn_decorator::{kind_type, map_operand, map_result};

#[allow(unused_imports, reason = "not by each test")]
pub use transfer::{Reads, Writes, looks, with_transfers};

/// How often each operation ran.
pub type Counts = BTreeMap<&'static str, usize>;

thread_local! {
    static COUNTS: RefCell<Counts> = const { RefCell::new(Counts::new()) };
    static WATCH: RefCell<Option<Watch>> = const { RefCell::new(None) };
}

/// What ran on this thread since the last call.
pub fn take_counts() -> Counts {
    COUNTS.take()
}

/// Is told of each operation of this thread before it runs.
type Watch = Rc<dyn Fn(&'static str)>;

/// Runs a function while another is told of each operation.
#[allow(dead_code, reason = "not by each test")]
pub fn watched<R>(watch: impl Fn(&'static str) + 'static, run: impl FnOnce() -> R) -> R {
    struct Done;
    impl Drop for Done {
        fn drop(&mut self) {
            WATCH.set(None);
        }
    }
    let _done = Done;
    WATCH.set(Some(Rc::new(watch)));
    run()
}

fn count(op: &'static str) {
    COUNTS.with_borrow_mut(|counts| *counts.entry(op).or_default() += 1);
    let watch = WATCH.with_borrow(Clone::clone);
    if let Some(watch) = watch {
        watch(op);
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Probe<B>(PhantomData<B>);

impl<B: Backend> BackendTypes for Probe<B> {
    burn_decorator::forward_types!(B, float tensor: FloatTensor<B>);
}

impl<B: Backend> Backend for Probe<B> {
    burn_decorator::forward_device!(B);
    burn_decorator::forward_dtypes!(B);

    fn name(device: &Self::Device) -> String {
        format!("probe<{}>", B::name(device))
    }
}

/// What Flex 0.21 has not. Its `float_argtopk` and `int_argtopk` are unimplemented, and `q_argtopk`
/// calls the first; `ctc_loss_backward` is only there for backends with a kernel of their own, the
/// others differentiate `ctc_loss`.
mod lent {
    use super::*;

    fn first<B: Backend>(sorted: IntTensor<B>, dim: usize, k: usize) -> IntTensor<B> {
        let shape = sorted.shape();
        let size = |d| if d == dim { k } else { shape[d] };
        let slices: Vec<_> = (0..shape.num_dims())
            .map(|d| Slice::from(0..size(d)))
            .collect();
        B::int_slice(sorted, &slices)
    }

    pub fn float_argtopk<B: Backend>(
        tensor: FloatTensor<B>,
        dim: usize,
        k: usize,
        out_dtype: IntDType,
    ) -> IntTensor<B> {
        first::<B>(B::float_argsort(tensor, dim, true, out_dtype), dim, k)
    }

    pub fn int_argtopk<B: Backend>(tensor: IntTensor<B>, dim: usize, k: usize) -> IntTensor<B> {
        first::<B>(B::int_argsort(tensor, dim, true), dim, k)
    }

    pub fn q_argtopk<B: Backend>(
        tensor: QuantizedTensor<B>,
        dim: usize,
        k: usize,
        out_dtype: IntDType,
    ) -> IntTensor<B> {
        float_argtopk::<B>(B::dequantize(tensor, FloatDType::F32), dim, k, out_dtype)
    }

    /// Not the gradient, but a function of what it is a function of.
    pub fn ctc_loss_backward<B: Backend>(
        log_probs: FloatTensor<B>,
        _targets: IntTensor<B>,
        _input_lengths: IntTensor<B>,
        _target_lengths: IntTensor<B>,
        grad_loss: FloatTensor<B>,
        _blank: usize,
    ) -> FloatTensor<B> {
        let samples = grad_loss.shape().num_elements();
        let grad = B::float_reshape(grad_loss, Shape::new([1, samples, 1]));
        B::float_mul(B::float_exp(log_probs), grad)
    }
}

macro_rules! run {
    (float_argtopk($($arg:expr),*)) => { lent::float_argtopk::<B>($($arg),*) };
    (int_argtopk($($arg:expr),*)) => { lent::int_argtopk::<B>($($arg),*) };
    (q_argtopk($($arg:expr),*)) => { lent::q_argtopk::<B>($($arg),*) };
    (ctc_loss_backward($($arg:expr),*)) => { lent::ctc_loss_backward::<B>($($arg),*) };
    (tr_execute($transaction:expr)) => { transfer::read(B::tr_execute($transaction)) };
    (float_into_data($tensor:expr)) => { transfer::read(B::float_into_data($tensor)) };
    (float_from_data($data:expr, $device:expr)) => { B::float_from_data(transfer::write($data), $device) };
    ($op:ident($($arg:expr),*)) => { B::$op($($arg),*) };
}

macro_rules! implement {
    ($trait:ident $($cast:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<B: Backend> $trait<Self> for Probe<B> {
            $(fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
                count(stringify!($op));
                map_result!($ret run!($op($(map_operand!($kind $arg, identity)),*)), identity)
            })*
        }
    };
}

burn_decorator::every_ops!(implement);
