//! `Remat` as a backend.

use std::marker::PhantomData;

use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::{Backend, BackendTypes, DType, Shape, TensorMetadata};

use crate::call;
use crate::handle::Handle;
use crate::kind::{Bool, Float, Int, Quant, Value};
use crate::op::OpInfo;
use crate::recipe::Deliver;
use crate::work::Work;
use crate::{context, download, unwound};

/// A backend whose tensors can leave memory and come back: `Autodiff<Remat<Cuda>>`.
///
/// Put it below `Autodiff`: what the tape saves are then handles, and backward brings them back by using them. Under mixed
/// precision that is `Autocast<Autodiff<Remat<Cuda>>>`: casts are operations like others, so each is replayed as it ran.
///
/// Outside of scopes ([`checkpoint`](crate::checkpoint)) and budgets ([`MemoryBudget`](crate::MemoryBudget)) operations are passed on to
/// the inner backend unchanged.
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
    unwound::free();
    download::finish();
    context::copies_arrived();
}

#[deny(clippy::missing_trait_methods)]
impl<B: Backend> Backend for Remat<B> {
    burn_decorator::forward_device!(B, idle: idle);
    burn_decorator::forward_dtypes!(B);

    fn name(device: &Self::Device) -> String {
        format!("remat<{}>", B::name(device))
    }
}

const DELIVERED: OpInfo = OpInfo::new("from_source", Work::Fixed, "Remat");

impl<B: Backend> Remat<B> {
    /// A float tensor that `deliver` returns whenever it is used and not resident: from the shards of all ranks, a file, another device.
    /// `deliver` runs at the first use, and the tensor stays until [`evict`](crate::evict) or the end of its last use: it belongs to no
    /// scope, and a budget counts it while it is resident but does not evict it.
    ///
    /// # Cost
    ///
    /// One node, and a call of `deliver` whenever the tensor is used and not resident, on the thread that uses it.
    ///
    /// # Panics
    ///
    /// When it is used, if `deliver` returns another shape or type.
    ///
    /// ```
    /// use burn::tensor::{DType, Tensor};
    /// use burn_checkpoint::Remat;
    /// use burn_flex::Flex;
    ///
    /// let device = Default::default();
    /// let x: Tensor<Remat<Flex>, 1> =
    ///     Remat::from_source([3].into(), DType::F32, &device, move || Tensor::<Flex, 1>::ones([3], &device));
    /// assert_eq!((x * 2.0).sum().into_scalar(), 6.0);
    /// ```
    pub fn from_source<const D: usize>(
        shape: Shape,
        dtype: DType,
        device: &B::Device,
        deliver: impl Fn() -> Tensor<B, D> + Send + Sync + 'static,
    ) -> Tensor<Self, D> {
        let expected = (shape.clone(), dtype);
        let recipe = Deliver(move || {
            let tensor = deliver().into_primitive().tensor();
            let found = (tensor.shape(), tensor.dtype());
            assert!(
                found == expected,
                "a source delivered {found:?} where {expected:?} was promised"
            );
            Value::<B>::Float(tensor)
        });
        let managed = call::source(&DELIVERED, (shape, dtype, device.clone()), Box::new(recipe));
        Tensor::from_primitive(TensorPrimitive::Float(Handle::Managed(managed)))
    }
}
