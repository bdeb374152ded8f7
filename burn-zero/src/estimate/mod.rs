//! What a rank holds and sends, by the formulas.

mod table;

pub use table::EstimateTable;

use serde::{Deserialize, Serialize};

use crate::{Memory, OptimizerOffload, ZeroConfig};

/// What a model and its optimizer need for each parameter, before anything is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelStates {
    /// Parameters of the model that are trained.
    pub elements: u64,
    /// In which types they live.
    pub layout: StateLayout,
    /// Optimizer state of one parameter: 8 for Adam's moments, 4 for a momentum, 0 for plain SGD.
    pub optimizer_bytes: u64,
}

/// Types of parameters and gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateLayout {
    /// What is true here: parameters and gradients are f32, the parameters are their own masters, and autocast's
    /// low-precision copies live no longer than the operation (or, cached, the forward pass) that reads them. With Adam 16
    /// bytes a parameter, `8 + 8/N` at stage 1, `4 + 12/N` at stage 2.
    #[default]
    F32,
    /// What the paper counts (arXiv 1910.02054, section 3.1): parameters and gradients of 16 bits, and an f32 master as part
    /// of the optimizer's state. With Adam 16 bytes a parameter, `4 + 12/N` at stage 1, `2 + 14/N` at stage 2. To compare
    /// with DeepSpeed; nothing here trains this way.
    MixedPrecision,
}

impl StateLayout {
    /// Bytes of a parameter on the device, and of a gradient.
    fn element_bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::MixedPrecision => 2,
        }
    }

    /// Bytes of a master parameter beside it on the device.
    fn master_bytes(self) -> u64 {
        match self {
            Self::F32 => 0,
            Self::MixedPrecision => 4,
        }
    }
}

impl ModelStates {
    /// f32 parameters under Adam or AdamW.
    pub fn adam(elements: u64) -> Self {
        Self {
            elements,
            layout: StateLayout::F32,
            optimizer_bytes: 8,
        }
    }
}

/// What the rank with the most holds and sends. Activations are not part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Estimate {
    /// Parameters of all buckets with their padding: each bucket is padded to a multiple of the ranks.
    pub padded_elements: u64,
    /// Parameters of the rank's shard, padding included.
    pub shard_elements: u64,
    /// Parameters on the device.
    pub parameter_bytes: u64,
    /// Gradients on the device at the end of backward. At stage 2 the rank's shard; none where they go to the host
    /// ([`Memory::Host`]).
    pub gradient_bytes: u64,
    /// Optimizer state on the device, master parameters of [`StateLayout::MixedPrecision`] included.
    pub optimizer_bytes: u64,
    /// One bucket of gradients, which comes on top while it is sent, to other ranks or to the host.
    pub bucket_bytes: u64,
    /// Optimizer state and f32 master parameters in host memory.
    pub host_bytes: u64,
    /// Gradients in host memory at the end of backward.
    pub host_gradient_bytes: u64,
    /// Elements that the rank sends to other ranks for one update: `2 P (N - 1) / N`, which the paper rounds to `2 P`
    /// (section 7.1). Stage 2 reduces each accumulated micro-batch: `(k + 1) P (N - 1) / N`.
    pub sent_elements: u64,
    /// Bytes from the device to the host for one update: gradients, f32. Those that go there during backward do so in each
    /// accumulated micro-batch.
    pub downloaded_bytes: u64,
    /// Bytes from the host to the device for one update: parameters.
    pub uploaded_bytes: u64,
}

impl Estimate {
    /// On the device, all that stays through a step: parameters, gradients, optimizer state.
    pub fn device_bytes(&self) -> u64 {
        self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
    }

    /// On the device at the highest.
    pub fn peak_device_bytes(&self) -> u64 {
        self.device_bytes() + self.bucket_bytes
    }
}

/// What a rank of `world_size` will hold and send, before anything is built.
///
/// ```
/// use burn_zero::{ModelStates, Stage, ZeroConfig, estimate};
///
/// let model = ModelStates::adam(1_000_000_000);
/// let config = ZeroConfig { stage: Stage::Gradients, ..Default::default() };
/// let estimate = estimate(&model, &config, 4);
/// // 4 + 12/4 bytes a parameter instead of 16, and a bucket of 2^23 gradients on top.
/// assert_eq!(estimate.device_bytes(), 7_000_000_000);
/// assert_eq!(estimate.peak_device_bytes(), 7_000_000_000 + (4 << 23));
/// // Three quarters of 2 P.
/// assert_eq!(estimate.sent_elements, 1_500_000_000);
/// ```
///
/// A world of 0 ranks is taken for 1.
pub fn estimate(model: &ModelStates, config: &ZeroConfig, world_size: usize) -> Estimate {
    let ranks = (world_size as u64).max(1);
    let bucket_elements = config.sharding().bucket_elements as u64;
    let padded = padded(model.elements, bucket_elements, ranks);
    let shard = padded / ranks;
    let states = if config.stage.shards_optimizer_state() {
        shard
    } else {
        model.elements
    };
    let gradients = if config.stage.shards_gradients() {
        shard
    } else {
        model.elements
    };
    let offloaded = offloaded(states, &config.offload_optimizer);
    let memory = config.sharding().gradients;

    let element_bytes = model.layout.element_bytes();
    let state_bytes = model.optimizer_bytes + model.layout.master_bytes();
    let transfers = ranks > 1 || offloaded > 0;
    let bucket = if transfers {
        bucket_elements.min(model.elements)
    } else {
        0
    };
    let steps = config.batch.gradient_accumulation_steps.unwrap_or(1);
    let reductions = if config.stage.shards_gradients() {
        steps
    } else {
        1
    };
    let gradient_bytes = element_bytes * gradients;
    let (on_device, on_host, downloaded) = match memory {
        Memory::Device => (gradient_bytes, 0, offloaded),
        Memory::Host => (0, gradient_bytes, steps * model.elements),
    };
    Estimate {
        padded_elements: padded,
        shard_elements: shard,
        parameter_bytes: element_bytes * model.elements,
        gradient_bytes: on_device,
        optimizer_bytes: state_bytes * (states - offloaded),
        bucket_bytes: element_bytes * bucket,
        host_bytes: (model.optimizer_bytes + 4) * offloaded,
        host_gradient_bytes: on_host,
        sent_elements: (reductions + 1) * (padded - shard),
        downloaded_bytes: element_bytes * downloaded,
        uploaded_bytes: element_bytes * offloaded,
    }
}

