//! Random numbers of dropout are kept as bits.

use std::sync::Mutex;

use burn::backend::Autodiff;
use burn::tensor::{DType, Distribution, Tensor};
use burn_checkpoint::{Policy, Remat, RematStats, checkpoint, checkpoint_with};
use burn_flex::Flex;

use crate::block::Block;
use crate::models::generator;

type B = Autodiff<Remat<Flex>>;

/// Bytes that 12 recomputed blocks hold when backward begins.
fn held(dropout: f64) -> u64 {
    let _generator = generator();
    let device = Default::default();
    RematStats::reset_thread();
    let x = Tensor::<B, 2>::random([256, 64], Distribution::Default, &device);
    let blocks: Vec<_> = (0..12)
        .map(|_| Block::<B>::new(64, 256, dropout, &device))
        .collect();
    let y = blocks
        .iter()
        .fold(x, |x, block| checkpoint(|| block.forward(x)));
    let held = RematStats::of_thread().live_bytes;
    drop(y.sum().backward());
    held
}

/// A draw comes back bit for bit, of each type, and takes a bit a number meanwhile; a remainder of
/// eight is filled up.
#[test]
fn the_same_numbers_come_back() {
    let _generator = generator();
    let policies = [Policy::Recompute, Policy::KeepCompute, Policy::Offload];
    let dtypes = [DType::F64, DType::F32, DType::F16, DType::BF16];
    for (policy, dtype) in policies
        .into_iter()
        .flat_map(|x| dtypes.map(|y| (x.clone(), y)))
    {
        for columns in [4096, 4099_usize] {
            let mut drawn = None;
            let held = Mutex::new(None);
            RematStats::reset_thread();
            let ones = Tensor::<Remat<Flex>, 2>::ones([3, columns], (&Default::default(), dtype));
            let y = checkpoint_with(policy.clone(), || {
                let draw = ones.random_like(Distribution::Bernoulli(0.9));
                drawn = Some(draw.to_data());
                let y = draw.clone().neg();
                *held.lock().expect("no panic") = Some(draw);
                y
            });
            let draw = held.into_inner().expect("no panic").expect("held");
            let stats = RematStats::of_thread();
            let bits = (3 * columns).div_ceil(8) as u64;
            let result = (3 * columns * dtype.size()) as u64;
            // Under `Offload` too: nothing but bits is worth a copy to the host.
            let on_host = stats.offloaded_bytes;
            assert_eq!(
                stats.live_bytes + on_host,
                result + bits,
                "{policy:?} {dtype:?}"
            );
            assert_eq!(Some(draw.into_data()), drawn, "{policy:?} {dtype:?}");
            drop(y);
        }
    }
}

#[test]
fn every_block_recomputed_with_dropout() {
    let (without, with) = (held(0.0), held(0.1));
    println!("{without} B without, {with} B with");
    // A bit for each of 256 x 64 numbers a block.
    assert_eq!(with - without, 12 * 256 * 64 / 8);
    assert!(with as f64 <= 1.10 * without as f64, "{with} of {without}");
}
