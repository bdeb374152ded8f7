//! Operands for every row, by the names of operation and operand.

use std::any::Any;
use std::cell::RefCell;
use std::ops::Range;

use burn::tensor::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConvOptions,
    GridSampleOptions, InterpolateMode, InterpolateOptions, UnfoldOptions,
};
use burn::tensor::quantization::{QuantLevel, QuantStore, QuantValue};
use burn_backend::Backend;
use burn_decorator::types::*;

/// The shape of a tensor operand; `[4, 4]` unless the operation says otherwise.
fn shape(op: &str, arg: &str) -> Vec<usize> {
    let find = |table: &[(&str, &[usize])]| {
        let row = table.iter().find(|(name, _)| *name == arg);
        row.map_or_else(
            || panic!("no shape of {arg} of {op}"),
            |(_, shape)| shape.to_vec(),
        )
    };
    let conv = |x: &[usize], weight: &[usize], grad: &[usize]| {
        find(&[
            ("x", x),
            ("weight", weight),
            ("bias", &[4]),
            ("output_grad", grad),
        ])
    };
    let pool = |x: &[usize], grad: &[usize]| {
        find(&[
            ("x", x),
            ("grad", grad),
            ("output_grad", grad),
            ("indices", grad),
        ])
    };
    if op.starts_with("conv_transpose1d") {
        return conv(&[2, 3, 6], &[3, 4, 3], &[2, 4, 8]);
    }
    if op.starts_with("conv_transpose2d") {
        return conv(&[2, 3, 4, 4], &[3, 4, 3, 3], &[2, 4, 6, 6]);
    }
    if op.starts_with("conv_transpose3d") {
        return conv(&[1, 2, 3, 3, 3], &[2, 4, 3, 3, 3], &[1, 4, 5, 5, 5]);
    }
    if op.starts_with("conv1d") {
        return conv(&[2, 3, 8], &[4, 3, 3], &[2, 4, 6]);
    }
    if op.starts_with("conv2d") {
        return conv(&[2, 3, 6, 6], &[4, 3, 3, 3], &[2, 4, 4, 4]);
    }
    if op.starts_with("conv3d") {
        return conv(&[1, 2, 5, 5, 5], &[4, 2, 3, 3, 3], &[1, 4, 3, 3, 3]);
    }
    if op.starts_with("deform_conv2d") {
        return find(&[
            ("x", &[1, 2, 5, 5]),
            ("offset", &[1, 18, 3, 3]),
            ("weight", &[4, 2, 3, 3]),
            ("mask", &[1, 9, 3, 3]),
            ("bias", &[4]),
            ("output_grad", &[1, 4, 3, 3]),
        ]);
    }
    match op {
        "float_cross" => vec![4, 3],
        "float_grid_sample_2d" if arg == "grid" => vec![1, 3, 3, 2],
        "float_grid_sample_2d" => vec![1, 2, 4, 4],
        "unfold4d" => vec![2, 3, 6, 6],
        "linear" | "linear_x_backward" | "linear_weight_backward" | "linear_bias_backward" => {
            find(&[
                ("x", &[2, 3, 4]),
                ("weight", &[4, 5]),
                ("bias", &[5]),
                ("output_grad", &[2, 3, 5]),
            ])
        }
        "embedding" | "embedding_backward" => find(&[
            ("weights", &[5, 4]),
            ("indices", &[2, 3]),
            ("output_grad", &[2, 3, 4]),
        ]),
        "attention" => vec![1, 2, 4, 4],
        "layer_norm" if arg != "tensor" => vec![4],
        "ctc_loss" | "ctc_loss_backward" => find(&[
            ("log_probs", &[5, 2, 4]),
            ("targets", &[2, 2]),
            ("input_lengths", &[2]),
            ("target_lengths", &[2]),
            ("grad_loss", &[2]),
        ]),
        "rfft" => vec![2, 8],
        "irfft" => vec![2, 5],
        "interpolate" | "interpolate_backward" => pool(&[2, 3, 6, 6], &[2, 3, 3, 3]),
        "prelu" if arg == "alpha" => vec![1],
        _ if op.contains("pool1d") => pool(&[2, 3, 8], &[2, 3, 4]),
        _ if op.contains("pool2d") => pool(&[2, 3, 6, 6], &[2, 3, 3, 3]),
        _ if op.ends_with("_expand") => vec![4, 1],
        _ if op.ends_with("gather_nd") && arg == "indices" => vec![3, 2],
        _ if op.ends_with("scatter_nd") && arg == "indices" => vec![3, 1],
        _ if op.ends_with("scatter_nd") && arg == "values" => vec![3, 4],
        _ if op.ends_with("slice_assign") && arg == "value" => vec![2, 4],
        _ if op.contains("_select") && arg == "indices" => vec![3],
        _ if op.contains("_select_") && arg == "value" => vec![4, 3],
        _ if arg == "scales" => vec![1],
        _ => vec![4, 4],
    }
}

