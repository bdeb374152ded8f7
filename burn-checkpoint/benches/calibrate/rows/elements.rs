//! Operations whose results have the shape of an operand, and reductions. Broadcast ones are those
//! of softmax, of layer norm and of biases, which over autodiff arrive one by one.

use burn::nn::LayerNormConfig;
use burn::tensor::{Tensor, activation};
use burn_flex::Flex;

use super::random;
use crate::samples::Rows;

type T = Tensor<Flex, 2>;

pub fn add(rows: &mut Rows, [n, d]: [usize; 2]) {
    let (x, y) = (random([n, d]), random([n, d]));
    let (row, column) = (random([1, d]), random([n, 1]));

    rows.two("float_add", (&x, &y), |x, y| x + y);
    rows.two("float_mul", (&x, &y), |x, y| x * y);
    rows.two("float_div", (&x, &y), |x, y| x / y);
    rows.two("float_add", (&x, &row), |x, row| x + row);
    rows.two("float_mul", (&x, &row), |x, row| x * row);
    rows.two("float_sub", (&x, &column), |x, column| x - column);
    rows.two("float_div", (&x, &column), |x, column| x / column);
    rows.one("float_add_scalar", &x, |x| x + 1.0);
    rows.one("float_mul_scalar", &x, |x| x * 2.0);
    rows.one("float_div_scalar", &x, |x| x / 3.0);
    rows.one("float_neg", &x, T::neg);
    rows.one("float_abs", &x, T::abs);
    rows.one("float_sqrt", &x, T::sqrt);
    rows.one("float_recip", &x, T::recip);
    rows.one("float_clamp", &x, |x| x.clamp(0.2, 0.7));
    rows.one("float_sign", &x, T::sign);
    rows.one("float_round", &x, T::round);
    rows.one("relu", &x, activation::relu);
    rows.one("leaky_relu", &x, |x| activation::leaky_relu(x, 0.01));
    rows.one("hard_sigmoid", &x, |x| {
        activation::hard_sigmoid(x, 0.2, 0.5)
    });
    rows.one("float_greater_elem", &x, |x| x.greater_elem(0.5));
    rows.two("float_greater", (&x, &y), |x, y| x.greater(y));
    rows.one("float_is_nan", &x, T::is_nan);
    rows.one("float_into_int", &x, T::int);
    rows.one("float_cast", &x, |x| x.cast(burn::tensor::DType::F16));

    let mask = x.clone().greater_elem(0.5);
    rows.two("float_mask_fill", (&x, &mask), |x, mask| {
        x.mask_fill(mask, f32::NEG_INFINITY)
    });
    rows.three("float_mask_where", (&x, &mask, &y), |x, mask, y| {
        x.mask_where(mask, y)
    });
    rows.one("bool_not", &mask, |mask| mask.bool_not());
    rows.two("bool_and", (&mask, &mask), |a, b| a.bool_and(b));
    rows.one("bool_into_float", &mask, |mask| mask.float());
    let (i, j) = (x.clone().int(), y.clone().int());
    rows.two("int_add", (&i, &j), |i, j| i + j);
    rows.one("int_equal_elem", &i, |i| i.equal_elem(1));
    rows.one("int_into_float", &i, |i| i.float());

    rows.one("float_exp", &x, T::exp);
    rows.one("float_log", &x, T::log);
    rows.one("float_log1p", &x, T::log1p);
    rows.one("float_tanh", &x, T::tanh);
    rows.one("float_erf", &x, T::erf);
    rows.one("float_sin", &x, T::sin);
    rows.one("float_cos", &x, T::cos);
    rows.one("float_atan", &x, T::atan);
    rows.one("float_powf_scalar", &x, |x| x.powf_scalar(1.7));
    rows.one("float_powi_scalar", &x, |x| x.powi_scalar(2));
    rows.two("float_powf", (&x, &y), |x, y| x.powf(y));
    rows.one("float_remainder_scalar", &x, |x| x.remainder_scalar(0.3));
    rows.one("sigmoid", &x, activation::sigmoid);
    rows.one("log_sigmoid", &x, activation::log_sigmoid);
    rows.one("gelu", &x, activation::gelu);

    rows.one("softmax", &x, |x| activation::softmax(x, 1));
    rows.one("log_softmax", &x, |x| activation::log_softmax(x, 1));
    let norm = LayerNormConfig::new(d).init::<Flex>(&Default::default());
    rows.two("layer_norm", (&x, &norm.gamma.val()), move |x, _| {
        norm.forward(x)
    });

    rows.one("float_sum", &x, T::sum);
    rows.one("float_sum_dim", &x, |x| x.sum_dim(1));
    rows.one("float_sum_dim", &x, |x| x.sum_dim(0));
    rows.one("float_mean_dim", &x, |x| x.mean_dim(1));
    rows.one("float_mean", &x, T::mean);
    rows.one("float_max_dim", &x, |x| x.max_dim(1));
    rows.one("float_max_dim", &x, |x| x.max_dim(0));
    rows.one("float_max", &x, T::max);
    rows.one("float_argmax", &x, |x| x.argmax(1));
    rows.one("float_prod_dim", &x, |x| x.prod_dim(1));
    rows.one("float_cumsum", &x, |x| x.cumsum(1));
    rows.one("float_any", &x, |x| x.any());
    rows.one("int_sum_dim", &i, |i| i.sum_dim(1));
}
