//! `Meta` as a backend: every operation from its row of the operation table.
//!
//! Most rows go to the router, which computes the shapes of their results. Rows that burn-flex has
//! no kernel for are left to the defaults of Burn's traits, and rows that it has a kernel for where
//! the router has none are one operation here: what `Meta` allocates is what burn-flex allocates.

use burn_backend::ops::conv::calculate_pool_output_size;
use burn_backend::{Backend, BackendTypes, DTypeUsageSet, TensorMetadata};
use burn_decorator::types::*;
use burn_decorator::{kind_type, map_operand, map_result};

use crate::client::{Router, Tensor, announce, has_fusion, is_composed, native, native_like};
use crate::device::MetaDevice;
use crate::rules::Row;

/// A backend without data: shapes, types and lifetimes are those of a real backend, values are
/// zeros.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::tensor::Tensor;
/// use burn_estimate::Meta;
///
/// // 400 GB, in no time and no memory.
/// let x = Tensor::<Autodiff<Meta>, 2>::ones([100_000, 1_000_000], &Default::default()).require_grad();
/// let grads = (x.clone() * 2.0).sum().backward();
/// assert_eq!(x.grad(&grads).unwrap().dims(), [100_000, 1_000_000]);
/// ```
///
/// What depends on values: `into_data` returns zeros (and takes their memory), comparisons and
/// `is_finite` read as false, `argwhere` and `nonzero` find nothing. A program that branches on
/// values takes the branch of zeros.
///
/// # Panics
///
/// Operations on quantized tensors, which the router does not have.
#[derive(Clone, Copy, Debug, Default)]
pub struct Meta;

impl BackendTypes for Meta {
    type Device = MetaDevice;

    type FloatTensorPrimitive = Tensor;
    type FloatElem = f32;

    type IntTensorPrimitive = Tensor;
    type IntElem = i32;

    type BoolTensorPrimitive = Tensor;
    type BoolElem = bool;

    type QuantizedTensorPrimitive = Tensor;
}

impl Backend for Meta {
    fn name(device: &MetaDevice) -> String {
        let name = if device.fusion {
            "fusion<meta>"
        } else {
            "meta"
        };
        name.to_owned()
    }

    fn seed(_device: &MetaDevice, _seed: u64) {}

    fn sync(device: &MetaDevice) -> Result<(), ExecutionError> {
        Router::sync(device)
    }

    fn dtype_usage(device: &MetaDevice, dtype: DType) -> DTypeUsageSet {
        Router::dtype_usage(device, dtype)
    }

    fn device_count(_type_id: u16) -> usize {
        usize::from(u16::MAX) + 1
    }
}

/// Sets the row of the operation.
macro_rules! announce {
    ($trait:ident $work:ident $op:ident) => {{
        const ROW: &Row = &Row {
            name: stringify!($op),
            work: stringify!($work),
            group: stringify!($trait),
        };
        announce(ROW);
    }};
}

/// A kernel of burn-flex whose result is like its first operand.
macro_rules! like_first {
    ($trait:ident $work:ident $op:ident($first:ident: $kind:tt $(, $arg:ident: $rest:tt)*)) => {
        fn $op($first: Tensor $(, $arg: kind_type!($rest))*) -> Tensor {
            announce!($trait $work $op);
            if is_composed(&$first) {
                return Router::$op($first $(, $arg)*);
            }
            #[allow(unused_mut)]
            let mut operands = vec![$first];
            $(operand!($rest $arg, operands);)*
            native_like(operands)
        }
    };
}

/// Adds an operand that is a tensor.
macro_rules! operand {
    (Float $arg:ident, $operands:ident) => {
        $operands.push($arg)
    };
    (FloatOpt $arg:ident, $operands:ident) => {
        $operands.extend($arg)
    };
    ($kind:tt $arg:ident, $operands:ident) => {
        let _ = $arg;
    };
}

/// A kernel whose result is a boolean for each element of its operand.
macro_rules! booleans {
    ($trait:ident $work:ident $op:ident($tensor:ident, $dtype:ident)) => {
        fn $op($tensor: Tensor, $dtype: BoolDType) -> Tensor {
            announce!($trait $work $op);
            let shape = $tensor.shape();
            native(vec![$tensor], vec![(shape, $dtype.into())]).remove(0)
        }
    };
}

