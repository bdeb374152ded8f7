//! Random numbers as functions of a seed and an index.

/// Of one output of SplitMix64 to the next.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The `index`-th output of SplitMix64 (Steele, Lea and Flood 2014) from this seed, without those
/// before it: the same on every machine.
///
/// ```
/// use burn_decorator::split_mix::output;
///
/// assert_eq!(output(7, 3), output(7, 3));
/// assert_ne!(output(7, 3), output(7, 4));
/// ```
pub fn output(seed: u64, index: u64) -> u64 {
    mixed(seed.wrapping_add(index.wrapping_add(1).wrapping_mul(STEP)))
}

/// The finalizer of SplitMix64: each bit of the result depends on all bits of `x`.
pub fn mixed(x: u64) -> u64 {
    let high = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let low = (high ^ (high >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    low ^ (low >> 31)
}
