//! What the law runs: every operation with float operands, and what burn-tensor and burn-nn compose
//! of them. The functions and names are those of `golden/numerics.py`.

use burn::module::Param;
use burn::nn::loss::{
    BinaryCrossEntropyLossConfig, CTCLossConfig, CosineEmbeddingLossConfig, CrossEntropyLossConfig,
    HuberLossConfig, KLDivLossConfig, LpLossConfig, MseLoss, PoissonNllLossConfig, RNNTLossConfig,
    Reduction, SmoothL1LossConfig,
};
use burn::nn::{
    BatchNormConfig, GroupNormConfig, InstanceNormConfig, LayerNormConfig, LocalResponseNormConfig,
    RmsNormConfig,
};
use burn::tensor::backend::Backend;
use burn::tensor::linalg::{
    self, cosine_similarity, l1_norm, l2_norm, lp_norm, max_abs_norm, min_abs_norm,
    vector_normalize,
};
use burn::tensor::module::{
    adaptive_avg_pool1d, adaptive_avg_pool2d, attention, avg_pool1d, avg_pool2d, conv_transpose1d,
    conv_transpose2d, conv_transpose3d, conv1d, conv2d, conv3d, embedding, interpolate, linear,
    max_pool1d, max_pool2d, unfold4d,
};
use burn::tensor::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, GridSampleOptions, InterpolateMode,
    InterpolateOptions, UnfoldOptions,
};
use burn::tensor::{Bool, IndexingUpdateOp, Int, Tensor, activation};

/// A case of the reference.
pub struct Case<B: Backend> {
    /// As in the reference.
    pub name: &'static str,
    /// The rows of the table that it runs, without `float_`.
    pub rows: &'static str,
    /// The results, of operands in the low type.
    pub run: fn(&[Tensor<B, 2>]) -> Tensor<B, 1>,
}

/// `name "rows of the table" |operands| result;`
macro_rules! cases {
    ($($name:literal $rows:literal |$($x:ident),+| $result:expr;)*) => {
        vec![$(Case {
            name: $name,
            rows: $rows,
            run: |operands| {
                let [$($x),+] = operands else { panic!("operands of {}", $name) };
                $(let $x = $x.clone();)+
                flat($result)
            },
        }),*]
    };
}

fn flat<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, 1> {
    let elements = x.shape().num_elements();
    x.reshape([elements])
}

/// Times 1, 2, 3, .. along the last dimension: the gradient of the sum of a softmax would be zero.
fn weighted<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let columns = x.dims()[D - 1];
    let weights = Tensor::<B, 1, Int>::arange(1..columns as i64 + 1, &x.device()).float();
    let mut shape = [1; D];
    shape[D - 1] = columns;
    x * weights.reshape(shape)
}

fn ints<B: Backend, const D: usize>(
    x: &Tensor<B, 2>,
    values: &[i64],
    shape: [usize; D],
) -> Tensor<B, D, Int> {
    Tensor::<B, 1, Int>::from_ints(values, &x.device()).reshape(shape)
}

/// The values of a column, once for each row.
fn in_every_row<B: Backend>(x: &Tensor<B, 2>, values: &[i64]) -> Tensor<B, 2, Int> {
    ints(x, values, [1, values.len()]).repeat_dim(0, x.dims()[0])
}

/// Two channels of three elements for each row.
fn channels<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 3> {
    let rows = x.dims()[0];
    x.reshape([rows, 2, 3])
}

fn image<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 4> {
    let [rows, columns] = x.dims();
    x.reshape([1, 1, rows, columns])
}

fn corner<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 4> {
    image(x.slice([0..2, 0..2]))
}

fn volume<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 5> {
    x.reshape([1, 1, 2, 2, 4])
}

fn cube<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 5> {
    x.slice([0..2, 0..4]).reshape([1, 1, 2, 2, 2])
}

