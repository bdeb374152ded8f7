//! Refuses a device that cannot compute in the low type, before a kernel fails with a less clear
//! message.

use std::any::TypeId;
use std::cell::Cell;

use burn_backend::{
    Backend, DType, DTypeUsage, DTypeUsageSet, DeviceId, DeviceOps, FloatDType, tensor::FloatTensor,
};
use burn_decorator::device_of;

use crate::error::AmpError;

/// The float types that a message about a device lists.
const FLOATS: [FloatDType; 5] = [
    FloatDType::F64,
    FloatDType::F32,
    FloatDType::Flex32,
    FloatDType::F16,
    FloatDType::BF16,
];

/// Whether the device stores and computes in the type.
pub(crate) fn check_dtype<B: Backend>(
    device: &B::Device,
    dtype: FloatDType,
) -> Result<(), AmpError> {
    if B::supports_dtype(device, dtype.into()) {
        return Ok(());
    }
    let supported: Vec<_> = FLOATS
        .into_iter()
        .map(DType::from)
        .filter(|dtype| B::supports_dtype(device, *dtype))
        .map(|dtype| dtype.name())
        .collect();
    Err(AmpError::UnsupportedDtype {
        device: format!("{device:?}"),
        backend: B::name(device),
        dtype,
        usage: usage(B::dtype_usage(device, dtype.into())),
        supported: supported.join(", "),
    })
}

/// What a device can do with a type, as the object of "it can".
fn usage(usage: DTypeUsageSet) -> String {
    let can: Vec<_> = [
        (DTypeUsage::Storage, "store"),
        (DTypeUsage::Arithmetic, "compute in"),
        (DTypeUsage::Accelerated, "multiply matrices of"),
    ]
    .into_iter()
    .filter_map(|(what, name)| usage.contains(what).then_some(name))
    .collect();
    if can.is_empty() {
        "neither store nor compute in".to_owned()
    } else {
        format!("only {}", can.join(" and "))
    }
}

thread_local! {
    /// The last backend, device and type that passed: a cast then compares with it instead of
    /// querying the device.
    static PASSED: Cell<Option<(TypeId, DeviceId, FloatDType)>> = const { Cell::new(None) };
}

/// Panics with [`AmpError::UnsupportedDtype`]'s message unless the tensor's device can do the type,
/// and on LibTorch that is not mended.
#[inline]
pub(super) fn ensure_dtype<B: Backend>(tensor: &FloatTensor<B>, dtype: FloatDType) {
    let device = device_of!(B, float_device, tensor);
    let key = (TypeId::of::<B>(), device.id(), dtype);
    if PASSED.get() != Some(key) {
        burn_decorator::ensure_mended::<B>(&device);
        if let Err(error) = check_dtype::<B>(&device, dtype) {
            panic!("{error}");
        }
        PASSED.set(Some(key));
    }
}
