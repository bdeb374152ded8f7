//! The generator of random numbers in a record.

use burn::tensor::{Distribution, Tensor, backend::Backend};
use serde_json::{Value, json};

use crate::record::TrainingState;

impl TrainingState {
    /// Adds the state of the backend's generator, for dropout and the like, in a loop that saves with a
    /// [`Recorder`](crate::Recorder).
    ///
    /// No backend of Burn 0.21 exposes its generator's state, so a new seed is drawn, saved, and given to the generator.
    /// A training that continues and one that [`resumes`](Self::seed_generator) then draw the same numbers, if they save at
    /// the same steps. A training that does not save draws other numbers from here on.
    ///
    /// A backend has one generator a process. So this is exact where a process is a rank; ranks that are threads draw from the
    /// same one in an order that no record can restore. The caller saves other generators, such as a loader's, in
    /// [`user`](Self::user), or derives them from the step.
    #[must_use]
    pub fn with_generator<B: Backend>(mut self, device: &B::Device) -> Self {
        let seed = draw_seed::<B>(device);
        B::seed(device, seed);
        self.generator = json!({ SEED: seed });
        self
    }

    /// Seeds the generator of the backend as [`with_generator`](Self::with_generator) did. Whether there was a seed: there is none at
    /// another number of ranks, where the caller seeds each rank anew.
    pub fn seed_generator<B: Backend>(&self, device: &B::Device) -> bool {
        let seed = self.generator.get(SEED).and_then(Value::as_u64);
        if let Some(seed) = seed {
            B::seed(device, seed);
        }
        seed.is_some()
    }
}

const SEED: &str = "seed";

/// 64 bits, 16 from each number: an f32 holds them exactly.
fn draw_seed<B: Backend>(device: &B::Device) -> u64 {
    const VALUES: f64 = 65_536.0;
    let numbers = Tensor::<B, 1>::random([4], Distribution::Uniform(0.0, VALUES), device);
    let numbers = numbers.into_data();
    let bits = numbers
        .iter::<f64>()
        .map(|number| number.min(VALUES - 1.0) as u64);
    bits.fold(0, |seed, bits| seed << 16 | bits)
}