/// `elements` in buckets of `bucket`, each padded to a multiple of `ranks`.
fn padded(elements: u64, bucket: u64, ranks: u64) -> u64 {
    let bucket = bucket.clamp(1, elements.max(1));
    let rest = elements % bucket;
    elements / bucket * bucket.next_multiple_of(ranks) + rest.next_multiple_of(ranks)
}

fn offloaded(elements: u64, offload: &OptimizerOffload) -> u64 {
    let part = elements as f64 * offload.ratio();
    (part.round() as u64).min(elements)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{BatchConfig, Stage};

    const P: u64 = 840_000; // a multiple of 1 to 8

    fn config(stage: Stage) -> ZeroConfig {
        ZeroConfig {
            stage,
            ..Default::default()
        }
    }

    #[test]
    fn bytes_are_those_of_the_paper() {
        for ranks in 1..=8 {
            let bytes = |layout, stage| {
                let model = ModelStates {
                    layout,
                    ..ModelStates::adam(P)
                };
                estimate(&model, &config(stage), ranks as usize).device_bytes()
            };
            let mixed = |stage| bytes(StateLayout::MixedPrecision, stage);
            assert_eq!(mixed(Stage::DataParallel), 16 * P);
            assert_eq!(mixed(Stage::OptimizerState), 4 * P + 12 * P / ranks);
            assert_eq!(mixed(Stage::Gradients), 2 * P + 14 * P / ranks);
            let single = |stage| bytes(StateLayout::F32, stage);
            assert_eq!(single(Stage::DataParallel), 16 * P);
            assert_eq!(single(Stage::OptimizerState), 8 * P + 8 * P / ranks);
            assert_eq!(single(Stage::Gradients), 4 * P + 12 * P / ranks);
        }
    }

    #[test]
    fn two_p_elements_are_sent() {
        for ranks in 1..=8 {
            for stage in Stage::ALL {
                let sent =
                    estimate(&ModelStates::adam(P), &config(stage), ranks as usize).sent_elements;
                assert_eq!(sent, 2 * P * (ranks - 1) / ranks);
            }
        }
        let batch = BatchConfig {
            gradient_accumulation_steps: Some(4),
            ..Default::default()
        };
        let sent = |stage| {
            let config = ZeroConfig {
                batch,
                ..config(stage)
            };
            estimate(&ModelStates::adam(P), &config, 2).sent_elements
        };
        assert_eq!(sent(Stage::OptimizerState), P);
        assert_eq!(sent(Stage::Gradients), 5 * P / 2);
    }

    #[test]
    fn offload_moves_the_state_to_the_host() {
        let host = |ratio| ZeroConfig {
            offload_optimizer: OptimizerOffload::Host {
                ratio,
                pin_memory: false,
            },
            ..config(Stage::Gradients)
        };
        let whole = estimate(&ModelStates::adam(P), &host(1.0), 4);
        assert_eq!((whole.optimizer_bytes, whole.host_bytes), (0, 12 * P / 4));
        assert_eq!((whole.gradient_bytes, whole.host_gradient_bytes), (0, P));
        // The gradients of all parameters go down, to be reduced there.
        assert_eq!((whole.downloaded_bytes, whole.uploaded_bytes), (4 * P, P));
        let half = estimate(&ModelStates::adam(P), &host(0.5), 4);
        assert_eq!((half.optimizer_bytes, half.host_bytes), (P, 6 * P / 4));
        // A part of them would go back to the device.
        assert_eq!((half.gradient_bytes, half.host_gradient_bytes), (P, 0));
        assert_eq!((half.downloaded_bytes, half.uploaded_bytes), (P / 2, P / 2));
        // One rank alone: the device holds parameters, and a bucket of gradients on its way.
        let alone = ZeroConfig {
            stage: Stage::DataParallel,
            reduce_bucket_size: 1000,
            ..host(1.0)
        };
        let alone = estimate(&ModelStates::adam(P), &alone, 1);
        assert_eq!(
            (alone.peak_device_bytes(), alone.host_bytes),
            (4 * P + 4000, 12 * P)
        );
        assert_eq!(alone.sent_elements, 0);
    }

    #[test]
    fn padding_is_by_bucket() {
        assert_eq!(padded(10, 4, 3), 6 + 6 + 3);
        assert_eq!(padded(10, 100, 4), 12);
        assert_eq!(padded(0, 100, 4), 0);
        assert_eq!(padded(10, 0, 1), 10);
    }

    proptest! {
        #[test]
        fn padding_is_less_than_a_rank_a_bucket(elements in 0u64..1 << 40, bucket in 1u64..1 << 32, ranks in 1u64..2048) {
            let padded = padded(elements, bucket, ranks);
            prop_assert_eq!(padded % ranks, 0);
            prop_assert!(padded >= elements);
            prop_assert!(padded - elements <= elements.div_ceil(bucket) * (ranks - 1));
        }
    }
}
