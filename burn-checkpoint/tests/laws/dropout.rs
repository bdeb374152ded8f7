//! Random numbers of dropout are kept as booleans.

use burn::backend::Autodiff;
use burn::tensor::{Distribution, Tensor};
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

/// What is dropped comes back bit for bit, in each policy.
#[test]
fn the_same_numbers_come_back() {
    let _generator = generator();
    for policy in [Policy::Recompute, Policy::KeepCompute, Policy::Offload] {
        let mut bits = None;
        let held = std::sync::Mutex::new(None);
        RematStats::reset_thread();
        let y = checkpoint_with(policy.clone(), || {
            let ones = Tensor::<Remat<Flex>, 1>::ones([50_000], &Default::default());
            let draw = ones.random_like(Distribution::Bernoulli(0.9));
            bits = Some(draw.to_data());
            let y = draw.clone().neg();
            *held.lock().expect("no panic") = Some(draw);
            y
        });
        let draw = held.into_inner().expect("no panic").expect("held");
        let stats = RematStats::of_thread();
        match policy {
            Policy::Offload => assert_eq!(stats.offloaded_bytes, 200_000, "{stats:?}"),
            // The result, and the booleans.
            _ => assert_eq!(stats.live_bytes, 200_000 + 50_000, "{policy:?}: {stats:?}"),
        }
        assert_eq!(Some(draw.into_data()), bits, "{policy:?}");
        drop(y);
    }
}

#[test]
fn every_block_recomputed_with_dropout() {
    let (without, with) = (held(0.0), held(0.1));
    println!("{without} B without, {with} B with");
    assert!(with > without);
    // A draw of 256 x 64 numbers a block, beside its result of as many numbers of four bytes.
    assert!(with <= without * 10 / 8, "{with} of {without}");
}
