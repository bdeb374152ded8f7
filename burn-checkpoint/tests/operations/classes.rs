//! The work classes of operations by name.

use burn_checkpoint::{Work, op_table};

fn class(name: &str) -> Work {
    let op = op_table().find(|op| op.name == name);
    op.unwrap_or_else(|| panic!("no row {name}")).work
}

/// docs/operations.md is printed from the table, so it would repeat the table's errors.
#[test]
fn the_classes_are_what_they_say() {
    let sort = "float_sort float_argsort float_topk rfft irfft ctc_loss";
    let norm = "softmax log_softmax softmin layer_norm";
    let math = "float_exp float_log float_powf float_tanh float_erf float_sin gelu gelu_backward sigmoid float_remainder";
    let reduce = "float_sum float_sum_dim float_mean float_prod float_max_dim float_argmax float_cumsum float_any bool_all \
                      linear_bias_backward conv2d_bias_backward";
    let index = "float_gather float_select float_select_add float_scatter_add embedding embedding_backward max_pool2d \
                     max_pool2d_with_indices_backward avg_pool2d adaptive_avg_pool2d interpolate unfold4d";
    let cheap = "float_add float_mul_scalar float_div float_cat float_repeat_dim float_mask_fill float_mask_where float_equal \
                     float_greater_elem float_cast float_into_int int_into_float bool_not relu relu_backward float_slice_assign \
                     float_to_device quantize dequantize";
    let view = "float_reshape float_transpose float_swap_dims float_permute float_slice float_expand float_detach int_reshape \
                    bool_reshape";
    // What cannot be done again: these would come back as something else, or with another shape.
    let fixed = "float_random int_random float_from_data int_from_data bool_from_data float_empty bool_argwhere";
    let new = "float_zeros float_ones float_full int_zeros int_ones int_full int_arange int_arange_step bool_zeros bool_ones";
    let pass = "float_into_data int_into_data bool_into_data q_into_data float_device tr_execute";
    for (names, expected) in [
        (sort, Work::Sort),
        (norm, Work::Norm),
        (math, Work::Math),
        (reduce, Work::Reduce),
        (index, Work::Index),
        (cheap, Work::Cheap),
        (view, Work::View),
        (new, Work::New),
        (fixed, Work::Fixed),
        (pass, Work::Pass),
    ] {
        for name in names.split_whitespace() {
            assert_eq!(class(name), expected, "{name}");
        }
    }
}

/// What `Policy::KeepCompute` keeps: the products of PyTorch's selective activation checkpointing,
/// and no more, because the tape of a block is mostly the rest.
#[test]
fn compute_is_products() {
    let expected = "attention conv1d conv1d_weight_backward conv1d_x_backward conv2d conv2d_weight_backward conv2d_x_backward \
        conv3d conv3d_weight_backward conv3d_x_backward conv_transpose1d conv_transpose1d_weight_backward conv_transpose1d_x_backward \
        conv_transpose2d conv_transpose2d_weight_backward conv_transpose2d_x_backward conv_transpose3d \
        conv_transpose3d_weight_backward conv_transpose3d_x_backward deform_conv2d deform_conv2d_backward float_matmul int_matmul \
        linear linear_weight_backward linear_x_backward q_matmul";
    let compute = op_table().filter(|op| op.work == Work::Compute);
    let mut found: Vec<_> = compute.map(|op| op.name).collect();
    found.sort();
    assert_eq!(found.join(" "), expected);
}
