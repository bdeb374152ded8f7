//! A backend that has only the operations without a default: what Burn computes on a backend
//! without kernels of its own for activations and modules, as CubeCL and Fusion.

use std::convert::identity;
use std::marker::PhantomData;

use burn_backend::{Backend, BackendTypes};
use burn_decorator::types::*;
use burn_decorator::{kind_type, map_operand, map_result};

/// `B` without its own activations, layer norm, linear, embedding and gradients of modules: Burn's
/// defaults run in their place.
#[derive(Clone, Copy, Debug, Default)]
pub struct Defaults<B>(PhantomData<B>);

impl<B: Backend> BackendTypes for Defaults<B> {
    burn_decorator::forward_types!(B, float tensor: B::FloatTensorPrimitive);
}

impl<B: Backend> Backend for Defaults<B> {
    burn_decorator::forward_device!(B);
    burn_decorator::forward_dtypes!(B);

    fn name(device: &Self::Device) -> String {
        format!("defaults<{}>", B::name(device))
    }
}

/// One method of `ModuleOps`, nothing where Burn has a default.
macro_rules! module_method {
    (@forward $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            retype!($ret B, Self, B::$op($(retype!($kind Self, B, $arg)),*))
        }
    };
    (conv2d $($row:tt)*) => { module_method! { @forward conv2d $($row)* } };
    (deform_conv2d $($row:tt)*) => { module_method! { @forward deform_conv2d $($row)* } };
    (deform_conv2d_backward $($row:tt)*) => { module_method! { @forward deform_conv2d_backward $($row)* } };
    (conv3d $($row:tt)*) => { module_method! { @forward conv3d $($row)* } };
    (conv_transpose2d $($row:tt)*) => { module_method! { @forward conv_transpose2d $($row)* } };
    (conv_transpose3d $($row:tt)*) => { module_method! { @forward conv_transpose3d $($row)* } };
    (avg_pool2d $($row:tt)*) => { module_method! { @forward avg_pool2d $($row)* } };
    (avg_pool2d_backward $($row:tt)*) => { module_method! { @forward avg_pool2d_backward $($row)* } };
    (adaptive_avg_pool2d $($row:tt)*) => { module_method! { @forward adaptive_avg_pool2d $($row)* } };
    (adaptive_avg_pool2d_backward $($row:tt)*) => { module_method! { @forward adaptive_avg_pool2d_backward $($row)* } };
    (max_pool2d $($row:tt)*) => { module_method! { @forward max_pool2d $($row)* } };
    (max_pool2d_with_indices $($row:tt)*) => { module_method! { @forward max_pool2d_with_indices $($row)* } };
    (max_pool2d_with_indices_backward $($row:tt)*) => { module_method! { @forward max_pool2d_with_indices_backward $($row)* } };
    (interpolate $($row:tt)*) => { module_method! { @forward interpolate $($row)* } };
    (interpolate_backward $($row:tt)*) => { module_method! { @forward interpolate_backward $($row)* } };
    (attention $($row:tt)*) => { module_method! { @forward attention $($row)* } };
    (rfft $($row:tt)*) => { module_method! { @forward rfft $($row)* } };
    (irfft $($row:tt)*) => { module_method! { @forward irfft $($row)* } };
    ($($row:tt)*) => {};
}

macro_rules! implement {
    (ActivationOps $($rows:tt)*) => {
        impl<B: Backend> ActivationOps<Self> for Defaults<B> {}
    };
    (ModuleOps $($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<B: Backend> ModuleOps<Self> for Defaults<B> {
            $(module_method! { $op($($arg: $kind),*) -> $ret })*
        }
    };
    ($trait:ident $($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<B: Backend> $trait<Self> for Defaults<B> {
            $(fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
                map_result!($ret B::$op($(map_operand!($kind $arg, identity)),*), identity)
            })*
        }
    };
}

burn_decorator::every_ops!(implement);
