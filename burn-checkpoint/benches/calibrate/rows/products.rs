//! Products, by the number of their multiplications and by how often an element is used.

use burn::tensor::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConvOptions,
};
use burn::tensor::{Tensor, module};
use burn_flex::Flex;

use super::random;
use crate::samples::Rows;

pub fn add(rows: &mut Rows) {
    for [m, k, n] in [
        [16, 16, 16],
        [64, 64, 64],
        [256, 256, 256],
        [1024, 1024, 1024],
        [1024, 128, 512],
        [4096, 64, 64],
        [64, 1024, 64],
        [1, 1024, 1024],
        [1024, 1024, 1],
    ] {
        matmul(rows, [1, m, k, n]);
    }
    heads(rows, [4, 64, 32]);
    heads(rows, [32, 256, 64]);
    linear(rows, [64, 64, 64]);
    linear(rows, [1024, 128, 512]);
    linear(rows, [1024, 1024, 256]);
    convolutions(rows);
}

fn matmul(rows: &mut Rows, [batch, m, k, n]: [usize; 4]) {
    let (x, y) = (random([batch, m, k]), random([batch, k, n]));
    rows.product("float_matmul", batch * m * k * n, (&x, &y), |x, y| {
        x.matmul(y)
    });
}

/// The two products of attention, and its fused form: so many heads, tokens, features.
fn heads(rows: &mut Rows, [heads, tokens, features]: [usize; 3]) {
    let work = heads * tokens * tokens * features;
    let query = random([1, heads, tokens, features]);
    let keys = query.clone().swap_dims(2, 3);
    let scores = random([1, heads, tokens, tokens]);
    rows.product("float_matmul", work, (&query, &keys), |query, keys| {
        query.matmul(keys)
    });
    rows.product("float_matmul", work, (&scores, &query), |scores, values| {
        scores.matmul(values)
    });
    rows.product("attention", 2 * work, (&query, &query), |query, keys| {
        let values = keys.clone();
        module::attention(
            query,
            keys,
            values,
            None,
            None,
            AttentionModuleOptions::default(),
        )
    });
}

fn linear(rows: &mut Rows, [tokens, inputs, outputs]: [usize; 3]) {
    let (x, weight) = (random([1, tokens, inputs]), random([inputs, outputs]));
    let bias = random([outputs]);
    rows.product(
        "linear",
        tokens * inputs * outputs,
        (&x, &weight),
        move |x, weight| module::linear(x, weight, Some(bias.clone())),
    );
}

fn convolutions(rows: &mut Rows) {
    // Batch, channels, their size, channels of the result, kernel, groups.
    for (batch, channels, side, outputs, kernel, groups) in [
        (1, 8, 8, 8, 3, 1),
        (2, 64, 32, 64, 3, 1),
        (4, 3, 64, 32, 7, 1),
        (2, 128, 32, 128, 1, 1),
        (2, 64, 32, 64, 3, 64),
    ] {
        let x = random([batch, channels, side, side]);
        let weight = random([outputs, channels / groups, kernel, kernel]);
        let work = batch * side * side * weight.shape().num_elements();
        let pad = kernel / 2;
        rows.product("conv2d", work, (&x, &weight), move |x, weight| {
            let options = ConvOptions::new([1, 1], [pad, pad], [1, 1], groups);
            module::conv2d(x, weight, None, options)
        });
    }
    let (x, weight) = (random([2, 64, 1024]), random([64, 64, 3]));
    rows.product(
        "conv1d",
        2 * 1024 * 64 * 64 * 3,
        (&x, &weight),
        |x, weight| module::conv1d(x, weight, None, ConvOptions::new([1], [1], [1], 1)),
    );
    let (x, weight) = (random([1, 16, 16, 16, 16]), random([16, 16, 3, 3, 3]));
    rows.product(
        "conv3d",
        16 * 16 * 16 * 16 * 16 * 27,
        (&x, &weight),
        |x, weight| module::conv3d(x, weight, None, ConvOptions::new([1; 3], [1; 3], [1; 3], 1)),
    );
    let (x, weight) = (random([2, 64, 16, 16]), random([64, 32, 2, 2]));
    rows.product(
        "conv_transpose2d",
        2 * 64 * 16 * 16 * 32 * 4,
        (&x, &weight),
        |x, weight| {
            let options = ConvTransposeOptions::new([2, 2], [0, 0], [0, 0], [1, 1], 1);
            module::conv_transpose2d(x, weight, None, options)
        },
    );
    let (x, offset) = (random([1, 16, 16, 16]), random([1, 18, 16, 16]));
    let weight: Tensor<Flex, 4> = random([16, 16, 3, 3]);
    rows.three(
        "deform_conv2d",
        (&x, &offset, &weight),
        |x, offset, weight| {
            let options = DeformConvOptions::new([1, 1], [1, 1], [1, 1], 1, 1);
            module::deform_conv2d(x, offset, weight, None, None, options)
        },
    );
    let (i, j) = (random([128, 128]).int(), random([128, 128]).int());
    rows.product("int_matmul", 128 * 128 * 128, (&i, &j), |i, j| i.matmul(j));
}