/// One matrix.
fn first_rows_and_columns<B: Backend>(x: Tensor<B, 2>, size: usize) -> Tensor<B, 3> {
    x.slice([0..size, 0..size]).unsqueeze()
}

fn numbers_of<B: Backend>(mask: Tensor<B, 2, Bool>, x: &Tensor<B, 2>) -> Tensor<B, 2> {
    // Keeps a node of the operand, whose gradient is zero.
    mask.float() + x.clone().detach() * 0.0
}

/// Every case.
pub fn cases<B: Backend>() -> Vec<Case<B>> {
    [
        elementwise(),
        numbers(),
        several(),
        reductions(),
        moves(),
        activations(),
        losses(),
        norms(),
        modules(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn elementwise<B: Backend>() -> Vec<Case<B>> {
    cases! {
        "neg" "neg" |x| x.neg();
        "abs" "abs" |x| x.abs();
        "sign" "sign" |x| x.sign();
        "sqrt" "sqrt" |x| x.sqrt();
        "cos" "cos" |x| x.cos();
        "sin" "sin" |x| x.sin();
        "tanh" "tanh" |x| x.tanh();
        "erf" "erf" |x| x.erf();
        "asinh" "asinh" |x| x.asinh();
        "acosh" "acosh" |x| x.acosh();
        "atan" "atan" |x| x.atan();
        "atanh" "atanh" |x| x.atanh();
        "round" "round" |x| x.round();
        "floor" "floor" |x| x.floor();
        "ceil" "ceil" |x| x.ceil();
        "trunc" "trunc" |x| x.trunc();
        "exp" "exp" |x| x.exp();
        "log" "log" |x| x.log();
        "log1p" "log1p" |x| x.log1p();
        "recip" "recip" |x| x.recip();
        "tan" "tan" |x| x.tan();
        "cosh" "cosh" |x| x.cosh();
        "sinh" "sinh" |x| x.sinh();
        "acos" "acos" |x| x.acos();
        "asin" "asin" |x| x.asin();
        "square" "powi_scalar" |x| x.square();
        "powi_scalar_3" "powi_scalar powi_scalar_impl" |x| x.powi_scalar(3);
        "powi_scalar_minus_2" "powi_scalar" |x| x.powi_scalar(-2);
        "powf_scalar_2.5" "powf_scalar powf_scalar_impl" |x| x.powf_scalar(2.5);
        "powf_scalar_minus_1.5" "powf_scalar powf_scalar_impl" |x| x.powf_scalar(-1.5);
        "powf_scalar_0.1" "powf_scalar powf_scalar_impl" |x| x.powf_scalar(0.1);
        "powf_scalar_minus_0.5" "powf_scalar powf_scalar_impl" |x| x.powf_scalar(-0.5);
    }
}

fn numbers<B: Backend>() -> Vec<Case<B>> {
    cases! {
        "mul_scalar_2e-8" "mul_scalar" |x| x * 2e-8;
        "mul_scalar_0.1" "mul_scalar" |x| x * 0.1;
        "mul_scalar_1e6" "mul_scalar" |x| x * 1e6;
        "mul_scalar_half" "mul_scalar" |x| x * 0.5;
        "div_scalar_1048576" "div_scalar" |x| x / 1048576;
        "div_scalar_3" "div_scalar" |x| x / 3;
        "div_scalar_1e-8" "div_scalar" |x| x / 1e-8;
        "add_scalar_1e-9" "add_scalar" |x| x + 1e-9;
        "add_scalar_0.1" "add_scalar" |x| x + 0.1;
        "sub_scalar_100000" "sub_scalar" |x| x - 100000.0;
        "sub_scalar_0.1" "sub_scalar" |x| x - 0.1;
        "rsub_scalar" "neg add_scalar" |x| x.neg() + 0.1;
        "clamp" "clamp" |x| x.clamp(-0.1, 60000.0);
        "clamp_min" "clamp_min" |x| x.clamp_min(1e-9);
        "clamp_max" "clamp_max" |x| x.clamp_max(0.1);
        "remainder_scalar" "remainder_scalar" |x| x.remainder_scalar(0.1);
        "greater_elem" "greater_elem" |x| numbers_of(x.clone().greater_elem(1e-9), &x);
        "lower_elem" "lower_elem" |x| numbers_of(x.clone().lower_elem(0.3000001), &x);
        "greater_equal_elem" "greater_equal_elem" |x| numbers_of(x.clone().greater_equal_elem(0.29998), &x);
        "lower_equal_elem" "lower_equal_elem" |x| numbers_of(x.clone().lower_equal_elem(-100000.0), &x);
        "equal_elem" "equal_elem" |x| numbers_of(x.clone().equal_elem(0.3), &x);
        "not_equal_elem" "not_equal_elem" |x| numbers_of(x.clone().not_equal_elem(0.1), &x);
        "mask_fill" "mask_fill" |x| {
            let mask = x.clone().greater_elem(1);
            x.mask_fill(mask, 0.1)
        };
    }
}

fn several<B: Backend>() -> Vec<Case<B>> {
    cases! {
        "add" "add" |a, b| a + b;
        "sub" "sub" |a, b| a - b;
        "mul" "mul" |a, b| a * b;
        "div" "div" |a, b| a / b;
        "atan2" "atan2" |a, b| a.atan2(b);
        "max_pair" "mask_where greater lower" |a, b| a.max_pair(b);
        "min_pair" "mask_where greater lower" |a, b| a.min_pair(b);
        "mask_where" "mask_where greater" |a, b| {
            let mask = a.clone().greater(b.clone());
            b.mask_where(mask, a)
        };
        "comparisons" "equal not_equal greater greater_equal lower lower_equal" |a, b| {
            let number = |mask: Tensor<B, 2, Bool>, factor: f64| mask.float() * factor;
            let [a0, b0] = [&a, &b].map(|x| x.clone().detach());
            number(a0.clone().equal(b0.clone()), 1.0) + number(a0.clone().not_equal(b0.clone()), 2.0)
                + number(a0.clone().greater(b0.clone()), 4.0) + number(a0.clone().greater_equal(b0.clone()), 8.0)
                + number(a0.clone().lower(b0.clone()), 16.0) + number(a0.lower_equal(b0), 32.0)
        };
        "powf" "powf" |a, b| a.powf(b);
        "remainder" "remainder" |a, b| a.remainder(b.flip([1]));
        "cross" "cross" |a, b| a.slice_dim(1, 0..3).cross(b.slice_dim(1, 0..3), 1);
        "cross_of_other_scales" "cross" |a, b| a.slice_dim(1, 0..3).cross(b.slice_dim(1, 0..3), 1);
        "add_broadcast" "add expand" |a, b| a.slice_dim(1, 0..4) + b.slice_dim(0, 0..1);
        "mul_broadcast" "mul expand" |a, b| a.slice_dim(1, 0..4) * b.slice_dim(0, 0..1);
        "div_broadcast" "div expand" |a, b| a.slice_dim(1, 0..4) / b.slice_dim(0, 0..1);
        "bias_of_4096" "add" |a, b| a.transpose() + b.slice([0..1, 0..1]);
        "hypot" "powi_scalar add sqrt" |a, b| (a.square() + b.square()).sqrt();
    }
}

fn reductions<B: Backend>() -> Vec<Case<B>> {
    cases! {
        "sum" "sum" |x| x.sum();
        "sum_dim" "sum_dim" |x| x.sum_dim(1);
        "mean" "mean" |x| x.mean();
        "mean_dim" "mean_dim" |x| x.mean_dim(1);
        "mean_of_4096" "mean" |x| x.mean();
        "prod" "prod" |x| x.prod();
        "prod_dim" "prod_dim" |x| x.prod_dim(1);
        "cumsum" "cumsum" |x| x.cumsum(1);
        "cumprod" "cumprod" |x| x.cumprod(1);
        "cummax" "cummax" |x| x.cummax(1);
        "cummin" "cummin" |x| x.cummin(1);
        "max" "max" |x| x.max();
        "min" "min" |x| x.min();
        "max_dim" "max_dim max_dim_with_indices" |x| x.max_dim_with_indices(1).0;
        "min_dim" "min_dim min_dim_with_indices" |x| x.min_dim_with_indices(1).0;
        "max_abs" "max_abs" |x| x.max_abs();
        "max_abs_dim" "max_abs_dim" |x| x.max_abs_dim(1);
        "sort" "sort sort_with_indices" |x| weighted(x.sort(1));
        "topk" "sort_with_indices" |x| weighted(x.topk_with_indices(3, 1).0);
        "var" "mean_dim sub powi_scalar" |x| x.var(1);
        "std" "mean_dim sub powi_scalar sqrt" |x| x.var(1).sqrt();
    }
}

fn moves<B: Backend>() -> Vec<Case<B>> {
    cases! {
        "slice" "slice" |x| x.slice_dim(1, 1..3);
        "flip" "flip" |x| x.flip([1]);
        "permute" "permute" |x| x.permute([1, 0]);
        "swap_dims" "swap_dims reshape" |x| x.swap_dims(0, 1);
        "gather_nd" "gather_nd" |x| {
            let indices = ints(&x, &[1, 1, 0], [3, 1]);
            x.gather_nd::<2, 2>(indices)
        };
        "scatter_nd" "scatter_nd" |a, b| {
            let indices = ints(&a, &[0, 2], [2, 1]);
            a.scatter_nd(indices, b.slice_dim(0, 0..2), IndexingUpdateOp::Add)
        };
        "gather" "gather" |x| {
            let indices = in_every_row(&x, &[0, 2, 2]);
            x.gather(1, indices)
        };
        "select" "select" |x| {
            let indices = ints(&x, &[3, 0, 3], [3]);
            x.select(1, indices)
        };
        "repeat" "repeat_dim" |x| x.repeat_dim(1, 3);
        "expand" "expand" |x| x.slice_dim(0, 0..1).expand([2048, 4]);
        "cat" "cat" |a, b| Tensor::cat(vec![a, b], 1);
        "scatter_add" "scatter_add" |a, b| {
            let indices = in_every_row(&a, &[0, 1, 1, 1, 2, 5]);
            a.scatter(1, indices, b, IndexingUpdateOp::Add)
        };
        "select_add" "select_add" |a, b| {
            let indices = ints(&a, &[0, 1, 2, 3, 4, 4], [6]);
            a.select_assign(1, indices, b, IndexingUpdateOp::Add)
        };
        "slice_assign" "slice_assign" |a, b| {
            let rows = a.dims()[0];
            a.slice_assign([0..rows, 0..2], b.slice_dim(1, 0..2))
        };
        "unfold" "unfold" |x| x.unfold::<3, _>(1, 3, 1);
    }
}

fn activations<B: Backend>() -> Vec<Case<B>> {
    cases! {
        "relu" "relu" |x| activation::relu(x);
        "leaky_relu" "leaky_relu" |x| activation::leaky_relu(x, 0.01);
        "gelu" "gelu" |x| activation::gelu(x);
        "gelu_approximate" "" |x| activation::gelu_approximate(x);
        "sigmoid" "sigmoid" |x| activation::sigmoid(x);
        "hard_sigmoid" "hard_sigmoid" |x| activation::hard_sigmoid(x, 1.0 / 6.0, 0.5);
        "log_sigmoid" "log_sigmoid" |x| activation::log_sigmoid(x);
        "silu" "" |x| activation::silu(x);
        "mish" "" |x| activation::mish(x);
        "softplus" "" |x| activation::softplus(x, 1.0);
        "softplus_beta" "" |x| activation::softplus(x, 0.3);
        "hard_swish" "" |x| activation::hard_swish(x);
        "elu" "" |x| activation::elu(x, 1.0);
        "celu" "" |x| activation::celu(x, 0.7);
        "selu" "" |x| activation::selu(x);
        "softsign" "" |x| activation::softsign(x);
        "hard_shrink" "" |x| activation::hard_shrink(x, 0.1);
        "soft_shrink" "" |x| activation::soft_shrink(x, 0.1);
        "thresholded_relu" "" |x| activation::thresholded_relu(x, 0.1);
        "prelu" "prelu" |x| {
            let alpha = Tensor::from_floats([0.25], &x.device());
            activation::prelu(x, alpha)
        };
        "glu" "" |a, b| activation::glu(Tensor::cat(vec![a, b], 0), 0);
        "softmax" "softmax" |x| weighted(activation::softmax(x, 1));
        "log_softmax" "log_softmax" |x| weighted(activation::log_softmax(x, 1));
        "softmin" "softmin" |x| weighted(activation::softmin(x, 1));
        "quiet_softmax" "" |x| weighted(activation::quiet_softmax(x, 1));
    }
}

fn losses<B: Backend>() -> Vec<Case<B>> {
    cases! {
        "huber" "" |a, b| HuberLossConfig::new(1.0).init().forward_no_reduction(a, b);
        "huber_delta" "" |a, b| HuberLossConfig::new(300.0).init().forward_no_reduction(a, b);
        "smooth_l1" "" |a, b| SmoothL1LossConfig::new().init().forward(a, b);
        "smooth_l1_beta" "" |a, b| SmoothL1LossConfig::new().with_beta(0.3).init().forward(a, b);
        "mse" "" |a, b| MseLoss::new().forward_no_reduction(a, b);
        "lp_loss_1" "" |a, b| LpLossConfig::new(1.0).init().forward(a, b, Reduction::Sum);
        "lp_loss_2" "" |a, b| LpLossConfig::new(2.0).init().forward(a, b, Reduction::Sum) / 1e3;
        "lp_loss_3" "" |a, b| LpLossConfig::new(3.0).init().forward_no_reduction(a, b);
        "bce" "" |p| {
            let targets = ints(&p, &[0, 1, 0, 1, 0, 1, 0, 1, 1], [1, 9]);
            BinaryCrossEntropyLossConfig::new().init(&p.device()).forward(p, targets) * 9
        };
        "bce_with_logits" "" |x, t| {
            let count = x.dims()[1] as f32;
            BinaryCrossEntropyLossConfig::new().with_logits(true).init(&x.device()).forward(x, t.int()) * count
        };
        "bce_of_sigmoid" "" |x, t| {
            let count = x.dims()[1] as f32;
            BinaryCrossEntropyLossConfig::new().init(&x.device()).forward(activation::sigmoid(x), t.int()) * count
        };
        "kl_div" "" |x, t| KLDivLossConfig::new().init().forward_no_reduction(x, t.detach());
        "kl_div_log" "" |x, t| KLDivLossConfig::new().with_log_target(true).init().forward_no_reduction(x, t.flip([1]).detach());
        "poisson" "" |x, t| PoissonNllLossConfig::new().init().forward_no_reduction(x, t.detach());
        "poisson_full" "" |x, t| {
            PoissonNllLossConfig::new().with_log_input(false).with_full(true).init().forward_no_reduction(x, t.detach())
        };
        "cross_entropy" "" |x| {
            let rows = x.dims()[0];
            let targets: Vec<i64> = (0..rows as i64).map(|row| row % 6).collect();
            let targets = ints(&x, &targets, [rows]);
            CrossEntropyLossConfig::new().init(&x.device()).forward(x, targets) * rows as f32
        };
        "ctc" "ctc_loss" |x| {
            let targets = ints(&x, &[1, 2], [1, 2]);
            let [steps, labels] = [4, 2].map(|length| ints(&x, &[length], [1]));
            CTCLossConfig::new().init().forward(activation::log_softmax(x, 1).reshape([4, 1, 4]), targets, steps, labels)
        };
        "rnnt" "" |x| {
            let targets = ints(&x, &[2], [1, 1]);
            let [frames, labels] = [2, 1].map(|length| ints(&x, &[length], [1]));
            RNNTLossConfig::new().init().forward(x.reshape([1, 2, 2, 4]), targets, frames, labels)
        };
        "cosine_embedding" "" |a, b| {
            let rows = a.dims()[0];
            let signs: Vec<i64> = (0..rows).map(|row| if row % 2 == 1 { 1 } else { -1 }).collect();
            let signs = ints(&a, &signs, [rows]);
            CosineEmbeddingLossConfig::new().init().forward_no_reduction(a, b, signs)
        };
    }
}

fn norms<B: Backend>() -> Vec<Case<B>> {
    cases! {
        "l1_norm" "" |x| l1_norm(x, 1);
        "l2_norm" "" |x| l2_norm(x, 1);
        "lp_norm_3" "" |x| lp_norm(x, 3.0, 1);
        "lp_norm_4" "" |x| lp_norm(x, 4.0, 1);
        "l2_norm_of_tiny" "" |x| l2_norm(x, 1);
        "lp_norm_3_of_tiny" "" |x| lp_norm(x, 3.0, 1);
        "lp_norm_4_of_tiny" "" |x| lp_norm(x, 4.0, 1);
        "normalize_tiny" "" |x| weighted(vector_normalize(x, 2.0, 1, 1e-12));
        "max_abs_norm" "" |x| max_abs_norm(x, 1);
        "min_abs_norm" "" |x| min_abs_norm(x, 1);
        "vector_normalize" "" |x| weighted(vector_normalize(x, 2.0, 1, 1e-12));
        "cosine_similarity" "" |a, b| cosine_similarity(a, b, 1, None);
        "outer" "" |x| {
            let rows = |row| x.clone().slice_dim(0, row).reshape([4]);
            linalg::outer::<B, 1, 2, _>(rows(0..1), rows(1..2))
        };
        "dot" "matmul" |x| {
            let rows = |row| x.clone().slice_dim(0, row).reshape([4]);
            (rows(0..1) / 256).dot(rows(1..2))
        };
        "det_2" "" |x| linalg::det::<B, 3, 2, 1>(first_rows_and_columns(x, 2));
        "det_3" "" |x| linalg::det::<B, 3, 2, 1>(first_rows_and_columns(x, 3));
        "det_4" "" |x| linalg::det::<B, 3, 2, 1>(first_rows_and_columns(x, 4));
        "lu" "" |x| {
            let (_, lower, upper) = linalg::lu::<B, 2, 1>(x);
            weighted(Tensor::cat(vec![lower, upper], 0))
        };
        "trace" "" |x| linalg::trace::<B, 2, 1>(x);
        "rms_norm" "" |x| weighted(RmsNormConfig::new(6).init(&x.device()).forward(x));
        "layer_norm" "layer_norm" |x| weighted(LayerNormConfig::new(6).init(&x.device()).forward(x));
        "group_norm" "" |x| flat(weighted(GroupNormConfig::new(1, 2).init(&x.device()).forward(channels(x.clone())).reshape(x.dims())));
        "instance_norm" "" |x| {
            flat(weighted(InstanceNormConfig::new(2).init(&x.device()).forward(channels(x.clone())).reshape(x.dims())))
        };
        "local_response_norm" "" |x| {
            let norm = LocalResponseNormConfig::new(5).init();
            weighted(norm.forward(x.clone().unsqueeze_dim::<3>(2)).squeeze_dim::<2>(2))
        };
        "batch_norm" "" |x| {
            let mut norm = BatchNormConfig::new(6).init(&x.device());
            norm.beta = Param::from_tensor(Tensor::zeros([6], &x.device()));
            let y: Tensor<B, 2> = norm.forward(x);
            weighted(y.transpose()).transpose()
        };
    }
}

fn modules<B: Backend>() -> Vec<Case<B>> {
    cases! {
        "matmul" "matmul transpose" |a, b| a.matmul(b.transpose());
        "matmul_large" "matmul transpose" |a, b| a.matmul(b.transpose());
        "linear" "linear" |a, b| {
            let bias = b.clone().slice_dim(0, 0..1).reshape([4]);
            linear(a, b.transpose(), Some(bias))
        };
        "conv1d" "conv1d" |a, b| {
            let weight = b.slice([0..2, 0..3]).reshape([2, 1, 3]);
            conv1d(a.reshape([4, 1, 4]), weight, None, ConvOptions::new([1], [0], [1], 1)).slice_dim(1, 1..2)
        };
        "conv2d" "conv2d" |a, b| {
            conv2d(image(a), corner(b), None, ConvOptions::new([1, 1], [0, 0], [1, 1], 1))
        };
        "conv3d" "conv3d" |a, b| {
            conv3d(volume(a), cube(b), None, ConvOptions::new([1; 3], [0; 3], [1; 3], 1))
        };
        "conv_transpose1d" "conv_transpose1d" |a, b| {
            let weight = b.slice([0..1, 0..3]).reshape([1, 1, 3]);
            conv_transpose1d(a.reshape([4, 1, 4]), weight, None, ConvTransposeOptions::new([1], [0], [0], [1], 1))
        };
        "conv_transpose2d" "conv_transpose2d" |a, b| {
            conv_transpose2d(image(a), corner(b), None, ConvTransposeOptions::new([1; 2], [0; 2], [0; 2], [1; 2], 1))
        };
        "conv_transpose3d" "conv_transpose3d" |a, b| {
            conv_transpose3d(volume(a), cube(b), None, ConvTransposeOptions::new([1; 3], [0; 3], [0; 3], [1; 3], 1))
        };
        "avg_pool2d" "avg_pool2d" |x| avg_pool2d(image(x), [2, 2], [1, 1], [0, 0], true, false);
        "avg_pool1d" "avg_pool1d" |x| {
            let [rows, columns] = x.dims();
            avg_pool1d(x.reshape([1, rows, columns]), 2, 1, 0, true, false)
        };
        "adaptive_avg_pool1d" "adaptive_avg_pool1d" |x| {
            let [rows, columns] = x.dims();
            adaptive_avg_pool1d(x.reshape([1, rows, columns]), 3)
        };
        "adaptive_avg_pool2d" "adaptive_avg_pool2d" |x| adaptive_avg_pool2d(image(x), [3, 3]);
        "max_pool1d" "max_pool1d max_pool1d_with_indices" |x| {
            let [rows, columns] = x.dims();
            max_pool1d(x.reshape([1, rows, columns]), 2, 1, 0, 1, false)
        };
        "max_pool2d" "max_pool2d max_pool2d_with_indices" |x| {
            max_pool2d(image(x), [2, 2], [1, 1], [0, 0], [1, 1], false)
        };
        "interpolate" "interpolate" |x| {
            interpolate(image(x), [7, 7], InterpolateOptions::new(InterpolateMode::Bilinear))
        };
        "grid_sample_2d" "grid_sample_2d" |a, b| image(a).grid_sample_2d(b.reshape([1, 2, 4, 2]), GridSampleOptions::default());
        "unfold4d" "unfold4d" |x| unfold4d(image(x), [2, 2], UnfoldOptions::new([1, 1], [0, 0], [1, 1]));
        "attention" "attention" |q, k, v| {
            attention(image(q), image(k), image(v), None, None, AttentionModuleOptions::default())
        };
        "embedding" "embedding" |x| {
            let rows = ints(&x, &[0, 2, 2, 1], [1, 4]);
            embedding(x, rows)
        };
    }
}
