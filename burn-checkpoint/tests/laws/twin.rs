//! Flex with many devices: what a test of budgets needs and Flex has not.

use burn_backend::{
    Backend, BackendTypes, DType, DTypeUsageSet, Device as FromId, DeviceId, DeviceOps,
    TensorMetadata,
};
use burn_decorator::types::*;
use burn_decorator::{kind_type, map_operand, map_result};
use burn_flex::{Flex, FlexDevice};

/// The first two are enough.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TwinDevice(pub u16);

impl FromId for TwinDevice {
    fn to_id(&self) -> DeviceId {
        DeviceId::new(0, self.0)
    }

    fn from_id(id: DeviceId) -> Self {
        Self(id.index_id)
    }
}

impl DeviceOps for TwinDevice {}

/// A tensor that says that it is on a device.
#[derive(Clone, Debug)]
pub struct On<T> {
    tensor: T,
    device: TwinDevice,
}

impl<T: TensorMetadata + 'static> TensorMetadata for On<T> {
    burn_decorator::forward_metadata!(tensor);
}

/// Flex whose float tensors know their device. All others are on the first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Twin;

impl BackendTypes for Twin {
    type Device = TwinDevice;

    type FloatTensorPrimitive = On<FloatTensor<Flex>>;
    type FloatElem = f32;

    type IntTensorPrimitive = IntTensor<Flex>;
    type IntElem = i32;

    type BoolTensorPrimitive = BoolTensor<Flex>;
    type BoolElem = bool;

    type QuantizedTensorPrimitive = QuantizedTensor<Flex>;
}

impl Backend for Twin {
    fn name(_device: &TwinDevice) -> String {
        "twin".into()
    }

    fn seed(_device: &TwinDevice, seed: u64) {
        Flex::seed(&Default::default(), seed);
    }

    fn device_count(_type_id: u16) -> usize {
        2
    }

    fn dtype_usage(_device: &TwinDevice, dtype: DType) -> DTypeUsageSet {
        Flex::dtype_usage(&Default::default(), dtype)
    }
}

macro_rules! inner {
    (FloatRef $x:ident) => {
        &$x.tensor
    };
    (DeviceRef $x:ident) => {
        &FlexDevice
    };
    ($kind:tt $x:ident) => {
        map_operand!($kind $x, |x: On<_>| x.tensor)
    };
}

/// Where the result will be.
macro_rules! see {
    (Float $x:ident $device:ident) => {
        let _ = $device.get_or_insert($x.device);
    };
    (Follow $x:ident $device:ident) => {
        let _ = $device.get_or_insert($x.device);
    };
    (FloatRef $x:ident $device:ident) => {
        let _ = $device.get_or_insert($x.device);
    };
    (Floats $x:ident $device:ident) => {
        let _ = $device.get_or_insert($x[0].device);
    };
    (Tensor $x:ident $device:ident) => {
        if let TensorPrimitive::Float(x) = &$x {
            let _ = $device.get_or_insert(x.device);
        }
    };
    (DeviceRef $x:ident $device:ident) => {
        $device = Some(*$x);
    };
    ($kind:tt $x:ident $device:ident) => {};
}

macro_rules! outer {
    (Device $y:expr, $device:ident) => {{
        let _ = $y;
        $device
    }};
    ($kind:tt $y:expr, $device:ident) => {
        map_result!($kind $y, |tensor| On { tensor, device: $device })
    };
}

macro_rules! implement {
    ($trait:ident $($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl $trait<Self> for Twin {
            $(fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
                #[allow(unused_mut, unused_assignments, reason = "rows without float operands")]
                let mut device: Option<TwinDevice> = None;
                $(see!($kind $arg device);)*
                #[allow(unused_variables, reason = "rows without float results")]
                let device = device.unwrap_or_default();
                outer!($ret Flex::$op($(inner!($kind $arg)),*), device)
            })*
        }
    };
}

burn_decorator::every_ops!(implement);