fn elements(shape: &[usize]) -> usize {
    shape.iter().product()
}

/// Numbers in (0.3, 0.8), no two alike, that are results of a recorded operation.
pub fn float<B: Backend>(op: &str, arg: &str) -> FloatTensor<B> {
    let shape = shape(op, arg);
    let salt = arg.bytes().map(u32::from).sum::<u32>() as f32;
    let values: Vec<f32> = (0..elements(&shape))
        .map(|index| 0.55 + 0.25 * (index as f32 * 1.7 + salt).sin())
        .collect();
    let tensor = B::float_from_data(TensorData::new(values, shape), &Default::default());
    kept(&tensor);
    B::float_mul_scalar(tensor, Scalar::Float(1.0))
}

/// Small numbers that can be indices, lengths, exponents and shifts, as results of a recorded
/// operation.
pub fn int<B: Backend>(op: &str, arg: &str) -> IntTensor<B> {
    let shape = shape(op, arg);
    let value = |index: usize| match arg {
        "input_lengths" => 5,
        "target_lengths" => 2,
        "targets" => 1 + index as i64 % 3,
        "indices" => index as i64 % 3,
        // Not 0, to be divided by.
        _ => 1 + index as i64 % 4,
    };
    let values: Vec<i64> = (0..elements(&shape)).map(value).collect();
    let data = TensorData::new(values, shape);
    // Flex gives positions in a window as i64.
    let data = if op.starts_with("max_pool") {
        data
    } else {
        data.convert::<B::IntElem>()
    };
    let tensor = B::int_from_data(data, &Default::default());
    kept(&tensor);
    B::int_add_scalar(tensor, Scalar::Int(0))
}

/// Every third is set.
pub fn bool<B: Backend>(op: &str, arg: &str) -> BoolTensor<B> {
    let shape = shape(op, arg);
    let values: Vec<bool> = (0..elements(&shape)).map(|index| index % 3 == 0).collect();
    let tensor = B::bool_from_data(TensorData::new(values, shape), &Default::default());
    kept(&tensor);
    B::bool_not(tensor)
}

/// Numbers in (0.3, 0.8).
pub fn quant<B: Backend>(op: &str, arg: &str) -> QuantizedTensor<B> {
    B::quantize_dynamic(float::<B>(op, arg), &scheme())
}

/// One scale a tensor, eight bits an element.
pub fn scheme() -> QuantScheme {
    QuantScheme::default()
        .with_level(QuantLevel::Tensor)
        .with_value(QuantValue::Q8S)
        .with_store(QuantStore::Native)
}

thread_local! {
    static KEPT: RefCell<Vec<Box<dyn Any>>> = const { RefCell::new(Vec::new()) };
}

/// Keeps a handle: an operand that nobody else uses and that cannot come back is not worth a
/// recipe.
fn kept<T: Clone + 'static>(tensor: &T) {
    KEPT.with_borrow_mut(|kept| kept.push(Box::new(tensor.clone())));
}

