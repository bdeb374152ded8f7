//! The rows that Burn 0.22.1 has and 0.21.0 has not: the rest of the table is the same for both.

/// Hands on the rows of a trait with those of this release.
#[doc(hidden)]
#[macro_export]
macro_rules! rows_of_release {
    ($callback:ident FloatTensorOps $($rows:tt)*) => {
        $callback! {
            FloatTensorOps $($rows)*
            promote index   float_scatter(dim: [usize], tensor: Float, indices: Int, value: Float, update: [IndexingUpdateOp]) -> Float
                    = "PyTorch's promote list.";
            promote index   float_select_assign(tensor: Float, dim: [usize], indices: Int, value: Float, update: [IndexingUpdateOp]) -> Float
                    = "Combines, as `float_scatter`.";
            keep    fixed   float_mask_select(tensor: Float, mask: Bool) -> FutureFloat
                    = "Its shape depends on data.";
            full    reduce  float_sum_dims(tensor: Float, dims: {usize}) -> Float
                    = "As `float_sum_dim`.";
            promote math    float_hypot(lhs: Float, rhs: Float) -> Float;
            keep    sort    float_topk_with_indices(tensor: Float, dim: [usize], k: [usize], out_dtype: [IntDType]) -> (Float, Int);
            keep    cheap   float_pad(tensor: Float, padding: {(usize, usize)}, mode: [PadMode]) -> Float;
        }
    };
    ($callback:ident IntTensorOps $($rows:tt)*) => {
        $callback! {
            IntTensorOps $($rows)*
            keep    fixed   int_mask_select(tensor: Int, mask: Bool) -> FutureInt;
            keep    index   int_scatter(dim: [usize], tensor: Int, indices: Int, value: Int, update: [IndexingUpdateOp]) -> Int;
            keep    index   int_select_assign(tensor: Int, dim: [usize], indices: Int, value: Int, update: [IndexingUpdateOp]) -> Int;
            keep    cheap   int_square(tensor: Int) -> Int;
            keep    sort    int_topk_with_indices(tensor: Int, dim: [usize], k: [usize]) -> (Int, Int);
            keep    cheap   int_pad(tensor: Int, padding: {(usize, usize)}, mode: [PadMode]) -> Int;
        }
    };
    ($callback:ident BoolTensorOps $($rows:tt)*) => {
        $callback! {
            BoolTensorOps $($rows)*
            keep    fixed   bool_mask_select(tensor: Bool, mask: Bool) -> FutureBool;
        }
    };
    ($callback:ident QTensorOps $($rows:tt)*) => {
        $callback! {
            QTensorOps $($rows)*
            keep    sort    q_topk_with_indices(tensor: Quant, dim: [usize], k: [usize], out_dtype: [IntDType]) -> (Quant, Int);
        }
    };
    ($callback:ident ModuleOps $($rows:tt)*) => {
        $callback! {
            ModuleOps $($rows)*
            keep    index   max_pool1d_with_indices(x: Float, kernel_size: [usize], stride: [usize], padding: [usize], dilation: [usize], ceil_mode: [bool], indices_dtype: [IntDType]) -> {MaxPool1dWithIndices output: Float, indices: Int};
            keep    index   max_pool2d_with_indices(x: Float, kernel_size: [[usize; 2]], stride: [[usize; 2]], padding: [[usize; 2]], dilation: [[usize; 2]], ceil_mode: [bool], indices_dtype: [IntDType]) -> {MaxPool2dWithIndices output: Float, indices: Int};
            full    norm    batch_norm(x: Float, gamma: Float, beta: Float, mean: Float, variance: Float, epsilon: [f64]) -> Float
                    = "Divides by a root of a variance.";
            full    norm    batch_norm_train(x: Float, gamma: Float, beta: Float, epsilon: [f64]) -> {BatchNormTrain output: Float, mean: Float, variance: Float}
                    = "A mean and a variance.";
            full    norm    batch_norm_train_backward(x: Float, gamma: Float, mean: Float, variance: Float, epsilon: [f64], output_grad: Float) -> {BatchNormTrainBackward x_grad: Float, gamma_grad: Float, beta_grad: Float}
                    = "As its forward.";
            keep    index   fold4d(x: Float, output_size: [[usize; 2]], kernel_size: [[usize; 2]], options: [UnfoldOptions]) -> Float;
            full    index   adaptive_avg_pool3d(x: Float, output_size: [[usize; 3]]) -> Float
                    = "A mean: adding up 4096 ones in f16 gives 2048.";
            full    index   adaptive_avg_pool3d_backward(x: Float, grad: Float) -> Float
                    = "As its forward.";
        }
    };
    ($callback:ident $($rows:tt)*) => { $callback! { $($rows)* } };
}

/// The device of a tensor, which knows it itself; 0.21 has an operation for it.
#[doc(hidden)]
#[macro_export]
macro_rules! device_of {
    ($backend:ident, $op:ident, $tensor:expr) => {
        $crate::types::TensorMetadata::device($tensor)
    };
}

/// What `TensorMetadata` asks for beyond 0.21's: for the body of an `impl`.
#[doc(hidden)]
#[macro_export]
macro_rules! metadata_of_release {
    ($device:ty, $of:path, $can_mut:path) => {
        type Device = $device;

        fn device(&self) -> Self::Device {
            $of(self)
        }

        fn can_mut(&self) -> bool {
            $can_mut(self)
        }
    };
}

/// The parameters of a quantization, their tensors by a function.
#[doc(hidden)]
#[macro_export]
macro_rules! map_qparams {
    ($x:expr, $f:expr) => {
        $crate::types::QuantizationParametersPrimitive {
            scales: ($f)($x.scales),
            global: $x.global.map($f),
        }
    };
}

/// What a function makes of the tensors of a quantization's parameters, as a `Vec`.
#[doc(hidden)]
#[macro_export]
macro_rules! list_qparams {
    ($x:expr, $f:expr) => {
        core::iter::once(&$x.scales)
            .chain(&$x.global)
            .map($f)
            .collect::<Vec<_>>()
    };
}

/// The parameters of a quantization, from an iterator over their tensors.
#[doc(hidden)]
#[macro_export]
macro_rules! collect_qparams {
    ($tensors:expr) => {{
        let mut tensors = $tensors;
        $crate::types::QuantizationParametersPrimitive {
            scales: tensors.next().expect("scales are always there"),
            global: tensors.next(),
        }
    }};
}

/// The shape and the type of `TensorData`.
#[doc(hidden)]
#[macro_export]
macro_rules! shape_and_dtype {
    ($data:expr) => {
        ($data.shape().clone(), $data.dtype())
    };
}
