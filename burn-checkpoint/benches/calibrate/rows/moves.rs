//! Operations that move elements, and sorts.

use burn::tensor::ops::{InterpolateMode, InterpolateOptions, UnfoldOptions};
use burn::tensor::{Int, Tensor, module, s};
use burn_flex::Flex;

use super::random;
use crate::samples::Rows;

type T = Tensor<Flex, 2>;

pub fn add(rows: &mut Rows, [n, d]: [usize; 2]) {
    let device = Default::default();
    let x = random([n, d]);

    let halves = (random([n / 2, d]), random([n / 2, d]));
    rows.two("float_cat", (&halves.0, &halves.1), |a, b| {
        Tensor::cat(vec![a, b], 0)
    });
    let halves = (random([n, d / 2]), random([n, d / 2]));
    rows.two("float_cat", (&halves.0, &halves.1), |a, b| {
        Tensor::cat(vec![a, b], 1)
    });
    rows.one("float_repeat_dim", &halves.0, |x| x.repeat_dim(1, 2));
    rows.two("float_slice_assign", (&x, &halves.0), move |x, half| {
        x.slice_assign(s![.., 0..d / 2], half)
    });
    rows.one("float_transpose", &x, T::transpose);
    rows.one("float_slice", &x, move |x| x.slice(s![.., 0..d / 2]));
    rows.one("float_flip", &x, |x| x.flip([1]));
    rows.one("float_reshape", &x, move |x| x.reshape([n * d]));

    let order = Tensor::<Flex, 1, Int>::arange(0..n as i64, &device).flip([0]);
    rows.two("float_select", (&x, &order), |x, order| x.select(0, order));
    rows.three("float_select_add", (&x, &order, &x), |x, order, values| {
        x.select_assign(0, order, values, burn::tensor::IndexingUpdateOp::Add)
    });
    let columns = Tensor::<Flex, 1, Int>::arange(0..d as i64, &device)
        .flip([0])
        .unsqueeze::<2>()
        .repeat_dim(0, n);
    rows.two("float_gather", (&x, &columns), |x, columns| {
        x.gather(1, columns)
    });
    rows.three(
        "float_scatter_add",
        (&x, &columns, &x),
        |x, columns, values| x.scatter(1, columns, values, burn::tensor::IndexingUpdateOp::Add),
    );
    let tokens = order.unsqueeze::<2>();
    rows.two("embedding", (&x, &tokens), module::embedding);

    let images = random([n / 16, 16, 8, d / 8]);
    rows.one("max_pool2d", &images, |x| {
        module::max_pool2d(x, [2, 2], [2, 2], [0, 0], [1, 1], false)
    });
    rows.one("max_pool2d", &images, |x| {
        module::max_pool2d(x, [3, 3], [1, 1], [1, 1], [1, 1], false)
    });
    rows.one("avg_pool2d", &images, |x| {
        module::avg_pool2d(x, [2, 2], [2, 2], [0, 0], true, false)
    });
    rows.one("adaptive_avg_pool2d", &images, |x| {
        module::adaptive_avg_pool2d(x, [1, 1])
    });
    let (height, width) = (16, d / 4);
    rows.one("interpolate", &images, move |x| {
        let options = InterpolateOptions::new(InterpolateMode::Bilinear);
        module::interpolate(x, [height, width], options)
    });
    rows.one("unfold4d", &images, |x| {
        module::unfold4d(x, [3, 3], UnfoldOptions::new([1, 1], [1, 1], [1, 1]))
    });

    rows.one("float_sort", &x, |x| x.sort(1));
    rows.one("float_argsort", &x, |x| x.argsort(1));
    rows.one("float_topk", &x, |x| x.topk(4, 1));
    rows.one("rfft", &x, |x| burn::tensor::signal::rfft(x, 1, None).0);
}
