//! Law: an operation leaves its operands as they were, also those that share memory with another
//! tensor, and rounds the same whether it writes into an operand or not. The decorators keep
//! tensors on the strength of it.

use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, IndexingUpdateOp, Int, Tensor};
use burn_amp::CastCache;
use burn_checkpoint::Remat;
use tests::compare::{bits, values};

type Function<B> = (&'static str, fn(Tensor<B, 2>) -> Tensor<B, 2>);

/// May share memory with their operand.
fn views<B: Backend>() -> [Function<B>; 9] {
    [
        ("itself", |x| x),
        ("transpose", |x| x.transpose()),
        ("swap_dims", |x| x.swap_dims(0, 1)),
        ("permute", |x| x.permute([1, 0])),
        ("reshape", |x| x.reshape([9, 4])),
        ("slice", |x| x.slice([0..3, 0..4])),
        ("slice within", |x| x.slice([2..5, 1..3])),
        ("unfold", |x| x.unfold::<3, _>(1, 6, 1).reshape([6, 6])),
        ("transposed slice", |x| {
            x.slice([0..3, 0..4]).transpose().reshape([6, 2])
        }),
    ]
}

/// May write into an operand that nothing else holds.
fn writes<B: Backend>() -> [Function<B>; 8] {
    [
        ("exp", |x| x.exp()),
        ("add_scalar", |x| x + 1.0),
        ("add", |x| {
            let [rows, columns] = x.dims();
            x + Tensor::ones([rows, columns], &Default::default())
        }),
        ("sub", |x| {
            let [rows, columns] = x.dims();
            Tensor::ones([rows, columns], &Default::default()) - x
        }),
        ("mask_fill", |x| {
            let mask = Tensor::<B, 2, Bool>::full(x.dims(), true, &Default::default());
            x.mask_fill(mask, -1.0)
        }),
        ("slice_assign", |x| {
            let first = Tensor::full([1, 2], -1.0, &Default::default());
            x.slice_assign([0..1, 0..2], first)
        }),
        ("select_assign", |x| {
            let columns = x.dims()[1];
            let first = Tensor::<B, 1, Int>::from_ints([0], &Default::default());
            let ones = Tensor::ones([1, columns], &Default::default());
            x.select_assign(0, first, ones, IndexingUpdateOp::Add)
        }),
        ("scatter_nd", |x| {
            let first = Tensor::<B, 2, Int>::from_ints([[0, 0]], &Default::default());
            let value = Tensor::<B, 1>::full([1], -1.0, &Default::default());
            x.scatter_nd(first, value, IndexingUpdateOp::Assign)
        }),
    ]
}

fn keeps<B: Backend>() {
    let count = Tensor::<B, 1, Int>::arange(1..37, &Default::default());
    let x = count.float().reshape([6, 6]);
    let before = values(x.clone());
    for (view, shared) in views() {
        for (write, change) in writes() {
            let changed = values(change(shared(x.clone())));
            assert_ne!(changed, values(shared(x.clone())), "{write} does something");
            assert_eq!(values(x.clone()), before, "{write} of {view}");
        }
    }
}

/// With a number that no low type has.
fn scalar_operations<B: Backend>() -> [Function<B>; 6] {
    const NUMBER: f64 = 1.0 / 0.9;
    [
        ("add_scalar", |x| x + NUMBER),
        ("sub_scalar", |x| x - NUMBER),
        ("mul_scalar", |x| x * NUMBER),
        ("div_scalar", |x| x / NUMBER),
        ("powf_scalar", |x| x.powf_scalar(NUMBER)),
        ("clamp", |x| x.clamp(NUMBER, 2.0 * NUMBER)),
    ]
}

/// An operation rounds the same whether it writes into its operand or not.
fn are_rounded_the_same_in_place<I: Backend>() {
    let device = I::Device::default();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        if !I::supports_dtype(&device, dtype) {
            continue;
        }
        let x = || {
            let count = Tensor::<I, 1, Int>::arange(1..37, &device);
            (count.float().reshape([6, 6]) / 7.0).cast(dtype)
        };
        for (name, change) in scalar_operations() {
            let held = x();
            let elsewhere = bits(change(held.clone()));
            assert_eq!(bits(change(x())), elsewhere, "{name} of {dtype:?}");
            drop(held);
        }
    }
}

fn are_not_changed<I: Backend>() {
    keeps::<I>();
    keeps::<Remat<I>>();
    keeps::<CastCache<I>>();
}

tests::on_every_backend!(are_not_changed, are_rounded_the_same_in_place);
