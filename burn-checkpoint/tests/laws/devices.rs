//! Two devices on one thread: each has its limit.

use burn::tensor::Tensor;
use burn::tensor::{Distribution, TensorData};
use burn_checkpoint::{MemoryBudget, Policy, Remat, RematStats, checkpoint_with};

use crate::apart::InstallApart;
use crate::models::generator;
use crate::probe::{Probe, take_counts, watched};
use crate::twin::{Twin, TwinDevice};

type B = Remat<Twin>;

const FIRST: TwinDevice = TwinDevice(0);
const SECOND: TwinDevice = TwinDevice(1);

/// Bytes of a tensor here.
const BYTES: u64 = 4 * 64;

/// A limit for so many: a little more, for what is evicted is a little more than has to be.
fn limit(tensors: u64) -> MemoryBudget {
    MemoryBudget::bytes(tensors * BYTES + BYTES / 2)
}

fn input(device: &TwinDevice) -> Tensor<B, 1> {
    let values: Vec<f32> = (0..64).map(|x| x as f32 * 0.01).collect();
    Tensor::from_data(TensorData::from(values.as_slice()), device)
}

fn of(device: &TwinDevice) -> RematStats {
    RematStats::of_device::<B>(device)
}

/// Room is made where the result will be: on the operands' device, whichever was used or made last.
#[test]
fn each_device_keeps_its_own_limit() {
    let inputs = [input(&FIRST), input(&SECOND)];
    RematStats::reset_thread();
    let budget = limit(4).install_apart();
    // The second is full; what happens on the first does not matter to it.
    let mut held = [Vec::new(), Vec::new()];
    for round in 0..10 {
        for (device, held) in held.iter_mut().enumerate() {
            let last = held.last().unwrap_or(&inputs[device]).clone();
            held.push(if round % 2 == 0 {
                last.cos()
            } else {
                last.sin()
            });
        }
        for device in [FIRST, SECOND] {
            let stats = of(&device);
            let full = BYTES * (round + 1).min(4);
            assert_eq!(stats.live_bytes, full, "{device:?}, {round}: {stats:?}");
            assert_eq!(stats.peak_bytes, full, "{device:?}, {round}: {stats:?}");
        }
    }
    for device in [FIRST, SECOND] {
        assert_eq!(of(&device).evicted_operations, 6, "{device:?}");
    }
    assert_eq!(budget.limit_bytes(), [Some(4 * BYTES + BYTES / 2); 2]);
    assert_eq!(budget.live_bytes(), 8 * BYTES);
    let [first, second] = held.map(|held| held.last().expect("ten").clone().into_data());
    assert_eq!(first, second);
}

/// An operation whose operands are none that a budget knows: parameters.
#[test]
fn room_for_the_first_operation_on_a_parameter() {
    let inputs = [input(&FIRST), input(&SECOND)];
    let _budget = limit(2).install_apart();
    let mut held = Vec::new();
    for _ in 0..3 {
        // The second device is the one that was met last, whenever the first needs room.
        held.push(inputs[0].clone().cos());
        held.push(inputs[1].clone().cos());
    }
    for device in [FIRST, SECOND] {
        assert_eq!(of(&device).peak_bytes, 2 * BYTES, "{device:?}");
        assert_eq!(of(&device).evicted_operations, 1, "{device:?}");
    }
}

/// A copy to another device takes room there, not here.
#[test]
fn room_for_what_moves() {
    let x = input(&FIRST);
    let _budget = limit(2).install_apart();
    let here = [x.clone().cos(), x.clone().sin()];
    let there: Vec<_> = (0..3).map(|_| x.clone().to_device(&SECOND)).collect();
    assert_eq!(of(&FIRST).evicted_operations, 0);
    assert_eq!(of(&SECOND).evicted_operations, 1);
    assert_eq!(of(&SECOND).peak_bytes, 2 * BYTES);
    assert_eq!(there[0].device(), SECOND);
    assert_eq!(there[0].to_data(), x.to_data());
    drop((here, there));
}

/// An operation for which a device has no memory evicts there, whichever device was met last: with
/// operands, without, with random numbers.
#[test]
fn room_is_made_on_the_device_that_has_no_memory() {
    type Probed = Remat<Probe<Twin>>;
    let one = |device| Tensor::<Probed, 1>::ones([64], device);
    let _one = generator();
    for full in ["float_exp", "float_zeros", "float_random"] {
        let _budget = MemoryBudget::bytes(1 << 40).retrying().install_apart();
        let here: Vec<_> = (0..8).map(|_| one(&FIRST).cos()).collect();
        let there: Vec<_> = (0..8).map(|_| one(&SECOND).cos()).collect();
        let is_full = move |op| {
            let live = of(&FIRST).live_bytes;
            assert!(op != full || live < 6 * BYTES, "out of memory in {op}");
        };
        let result = watched(is_full, || match full {
            "float_exp" => here[0].clone().exp(),
            "float_zeros" => Tensor::zeros([64], &FIRST),
            _ => Tensor::random([64], Distribution::Default, &FIRST),
        });
        assert_eq!(result.device(), FIRST);
        assert_eq!(of(&SECOND).evicted_operations, 0, "{full}");
        assert_eq!(here[7].to_data(), there[7].to_data());
    }
}

/// New tensors say where they will be, and how large they are, before they are made.
#[test]
fn room_for_new_tensors() {
    let _generator = generator();
    let x = input(&FIRST);
    let data = x.to_data();
    let made: [fn(&TensorData) -> Tensor<B, 1>; 5] = [
        |_| Tensor::random([64], Distribution::Default, &FIRST),
        |_| Tensor::zeros([64], &FIRST),
        |_| Tensor::full([64], 0.5, &FIRST),
        |_| Tensor::arange(0..64, &FIRST).float(),
        |data| Tensor::from_data(data.clone(), &FIRST),
    ];
    for (number, make) in made.into_iter().enumerate() {
        let _budget = limit(2).install_apart();
        let there = input(&SECOND).sin();
        let held = [x.clone().cos(), x.clone().sin()];
        let new = make(&data);
        let stats = of(&FIRST);
        assert!(stats.evicted_operations > 0, "{number}: {stats:?}");
        assert_eq!(stats.peak_bytes, 2 * BYTES, "{number}: {stats:?}");
        assert_eq!(of(&SECOND).evicted_operations, 0, "{number}");
        drop((there, held, new));
    }
}

/// What a scope moves is read in one transaction a device.
#[test]
fn each_device_is_read_by_itself() {
    type Probed = Remat<Probe<Twin>>;
    take_counts();
    let mut kept = Vec::new();
    checkpoint_with(Policy::Offload, || {
        for device in [FIRST, SECOND, FIRST, SECOND] {
            kept.push(Tensor::<Probed, 1>::zeros([64], &device).cos());
        }
    });
    assert_eq!(take_counts()["tr_execute"], 2);
    for (kept, device) in kept.into_iter().zip([FIRST, SECOND, FIRST, SECOND]) {
        assert_eq!(kept.device(), device);
        assert_eq!(kept.into_data(), TensorData::from([1f32; 64]));
    }
    assert_eq!(
        take_counts().get("float_cos"),
        None,
        "they came from the host"
    );
}
