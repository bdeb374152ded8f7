//! The generator of random numbers in a record.

use burn::tensor::{Distribution, Tensor, backend::Backend};
use serde_json::{Value, json};

use crate::record::TrainingState;

impl TrainingState {
    /// With what is needed to draw on from here: for dropout and the like, in a loop that saves with a
    /// [`Recorder`](crate::Recorder).
    ///
    /// No backend of Burn 0.21 gives its generator's state out, so a new seed is drawn from it, and the generator is seeded with that.
    /// A training that goes on and one that [`resumes`](Self::seed_generator) then draw the same, and a training that saves at
    /// the same steps without a break does, too. One that does not save draws other numbers from here on.
    ///
    /// A backend has one generator a process. So this is exact where a process is a rank; ranks that are threads draw from the
    /// same one in an order that no record can restore. Generators of one's own, such as a loader's, are the caller's to save, in
    /// [`user`](Self::user) or as functions of the step.
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
