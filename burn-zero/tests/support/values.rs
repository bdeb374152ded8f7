//! Numbers that are the same in every process.

/// Numbers between -0.5 and 0.5 that look random.
pub fn values(elements: usize, seed: usize) -> Vec<f32> {
    let mut state = (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    std::iter::repeat_with(next).take(elements).collect()
}
