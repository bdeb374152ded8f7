//! `Remat` as a backend.

use std::marker::PhantomData;

use burn_backend::{Backend, BackendTypes};

use crate::host::download;
use crate::node::drops;
use crate::node::handle::Handle;
use crate::node::kind::{Bool, Float, Int, Quant};

/// A backend whose tensors can leave memory and come back: `Autodiff<Remat<Cuda>>`.
///
/// Put it below `Autodiff`: what the tape saves are then handles, and backward brings them back by
/// using them. Under mixed precision that is `Autocast<Autodiff<Remat<Cuda>>>`: casts are
/// operations like others, so each is replayed as it ran.
///
/// Outside of scopes ([`checkpoint`](crate::checkpoint)) and budgets
/// ([`MemoryBudget`](crate::MemoryBudget)) operations are passed on to the inner backend unchanged.
#[derive(Clone, Copy, Debug, Default)]
pub struct Remat<B>(PhantomData<B>);

impl<B: Backend> BackendTypes for Remat<B> {
    burn_decorator::forward_types!(
        B,
        float tensor: Handle<B, Float>,
        int tensor: Handle<B, Int>,
        bool tensor: Handle<B, Bool>,
        quantized tensor: Handle<B, Quant>
    );
}

/// Runs before the device is synchronized or its memory cleaned up.
fn idle() {
    drops::free();
    download::finish();
}

#[deny(clippy::missing_trait_methods)]
impl<B: Backend> Backend for Remat<B> {
    burn_decorator::forward_device!(B, idle: idle);
    burn_decorator::forward_dtypes!(B);

    fn name(device: &Self::Device) -> String {
        format!("remat<{}>", B::name(device))
    }
}
