//! What Burn 0.21 requires of a quantized tensor.

use burn_backend::quantization::{QuantPropagation, QuantScheme};
use burn_backend::tensor::QuantizedTensor;
use burn_backend::{Backend, DType, QTensorPrimitive};
use burn_std::quantization::QuantAcc;

use crate::node::handle::Handle;
use crate::node::kind::Quant;

#[deny(clippy::missing_trait_methods)]
impl<B: Backend> QTensorPrimitive for Handle<B, Quant> {
    fn scheme(&self) -> &QuantScheme {
        match self {
            Self::Resident(tensor, _) => tensor.scheme(),
            Self::Managed(managed) => match &managed.node().meta.dtype {
                DType::QFloat(scheme) => scheme,
                other => unreachable!("a quantized tensor has a scheme in its type, not {other:?}"),
            },
        }
    }

    /// Brings the tensor back if it is not resident: only the inner backend knows this.
    fn acc_precision(&self) -> QuantAcc {
        self.to_inner().acc_precision()
    }

    /// As [`Self::acc_precision`].
    fn propagation(&self) -> QuantPropagation {
        self.to_inner().propagation()
    }

    fn default_scheme() -> QuantScheme {
        QuantizedTensor::<B>::default_scheme()
    }
}