/// A tensor in another shape.
macro_rules! reshape {
    ($trait:ident $work:ident $op:ident) => {
        fn $op(tensor: Tensor, shape: Shape) -> Tensor {
            if has_fusion(&tensor) && tensor.shape() == shape {
                return tensor;
            }
            announce!($trait $work $op);
            Router::$op(tensor, shape)
        }
    };
}

/// One method, or none where burn-flex has the default too.
macro_rules! method {
    // Compositions on burn-flex.
    ($trait:ident $work:ident linear $($rest:tt)*) => {};
    ($trait:ident $work:ident linear_x_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident linear_weight_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident linear_bias_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident conv1d_x_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident conv1d_weight_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident conv1d_bias_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident conv2d_x_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident conv2d_weight_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident conv2d_bias_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident conv3d_x_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident conv3d_weight_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident conv3d_bias_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident conv_transpose1d_x_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident conv_transpose1d_weight_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident conv_transpose1d_bias_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident conv_transpose2d_x_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident conv_transpose2d_weight_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident conv_transpose2d_bias_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident conv_transpose3d_x_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident conv_transpose3d_weight_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident conv_transpose3d_bias_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident unfold4d $($rest:tt)*) => {};
    ($trait:ident $work:ident avg_pool1d $($rest:tt)*) => {};
    ($trait:ident $work:ident avg_pool1d_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident adaptive_avg_pool1d $($rest:tt)*) => {};
    ($trait:ident $work:ident adaptive_avg_pool1d_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident max_pool1d $($rest:tt)*) => {};
    ($trait:ident $work:ident max_pool1d_with_indices $($rest:tt)*) => {};
    ($trait:ident $work:ident max_pool1d_with_indices_backward $($rest:tt)*) => {};
    ($trait:ident $work:ident float_powi $($rest:tt)*) => {};
    ($trait:ident $work:ident float_powi_scalar $($rest:tt)*) => {};
    ($trait:ident $work:ident float_powi_scalar_impl $($rest:tt)*) => {};
    ($trait:ident $work:ident float_powf_scalar $($rest:tt)*) => {};
    ($trait:ident $work:ident log_softmax $($rest:tt)*) => {};
    ($trait:ident $work:ident softmin $($rest:tt)*) => {};
    // Views that a default makes of other views.
    ($trait:ident $work:ident float_transpose $($rest:tt)*) => {};
    ($trait:ident $work:ident int_transpose $($rest:tt)*) => {};
    ($trait:ident $work:ident bool_transpose $($rest:tt)*) => {};

    // Reads as `float_into_data` and its like do, below.
    ($trait:ident $work:ident tr_execute $($rest:tt)*) => {};

    // Kernels of burn-flex that the router does not have.
    ($trait:ident $work:ident float_neg($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work float_neg($($args)*) } };
    ($trait:ident $work:ident float_sign($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work float_sign($($args)*) } };
    ($trait:ident $work:ident float_clamp_min($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work float_clamp_min($($args)*) } };
    ($trait:ident $work:ident float_clamp_max($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work float_clamp_max($($args)*) } };
    ($trait:ident $work:ident int_neg($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work int_neg($($args)*) } };
    ($trait:ident $work:ident int_sign($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work int_sign($($args)*) } };
    ($trait:ident $work:ident int_clamp_min($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work int_clamp_min($($args)*) } };
    ($trait:ident $work:ident int_clamp_max($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work int_clamp_max($($args)*) } };
    ($trait:ident $work:ident layer_norm($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work layer_norm($($args)*) } };
    ($trait:ident $work:ident relu($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work relu($($args)*) } };
    ($trait:ident $work:ident relu_backward($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work relu_backward($($args)*) } };
    ($trait:ident $work:ident leaky_relu($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work leaky_relu($($args)*) } };
    ($trait:ident $work:ident prelu($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work prelu($($args)*) } };
    ($trait:ident $work:ident gelu($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work gelu($($args)*) } };
    ($trait:ident $work:ident gelu_backward($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work gelu_backward($($args)*) } };
    ($trait:ident $work:ident sigmoid($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work sigmoid($($args)*) } };
    ($trait:ident $work:ident sigmoid_backward($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work sigmoid_backward($($args)*) } };
    ($trait:ident $work:ident hard_sigmoid($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work hard_sigmoid($($args)*) } };
    ($trait:ident $work:ident log_sigmoid($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work log_sigmoid($($args)*) } };
    ($trait:ident $work:ident log_sigmoid_backward($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work log_sigmoid_backward($($args)*) } };
    ($trait:ident $work:ident softmax($($args:tt)*) -> $ret:tt) => { like_first! { $trait $work softmax($($args)*) } };
    ($trait:ident $work:ident float_is_nan($tensor:ident: $kind:tt, $dtype:ident: $type:tt) -> $ret:tt) => { booleans! { $trait $work float_is_nan($tensor, $dtype) } };
    ($trait:ident $work:ident float_is_inf($tensor:ident: $kind:tt, $dtype:ident: $type:tt) -> $ret:tt) => { booleans! { $trait $work float_is_inf($tensor, $dtype) } };

    // No operation on Fusion if the shape is the same.
    ($trait:ident $work:ident float_reshape($($args:tt)*) -> $ret:tt) => { reshape! { $trait $work float_reshape } };
    ($trait:ident $work:ident int_reshape($($args:tt)*) -> $ret:tt) => { reshape! { $trait $work int_reshape } };
    ($trait:ident $work:ident bool_reshape($($args:tt)*) -> $ret:tt) => { reshape! { $trait $work bool_reshape } };

    // Its indices are of 64 bits on burn-flex.
    ($trait:ident $work:ident max_pool2d_with_indices($($args:tt)*) -> $ret:tt) => {
        fn max_pool2d_with_indices(
            x: Tensor,
            kernel_size: [usize; 2],
            stride: [usize; 2],
            padding: [usize; 2],
            dilation: [usize; 2],
            ceil_mode: bool,
        ) -> MaxPool2dWithIndices<Self> {
            announce!($trait $work max_pool2d_with_indices);
            let (mut shape, dtype) = (x.shape(), x.dtype());
            for dim in 0..2 {
                shape[dim + 2] = calculate_pool_output_size(
                    kernel_size[dim],
                    stride[dim],
                    padding[dim],
                    dilation[dim],
                    shape[dim + 2],
                    ceil_mode,
                );
            }
            let indices = match is_composed(&x) {
                true => DType::I32,
                false => DType::I64,
            };
            let results = vec![(shape.clone(), dtype), (shape, indices)];
            let mut results = native(vec![x], results).into_iter();
            let mut next = || results.next().expect("two results");
            MaxPool2dWithIndices::new(next(), next())
        }
    };

    // The router converts data of any type to f32.
    ($trait:ident $work:ident float_into_data($($args:tt)*) -> $ret:tt) => {
        async fn float_into_data(tensor: Tensor) -> Result<TensorData, ExecutionError> {
            read(tensor).await
        }
    };
    ($trait:ident $work:ident int_into_data($($args:tt)*) -> $ret:tt) => {
        async fn int_into_data(tensor: Tensor) -> Result<TensorData, ExecutionError> {
            read(tensor).await
        }
    };
    ($trait:ident $work:ident bool_into_data($($args:tt)*) -> $ret:tt) => {
        async fn bool_into_data(tensor: Tensor) -> Result<TensorData, ExecutionError> {
            read(tensor).await
        }
    };

    ($trait:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            announce!($trait $work $op);
            map_result!($ret Router::$op($(map_operand!($kind $arg, same)),*), same)
        }
    };
}

fn same(tensor: Tensor) -> Tensor {
    tensor
}

fn read(tensor: Tensor) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send {
    use burn_router::RunnerClient;
    let client = tensor.client.clone();
    client.read_tensor_async(tensor.into_ir())
}

/// Implements one trait.
macro_rules! implement {
    ($trait:ident $($cast:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl $trait<Self> for Meta {
            $(method! { $trait $work $op($($arg: $kind),*) -> $ret })*
        }
    };
}

burn_decorator::every_ops!(implement);
