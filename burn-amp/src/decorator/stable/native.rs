//! Whether a backend's kernel of a function is good enough: in a low type as good as f32, rounded
//! once; in f32 as good as what is left of it in a low type.

use std::any::TypeId;
use std::collections::HashMap;
use std::sync::LazyLock;

use burn::tensor::try_read_sync;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, DeviceId, DeviceOps, FloatDType, TensorData};
use burn_decorator::simulated::is_inexact;
use parking_lot::RwLock;

use crate::watch::unseen;

/// Numbers that f16 and bf16 hold, and the function of each. Added to 1, 1.013e-6 (17 times 2 to the
/// power of -24) is rounded in f32.
pub(super) type Points = &'static [(f32, f32)];

/// Where the sum of 1 and a rounded erf, as in Burn's default, has lost most of its digits.
pub(super) const GELU: Points = &[
    (-3.5, -8.142_2e-4),
    (-3.25, -1.875_3e-3),
    (-2.75, -8.194_3e-3),
    (-2.5, -1.552_416_3e-2),
];

/// `1 / sqrt(x)`, of which the gradient of the square root is half.
pub(super) const RECIPROCAL_ROOT: Points = &[
    (5.960_464_5e-8, 4096.0),
    (1.013_279e-6, 993.425_9),
    (6.103_515_6e-5, 128.0),
    (0.031_25, 5.656_854_4),
    (0.3125, 1.788_854_4),
    (0.875, 1.069_045),
    (2.5, 0.632_455_5),
    (40.0, 0.158_113_88),
    (57_344.0, 4.175_957e-3),
];

pub(super) const LOG1P: Points = &[
    (1.013_279e-6, 1.013_278_4e-6),
    (6.103_515_6e-5, 6.103_329_4e-5),
    (9.765_625e-4, 9.760_859e-4),
    (0.3125, 0.271_933_7),
    (40.0, 3.713_572),
];

pub(super) const TANH: Points = &[
    (1.013_279e-6, 1.013_279e-6),
    (6.103_515_6e-5, 6.103_515_6e-5),
    (9.765_625e-4, 9.765_622e-4),
    (0.031_25, 0.031_239_83),
    (0.3125, 0.302_709_73),
    (-2.5, -0.986_614_3),
    (11.5, 1.0),
    (57_344.0, 1.0),
];

pub(super) const ERF: Points = &[
    (1.013_279e-6, 1.143_362_9e-6),
    (6.103_515_6e-5, 6.887_08e-5),
    (9.765_625e-4, 1.101_932_4e-3),
    (0.031_25, 0.035_250_375),
    (0.3125, 0.341_468_63),
    (1.0, 0.842_700_8),
    (-2.5, -0.999_593),
    (57_344.0, 1.0),
];

pub(super) const ASINH: Points = &[
    (1.013_279e-6, 1.013_279e-6),
    (6.103_515_6e-5, 6.103_515_6e-5),
    (9.765_625e-4, 9.765_623e-4),
    (0.031_25, 0.031_244_916),
    (0.875, 0.790_168_7),
    (-2.5, -1.647_231_1),
    (-40.0, -4.382_182_8),
    (57_344.0, 11.649_971),
];

pub(super) const ACOSH: Points = &[
    (1.0625, 0.351_737_4),
    (2.5, 1.566_799_2),
    (11.5, 3.133_598_6),
    (256.0, 6.238_321),
    (57_344.0, 11.649_971),
];

pub(super) const ATANH: Points = &[
    (1.013_279e-6, 1.013_279e-6),
    (6.103_515_6e-5, 6.103_515_6e-5),
    (9.765_625e-4, 9.765_628e-4),
    (0.031_25, 0.031_260_178),
    (0.3125, 0.323_313_6),
    (-0.875, -1.354_025_1),
    (0.9375, 1.716_993_6),
];

/// A backend, its device, a float type and an operation.
type Key = (TypeId, DeviceId, DType, &'static str);

static KNOWN: LazyLock<RwLock<HashMap<Key, bool>>> = LazyLock::new(RwLock::default);

/// Whether the backend computes a function in this type with at most one rounding of a low type,
/// rather than with a kernel or a formula that loses more. Asked once for each device: the function
/// of a few points is read from it. A backend without data answers for the device that it stands
/// for.
pub(super) fn is_exact<B: Backend>(
    operation: &'static str,
    device: &B::Device,
    dtype: DType,
    function: fn(FloatTensor<B>) -> FloatTensor<B>,
    points: Points,
) -> bool {
    let key = (TypeId::of::<B>(), device.id(), dtype, operation);
    let known = KNOWN.read().get(&key).copied();
    known.unwrap_or_else(|| {
        let probe = unseen(|| probe::<B>(device, dtype, function, points));
        let answer = match probe {
            Probed::Read { is_exact } => is_exact,
            Probed::NoData => !is_inexact(device.id(), operation),
        };
        KNOWN.write().insert(key, answer);
        answer
    })
}

/// What the function of a few points is.
enum Probed {
    /// Numbers; whether each is within a rounding of the exact one.
    Read { is_exact: bool },
    /// Only zeros: the backend has no data.
    NoData,
}

fn probe<B: Backend>(
    device: &B::Device,
    dtype: DType,
    function: fn(FloatTensor<B>) -> FloatTensor<B>,
    points: Points,
) -> Probed {
    let operands: Vec<f32> = points.iter().map(|(x, _)| *x).collect();
    let data = TensorData::new(operands, [points.len()]);
    let x = B::float_cast(B::float_from_data(data, device), dtype.into());
    let Some(Ok(data)) = try_read_sync(B::float_into_data(function(x))) else {
        return Probed::Read { is_exact: false };
    };
    let found: Vec<f32> = data.convert::<f32>().into_vec().expect("just converted");
    if found.iter().all(|x| *x == 0.0) {
        return Probed::NoData;
    }
    let own = dtype.finfo().expect("a float type");
    let smallest = own.min_positive * own.epsilon;
    let rounding = own.epsilon.max(FloatDType::F16.finfo().epsilon);
    let is_near = |(found, (_, exact)): (&f32, &(f32, f32))| {
        let (found, exact) = (f64::from(*found), f64::from(*exact));
        (found - exact).abs() <= rounding * exact.abs() + smallest
    };
    Probed::Read {
        is_exact: found.iter().zip(points).all(is_near),
    }
}
