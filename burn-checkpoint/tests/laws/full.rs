//! A device that has no memory for every k-th allocation: operations run again, and a training ends
//! with the same bits.

use std::cell::Cell;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::Autodiff;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Int, Tensor};
use burn_backend::{Backend, BackendTypes};
use burn_checkpoint::{MemoryBudget, Remat, RematStats};
use burn_decorator::types::*;
use burn_decorator::{kind_type, map_operand, map_result};
use burn_flex::Flex;

use crate::apart::InstallApart;
use crate::models::{Bare, Cnn, Mlp, Model, Transformer, generator, model, parameters};

/// A backend that panics where an allocation is to fail.
#[derive(Clone, Copy, Debug, Default)]
pub struct Full<B>(PhantomData<B>);

thread_local! {
    /// Every so many allocations fail.
    static EVERY: Cell<u64> = const { Cell::new(u64::MAX) };
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static FAILURES: Cell<u64> = const { Cell::new(0) };
}

/// Counts what is no view as one allocation, before it is computed.
fn allocate(op: &str, work: &str) {
    if matches!(work, "view" | "pass") {
        return;
    }
    ALLOCATIONS.set(ALLOCATIONS.get() + 1);
    if ALLOCATIONS.get().is_multiple_of(EVERY.get()) {
        FAILURES.set(FAILURES.get() + 1);
        panic!("out of memory in {op}");
    }
}

/// Lets every so many allocations of this thread fail while `run` runs. Gives how many did.
fn failing<R>(every: u64, run: impl FnOnce() -> R) -> (R, u64) {
    struct Over;
    impl Drop for Over {
        fn drop(&mut self) {
            EVERY.set(u64::MAX);
        }
    }
    let _over = Over;
    EVERY.set(every);
    let before = FAILURES.get();
    (run(), FAILURES.get() - before)
}

impl<B: Backend> BackendTypes for Full<B> {
    burn_decorator::forward_types!(B, float tensor: B::FloatTensorPrimitive);
}

impl<B: Backend> Backend for Full<B> {
    burn_decorator::forward_device!(B);
    burn_decorator::forward_dtypes!(B);

    fn name(_device: &Self::Device) -> String {
        "full".into()
    }
}

fn same<T>(tensor: T) -> T {
    tensor
}

macro_rules! implement {
    ($trait:ident $($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<B: Backend> $trait<Self> for Full<B> {
            $(fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
                allocate(stringify!($op), stringify!($work));
                map_result!($ret B::$op($(map_operand!($kind $arg, same)),*), same)
            })*
        }
    };
}

burn_decorator::every_ops!(implement);

/// The bits of the parameters after three updates with AdamW.
fn train<B: AutodiffBackend, M: Model<B> + burn::module::AutodiffModule<B>>(
    every: u64,
) -> (Vec<Vec<u8>>, u64) {
    let device = Default::default();
    let mut model = model::<B, M>();
    let mut optimizer = AdamWConfig::new().init::<B, M>();
    B::seed(&device, 8);
    failing(every, || {
        for _ in 0..3 {
            let grads = model.loss(&Bare, &device).backward();
            let grads = GradientsParams::from_grads(grads, &model);
            model = optimizer.step(1e-2, model.clone(), grads);
        }
        EVERY.set(u64::MAX);
        parameters::<B, M>(&model)
    })
}

type Plain = Autodiff<Flex>;
type Retried = Autodiff<Remat<Full<Flex>>>;

fn same_bits<P, R>()
where
    P: Model<Plain> + burn::module::AutodiffModule<Plain>,
    R: Model<Retried> + burn::module::AutodiffModule<Retried>,
{
    let _one = generator();
    let (plain, _) = train::<Plain, P>(u64::MAX);
    for every in [5, 17, 64] {
        RematStats::reset_thread();
        let _budget = MemoryBudget::bytes(1 << 40).retrying().install_apart();
        let (retried, failures) = train::<Retried, R>(every);
        assert_eq!(plain, retried, "every {every}th allocation fails");
        assert!(failures > 3, "{failures}");
        assert!(RematStats::of_thread().replayed_operations > 0);
    }
}

#[test]
fn an_mlp_with_dropout() {
    same_bits::<Mlp<Plain>, Mlp<Retried>>();
}

#[test]
fn a_transformer() {
    same_bits::<Transformer<Plain>, Transformer<Retried>>();
}

#[test]
fn convolutions() {
    same_bits::<Cnn<Plain>, Cnn<Retried>>();
}

/// The first operation of a thread under a budget may be a view, which makes no room.
#[test]
fn a_view_first() {
    let _one = generator();
    let x = Tensor::<Retried, 1, Int>::arange(0..6, &Default::default()).float();
    let _budget = MemoryBudget::bytes(1 << 40).retrying().install_apart();
    assert_eq!(x.reshape([2, 3]).dims(), [2, 3]);
}

/// Where all allocations fail it ends with the backend's panic, and so does a failure under a
/// budget that is not to try again.
#[test]
fn what_never_succeeds_ends() {
    let _one = generator();
    for (budget, every) in [
        (MemoryBudget::bytes(1 << 40).retrying(), 1),
        (MemoryBudget::bytes(1 << 40), 20),
    ] {
        let _budget = budget.install_apart();
        let run = || train::<Retried, Mlp<Retried>>(every);
        let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("no memory");
        let text = panic.downcast_ref::<String>().expect("a message");
        assert!(text.starts_with("out of memory in "), "{text}");
    }
}
