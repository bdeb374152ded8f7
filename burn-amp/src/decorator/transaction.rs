//! Reading several tensors at once: by hand, because the tensors sit in a struct of the backend's own type.
#![deny(clippy::missing_trait_methods)]

use burn_backend::Backend;
use burn_decorator::types::*;

use super::backend::Autocast;
use super::tensor::AutocastTensor;
use crate::policy::Policy;

impl<B: Backend, P: Policy> TransactionOps<Self> for Autocast<B, P> {
    fn tr_execute(
        transaction: TransactionPrimitive<Self>,
    ) -> impl Future<Output = Result<TransactionPrimitiveData, ExecutionError>> + Send {
        let floats = transaction.read_floats.into_iter();
        B::tr_execute(TransactionPrimitive::new(
            floats.map(AutocastTensor::into_inner).collect(),
            transaction.read_qfloats,
            transaction.read_ints,
            transaction.read_bools,
        ))
    }
}
