//! The rows that Burn 0.21.0 has and 0.22.1 has not: the rest of the table is the same for both.

/// Passes the rows of a trait to a macro, followed by those of this release.
#[doc(hidden)]
#[macro_export]
macro_rules! rows_of_release {
    ($callback:ident FloatTensorOps $($rows:tt)*) => {
        $callback! {
            FloatTensorOps $($rows)*
            keep    pass    float_device(tensor: FloatRef) -> Device;
            promote index   float_scatter_add(dim: [usize], tensor: Float, indices: Int, value: Float) -> Float
                    = "Adds: PyTorch's promote list.";
            promote index   float_select_add(tensor: Float, dim: [usize], indices: Int, value: Float) -> Float
                    = "Adds, as `float_scatter_add`.";
        }
    };
    ($callback:ident IntTensorOps $($rows:tt)*) => {
        $callback! {
            IntTensorOps $($rows)*
            keep    pass    int_device(tensor: IntRef) -> Device;
            keep    index   int_scatter_add(dim: [usize], tensor: Int, indices: Int, value: Int) -> Int;
            keep    index   int_select_add(tensor: Int, dim: [usize], indices: Int, value: Int) -> Int;
        }
    };
    ($callback:ident BoolTensorOps $($rows:tt)*) => {
        $callback! {
            BoolTensorOps $($rows)*
            keep    pass    bool_device(tensor: BoolRef) -> Device;
        }
    };
    ($callback:ident QTensorOps $($rows:tt)*) => {
        $callback! {
            QTensorOps $($rows)*
            keep    pass    q_device(tensor: QuantRef) -> Device;
        }
    };
    ($callback:ident ModuleOps $($rows:tt)*) => {
        $callback! {
            ModuleOps $($rows)*
            keep    index   max_pool1d_with_indices(x: Float, kernel_size: [usize], stride: [usize], padding: [usize], dilation: [usize], ceil_mode: [bool]) -> {MaxPool1dWithIndices output: Float, indices: Int};
            keep    index   max_pool2d_with_indices(x: Float, kernel_size: [[usize; 2]], stride: [[usize; 2]], padding: [[usize; 2]], dilation: [[usize; 2]], ceil_mode: [bool]) -> {MaxPool2dWithIndices output: Float, indices: Int};
            full    sort    rfft(signal: Float, dim: [usize], n: [Option<usize>]) -> (Float, Float)
                    = "Sums over the whole signal.";
            full    sort    irfft(spectrum_re: Float, spectrum_im: Float, dim: [usize], n: [Option<usize>]) -> Float
                    = "Sums over the whole spectrum.";
        }
    };
    ($callback:ident $($rows:tt)*) => { $callback! { $($rows)* } };
}

/// The device of a tensor, by the operation that this release has for it.
#[doc(hidden)]
#[macro_export]
macro_rules! device_of {
    ($backend:ident, $op:ident, $tensor:expr) => {
        $backend::$op($tensor)
    };
}

/// What `TensorMetadata` asks for beyond 0.21's: nothing here.
#[doc(hidden)]
#[macro_export]
macro_rules! metadata_of_release {
    ($($ignored:tt)*) => {};
}

/// The parameters of a quantization, with a function applied to their tensors.
#[doc(hidden)]
#[macro_export]
macro_rules! map_qparams {
    ($x:expr, $f:expr) => {
        $crate::types::QuantizationParametersPrimitive {
            scales: ($f)($x.scales),
        }
    };
}

/// The results of a function on the tensors of a quantization's parameters, as a `Vec`.
#[doc(hidden)]
#[macro_export]
macro_rules! list_qparams {
    ($x:expr, $f:expr) => {
        vec![($f)(&$x.scales)]
    };
}

/// The parameters of a quantization, from an iterator over their tensors.
#[doc(hidden)]
#[macro_export]
macro_rules! collect_qparams {
    ($tensors:expr) => {
        $crate::types::QuantizationParametersPrimitive {
            scales: $tensors.next().expect("scales are always there"),
        }
    };
}

/// The shape and the type of `TensorData`.
#[doc(hidden)]
#[macro_export]
macro_rules! shape_and_dtype {
    ($data:expr) => {
        ($data.shape.clone(), $data.dtype)
    };
}