/// Drops what is kept.
pub fn release() {
    KEPT.take();
}

/// A plain operand.
pub trait Plain {
    fn make(op: &str, arg: &str) -> Self;
}

macro_rules! plain {
    ($($type:ty: $op:ident $arg:ident $make:expr;)*) => {
        $(impl Plain for $type {
            fn make($op: &str, $arg: &str) -> Self {
                $make
            }
        })*
    };
}

plain! {
    usize: op arg match (op, arg) {
        (_, "dim1" | "padding" | "blank") => 0,
        (_, "times" | "k" | "size" | "kernel_size" | "stride") => 2,
        (_, "output_size") => 4,
        (_, "dim" | "dim2" | "step" | "dilation") => 1,
        _ => panic!("{op} {arg}"),
    };
    [usize; 2]: op arg match arg {
        "padding" => [0, 0],
        "kernel_size" | "stride" => [2, 2],
        "dilation" => [1, 1],
        "output_size" => [3, 3],
        _ => panic!("{op} {arg}"),
    };
    bool: _op arg arg == "count_include_pad" || arg == "descending";
    f64: _op _arg 1e-5;
    Option<usize>: _op _arg None;
    Shape: op _arg if op.ends_with("expand") { Shape::new([4, 4]) } else { Shape::new([2, 8]) };
    Scalar: op arg match arg {
        "min" => Scalar::Float(0.4),
        "max" => Scalar::Float(0.6),
        _ if op.starts_with("int") || op.starts_with("bitwise") => Scalar::Int(2),
        _ if op.starts_with("bool") => Scalar::Bool(true),
        _ if op.contains("powi") => Scalar::Int(3),
        _ => Scalar::Float(0.5),
    };
    FloatDType: op _arg if op == "float_cast" { FloatDType::F64 } else { FloatDType::F32 };
    IntDType: op _arg if op == "int_cast" { IntDType::I64 } else { IntDType::I32 };
    BoolDType: _op _arg BoolDType::Native;
    IndexingUpdateOp: _op _arg IndexingUpdateOp::Add;
    AttentionModuleOptions: _op _arg AttentionModuleOptions::default();
    ConvOptions<1>: _op _arg ConvOptions::new([1], [0], [1], 1);
    ConvOptions<2>: _op _arg ConvOptions::new([1; 2], [0; 2], [1; 2], 1);
    ConvOptions<3>: _op _arg ConvOptions::new([1; 3], [0; 3], [1; 3], 1);
    ConvTransposeOptions<1>: _op _arg ConvTransposeOptions::new([1], [0], [0], [1], 1);
    ConvTransposeOptions<2>: _op _arg ConvTransposeOptions::new([1; 2], [0; 2], [0; 2], [1; 2], 1);
    ConvTransposeOptions<3>: _op _arg ConvTransposeOptions::new([1; 3], [0; 3], [0; 3], [1; 3], 1);
    DeformConvOptions<2>: _op _arg DeformConvOptions::new([1; 2], [0; 2], [1; 2], 1, 1);
    UnfoldOptions: _op _arg UnfoldOptions::new([1; 2], [0; 2], [1; 2]);
    InterpolateOptions: _op _arg InterpolateOptions::new(InterpolateMode::Bilinear);
    GridSampleOptions: _op _arg GridSampleOptions::default();
    TensorData: op arg panic!("{op} {arg} is not recorded");
    Distribution: op arg panic!("{op} {arg} is not recorded");
    Range<i64>: _op _arg 0..16;
}

/// An element of a slice.
pub trait Element: Sized {
    fn make(op: &str, arg: &str) -> Vec<Self>;
}

impl Element for usize {
    fn make(op: &str, _arg: &str) -> Vec<Self> {
        if op.ends_with("permute") {
            vec![1, 0]
        } else {
            vec![1]
        }
    }
}

impl Element for Slice {
    fn make(_op: &str, _arg: &str) -> Vec<Self> {
        vec![Slice::from(1..3), Slice::from(0..4)]
    }
}
