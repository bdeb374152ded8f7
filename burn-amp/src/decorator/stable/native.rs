//! Whether a backend has a GELU of its own.

use std::any::TypeId;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::LazyLock;

use burn::tensor::try_read_sync;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, DeviceId, DeviceOps, TensorData, TensorMetadata};
use burn_decorator::simulated::composes_gelu;
use parking_lot::RwLock;

/// A backend, its device and a low type.
type Key = (TypeId, DeviceId, DType);

static KNOWN: LazyLock<RwLock<HashMap<Key, bool>>> = LazyLock::new(RwLock::default);

thread_local! {
    /// The last answer.
    static LAST: Cell<Option<(Key, bool)>> = const { Cell::new(None) };
}

/// Where the default's sum of 1 and a rounded erf has lost most of its digits.
const PROBES: [f32; 4] = [-3.5, -3.25, -2.75, -2.5];
const EXACT: [f32; 4] = [-8.142_2e-4, -1.875_3e-3, -8.194_3e-3, -1.552_416_3e-2];

/// Whether the backend computes GELU in the type of this low tensor with one rounding, and so has a
/// kernel of its own rather than Burn's default, which rounds after each of its operations. Asked
/// once for each device: four numbers are read from it. A backend without data answers for the
/// device that it stands for.
pub(super) fn has_gelu<B: Backend>(tensor: &FloatTensor<B>) -> bool {
    let device = B::float_device(tensor);
    let key = (TypeId::of::<B>(), device.id(), tensor.dtype());
    if let Some((last, answer)) = LAST.get()
        && last == key
    {
        return answer;
    }
    let known = KNOWN.read().get(&key).copied();
    let answer = known.unwrap_or_else(|| probe::<B>(&device, tensor.dtype()));
    KNOWN.write().insert(key, answer);
    LAST.set(Some((key, answer)));
    answer
}

fn probe<B: Backend>(device: &B::Device, low: DType) -> bool {
    let data = TensorData::new(PROBES.to_vec(), [PROBES.len()]);
    let x = B::float_cast(B::float_from_data(data, device), low.into());
    let Some(Ok(data)) = try_read_sync(B::float_into_data(B::gelu(x))) else {
        return false;
    };
    let found: Vec<f32> = data.convert::<f32>().into_vec().expect("just converted");
    let tolerance = low.finfo().expect("a float type").epsilon as f32;
    let is_near = |(found, exact): (&f32, &f32)| (found - exact).abs() <= tolerance * exact.abs();
    if found.iter().all(|x| *x == 0.0) {
        return !composes_gelu(device.id());
    }
    found.iter().zip(&EXACT).all(is_near)
}
