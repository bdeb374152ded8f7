//! What a rank holds and sends, by the formulas.

mod table;

pub use table::EstimateTable;

use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;
use serde::{Deserialize, Serialize};

use crate::optimizer::Parameters;
use crate::shard::Bucket;
use crate::{Memory, OptimizerOffload, ShardMap, Stage, ZeroConfig};

/// What a model and its optimizer need for each element, before anything is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelStates {
    /// Elements of the parameters that are trained.
    pub elements: u64,
    /// In which types they live.
    pub layout: StateLayout,
    /// Optimizer state of one element, in bytes: 8 for Adam's moments, 4 for a momentum, 0 for plain SGD.
    pub optimizer_bytes: u64,
    /// Elements of the largest parameter; 0 if none is larger than a bucket. [`estimate_map`] takes the map's.
    pub largest_parameter: u64,
}

/// Types of parameters and gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateLayout {
    /// What autocast trains: parameters and gradients are f32, the parameters are their own masters, and low-precision copies
    /// live no longer than the operation (or, cached, the forward pass) that reads them. With Adam 16 bytes an element,
    /// `8 + 8/N` at stage 1, `4 + 12/N` at stage 2.
    #[default]
    F32,
    /// What the paper counts (arXiv 1910.02054, section 3.1): parameters and gradients of 16 bits, and an f32 master as part
    /// of the optimizer's state. With Adam 16 bytes an element, `4 + 12/N` at stage 1, `2 + 14/N` at stage 2.
    ///
    /// With the state on the host it is what [`OffloadedAdamW`](crate::OffloadedAdamW) makes of a model in bf16 or f16: 2 bytes
    /// an element on the device, and as many for gradients that do not leave during backward, and `12/N` on the host. With the state on the device nothing here trains so; it is there to
    /// compare with DeepSpeed.
    MixedPrecision,
}

impl StateLayout {
    /// Bytes of an element of a parameter on the device, and of a gradient.
    fn element_bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::MixedPrecision => 2,
        }
    }

    /// Bytes of a master's element beside it on the device.
    fn master_bytes(self) -> u64 {
        match self {
            Self::F32 => 0,
            Self::MixedPrecision => 4,
        }
    }
}

impl ModelStates {
    /// The parameters of `module` that require gradients, in f32 under Adam or AdamW; one that it holds twice counts once.
    ///
    /// ```
    /// use burn::backend::Autodiff;
    /// use burn::nn::LinearConfig;
    /// use burn_flex::Flex;
    /// use burn_zero::ModelStates;
    ///
    /// type B = Autodiff<Flex>;
    /// let linear = LinearConfig::new(100, 10).init::<B>(&Default::default());
    /// let model = ModelStates::of::<B, _>(&linear);
    /// assert_eq!((model.elements, model.largest_parameter), (1010, 1000));
    /// ```
    pub fn of<B: AutodiffBackend, M: AutodiffModule<B>>(module: &M) -> Self {
        let parameters = Parameters::of::<B, M>(module).list;
        let sizes = || {
            parameters
                .iter()
                .map(|parameter| parameter.elements() as u64)
        };
        Self {
            largest_parameter: sizes().max().unwrap_or(0),
            ..Self::adam(sizes().sum())
        }
    }

    /// f32 parameters under Adam or AdamW, none of them larger than a bucket.
    pub fn adam(elements: u64) -> Self {
        Self {
            elements,
            layout: StateLayout::F32,
            optimizer_bytes: 8,
            largest_parameter: 0,
        }
    }
}

/// What a rank holds and sends at most: of each field that of the rank with the most. Activations are not part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Estimate {
    /// Elements of all buckets with their padding: each bucket is padded to a multiple of the ranks.
    pub padded_elements: u64,
    /// Elements of the rank's shard, padding included.
    pub shard_elements: u64,
    /// Parameters on the device.
    pub parameter_bytes: u64,
    /// Gradients on the device at the end of backward. At stage 2 the rank's shard; none where they go to the host
    /// ([`Memory::Host`]).
    pub gradient_bytes: u64,
    /// Gradients on the device beyond those during backward: where they leave it (at stage 2, and with [`Memory::Host`] in every
    /// stage) three buckets, one that backward fills, one that waits and one that is being copied into the buffer that is sent, or to
    /// the host. Nothing otherwise: all are there until the step.
    pub underway_bytes: u64,
    /// The gradient of the largest parameter, if that fills several buckets: in all stages it is there whole until the last of it is
    /// reduced, beside what is.
    pub spanning_bytes: u64,
    /// Sums of the micro-batches before, if gradients are accumulated: they are there beside the gradients of the last, in host memory
    /// if those are.
    pub window_bytes: u64,
    /// Copies of the rank's pieces of the parameters, during a step of stages 1 and 2.
    pub piece_bytes: u64,
    /// Optimizer state on the device, master parameters of [`StateLayout::MixedPrecision`] included.
    pub optimizer_bytes: u64,
    /// One bucket in the type in which it is sent, in host memory.
    pub buffer_bytes: u64,
    /// Optimizer state and f32 master parameters in host memory.
    pub host_bytes: u64,
    /// Gradients in host memory at the end of backward.
    pub host_gradient_bytes: u64,
    /// Elements that the rank sends to other ranks for one update: `2 P (N - 1) / N`, which the paper rounds to `2 P`
    /// (section 7.1). Stage 2 reduces each accumulated micro-batch: `(k + 1) P (N - 1) / N`.
    pub sent_elements: u64,
    /// The same in bytes: gradients in the type of communication, parameters in their own (in stage 0, where only gradients
    /// are sent, all in the former). What ranks tell each other besides is some hundred bytes a collective.
    pub sent_bytes: u64,
    /// Bytes from the device to the host for one update, because the optimizer's state is there: gradients, in their own type.
    /// Where they go during backward ([`Memory::Host`]) it is those of all parameters, in each accumulated micro-batch; otherwise
    /// with several ranks all go down besides, on their way to other ranks.
    pub downloaded_bytes: u64,
    /// Bytes from the host to the device for one update, because the optimizer's state is there: parameters, in their own type.
    /// None where several ranks gather them (stages 1 and 2): all parameters come up from those, wherever the state is.
    pub uploaded_bytes: u64,
}

impl Estimate {
    /// On the device, all that stays through a step: parameters, gradients, optimizer state. The paper's figure.
    pub fn device_bytes(&self) -> u64 {
        self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
    }

    /// Gradients on the device at their peak, during backward.
    pub fn peak_gradient_bytes(&self) -> u64 {
        let window = if self.gradients_on_host() {
            0
        } else {
            self.window_bytes
        };
        self.gradient_bytes + self.underway_bytes + self.spanning_bytes + window
    }

    /// In host memory: the optimizer's state and masters, gradients and their sums. The [buffer](Self::buffer_bytes) comes on top.
    pub fn kept_host_bytes(&self) -> u64 {
        let window = if self.gradients_on_host() {
            self.window_bytes
        } else {
            0
        };
        self.host_bytes + self.host_gradient_bytes + window
    }

    fn gradients_on_host(&self) -> bool {
        self.host_gradient_bytes > 0
    }

    /// On the device at the highest, be it in backward or in the step. Burn's `Learner` keeps the parameters from before a step until
    /// it is over: with it there are once more [`parameter_bytes`](Self::parameter_bytes) in the step.
    pub fn peak_device_bytes(&self) -> u64 {
        let stays = self.parameter_bytes + self.optimizer_bytes;
        // In the step of stages 1 and 2 there are pieces of the reduced gradients, and of the parameters as many.
        let pieces = if self.gradients_on_host() { 1 } else { 2 };
        stays + self.peak_gradient_bytes().max(pieces * self.piece_bytes)
    }
}

/// What a rank of `world_size` will hold and send, before anything is built. Parameters are cut at any element
/// ([`Partition::Flat`](crate::Partition::Flat), as a [`ZeroConfig`] says); [`estimate_map`] is for those that stay whole.
///
/// ```
/// use burn_zero::{ModelStates, Stage, ZeroConfig, estimate};
///
/// let model = ModelStates::adam(1_000_000_000);
/// let config = ZeroConfig { stage: Stage::Gradients, ..Default::default() };
/// let estimate = estimate(&model, &config, 4);
/// // 4 + 12/4 bytes an element instead of 16, and beyond that a copy of the shard in the step, or three buckets of 2^23 in backward.
/// assert_eq!(estimate.device_bytes(), 7_000_000_000);
/// assert_eq!(estimate.peak_device_bytes(), 7_000_000_000 + 1_000_000_000);
/// assert_eq!(estimate.peak_gradient_bytes(), 1_000_000_000 + 3 * (4 << 23));
/// // Three quarters of 2 P.
/// assert_eq!(estimate.sent_elements, 1_500_000_000);
/// ```
///
/// A world of 0 ranks is taken for 1.
pub fn estimate(model: &ModelStates, config: &ZeroConfig, world_size: usize) -> Estimate {
    let ranks = (world_size as u64).max(1);
    let bucket = config.sharding().bucket_elements as u64;
    let padded = padded(model.elements, bucket, ranks);
    let cut = Cut {
        ranks,
        padded,
        shards: vec![padded / ranks],
        bucket: bucket.min(model.elements),
        largest: model.largest_parameter,
    };
    cut.estimate(model, config)
}

/// [`estimate`] for the parameters and ranks of a map, such as [`ShardMap::whole`], whose ranks hold unequally much. The map's
/// buckets count, not the configuration's.
///
/// ```
/// use burn_zero::shard::Parameter;
/// use burn_zero::{ModelStates, ShardMap, Stage, ZeroConfig, estimate_map};
///
/// let parameters = vec![Parameter::new("embedding", 7000), Parameter::new("head", 3000)];
/// let map = ShardMap::whole(parameters, 2, 1 << 23)?;
/// let config = ZeroConfig { stage: Stage::OptimizerState, ..Default::default() };
/// let estimate = estimate_map(&ModelStates::adam(10_000), &config, &map);
/// assert_eq!(estimate.optimizer_bytes, 8 * 7000); // the rank with the embedding
/// # Ok::<(), burn_zero::ZeroError>(())
/// ```
pub fn estimate_map(model: &ModelStates, config: &ZeroConfig, map: &ShardMap) -> Estimate {
    let buckets = || map.buckets().iter().map(Bucket::padded_elements);
    let shards = (0..map.world_size()).map(|rank| map.shard_elements(rank) as u64);
    let parameters = map.parameters().iter();
    let cut = Cut {
        largest: parameters
            .map(|parameter| parameter.elements)
            .max()
            .unwrap_or(0) as u64,
        ranks: map.world_size() as u64,
        padded: buckets().sum::<usize>() as u64,
        shards: shards.collect(),
        bucket: buckets().max().unwrap_or(0) as u64,
    };
    cut.estimate(model, config)
}

/// How a model is cut, in elements.
struct Cut {
    ranks: u64,
    padded: u64,
    /// The sizes that shards have.
    shards: Vec<u64>,
    bucket: u64,
    /// The largest parameter.
    largest: u64,
}

/// Buckets of gradients that exist at once where they leave during backward: one that backward fills or that waits to be brought, one in the queue of
/// the thread that reduces, and one that it has at hand.
const BUCKETS_UNDER_WAY: u64 = 3;

impl Cut {
    fn estimate(&self, model: &ModelStates, config: &ZeroConfig) -> Estimate {
        let stage = config.stage;
        let shard = self.shards.iter().copied().max().unwrap_or(0);
        let several = self.ranks > 1;
        let states = match stage.shards_optimizer_state() {
            true => shard,
            false => model.elements,
        };
        let gradients = match stage.shards_gradients() {
            true => shard,
            false => model.elements,
        };
        let steps = config.batch.gradient_accumulation_steps.unwrap_or(1);
        let offloaded = offloaded(states, &config.offload_optimizer);
        let memory = config.sharding().gradients;
        // On the host they are beside what is under way, on the device it comes out of them.
        let leave = match memory {
            Memory::Host => model.elements,
            Memory::Device if several && stage.shards_gradients() => {
                model.elements.saturating_sub(shard)
            }
            Memory::Device => 0,
        };
        let underway = (BUCKETS_UNDER_WAY * self.bucket).min(leave);
        let exchanged = several || memory == Memory::Host;
        let spanning = match exchanged && self.largest > self.bucket {
            true => self.largest,
            false => 0,
        };
        let pieces = match several && stage.shards_optimizer_state() {
            true => shard,
            false => 0,
        };

        let element_bytes = model.layout.element_bytes();
        let state_bytes = model.optimizer_bytes + model.layout.master_bytes();
        let gradient_bytes = element_bytes * gradients;
        let (on_device, on_host, downloaded) = match memory {
            Memory::Device => (gradient_bytes, 0, offloaded),
            Memory::Host => (0, gradient_bytes, steps * model.elements),
        };
        let communication_bytes = config.communication_dtype.size_bytes() as u64;
        let sent = |gradient_bytes: u64, parameter_bytes: u64| {
            let of_rank = |&shard: &u64| self.sent(config, shard, gradient_bytes, parameter_bytes);
            self.shards.iter().map(of_rank).max().unwrap_or(0)
        };
        Estimate {
            padded_elements: self.padded,
            shard_elements: shard,
            parameter_bytes: element_bytes * model.elements,
            gradient_bytes: on_device,
            underway_bytes: element_bytes * underway,
            spanning_bytes: element_bytes * spanning,
            window_bytes: if steps > 1 { gradient_bytes } else { 0 },
            piece_bytes: element_bytes * pieces,
            optimizer_bytes: state_bytes * (states - offloaded),
            buffer_bytes: if several {
                communication_bytes * self.bucket
            } else {
                0
            },
            host_bytes: (model.optimizer_bytes + 4) * offloaded,
            host_gradient_bytes: on_host,
            sent_elements: sent(1, 1),
            sent_bytes: sent(communication_bytes, element_bytes),
            downloaded_bytes: element_bytes * downloaded,
            uploaded_bytes: match several && stage.shards_optimizer_state() {
                true => 0,
                false => element_bytes * offloaded,
            },
        }
    }

    /// What a rank with this shard sends for one update, by what an element weighs.
    fn sent(&self, config: &ZeroConfig, shard: u64, gradient: u64, parameter: u64) -> u64 {
        let Self { ranks, padded, .. } = *self;
        match config.stage {
            // An all-reduce cuts each bucket equally, however parameters are dealt.
            Stage::DataParallel => 2 * gradient * (padded - padded / ranks),
            Stage::OptimizerState => gradient * (padded - shard) + parameter * (ranks - 1) * shard,
            Stage::Gradients => {
                let steps = config.batch.gradient_accumulation_steps.unwrap_or(1);
                gradient * steps * (padded - shard) + parameter * (ranks - 1) * shard
            }
        }
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
    use crate::BatchConfig;
    use crate::group::BufferDtype;
    use crate::shard::Parameter;

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
            offload_optimizer: OptimizerOffload::Host { ratio },
            ..config(Stage::Gradients)
        };
        let whole = estimate(&ModelStates::adam(P), &host(1.0), 4);
        assert_eq!((whole.optimizer_bytes, whole.host_bytes), (0, 12 * P / 4));
        assert_eq!((whole.gradient_bytes, whole.host_gradient_bytes), (0, P));
        // The gradients of all parameters go down, to be reduced there.
        assert_eq!((whole.downloaded_bytes, whole.uploaded_bytes), (4 * P, 0));
        let half = estimate(&ModelStates::adam(P), &host(0.5), 4);
        assert_eq!((half.optimizer_bytes, half.host_bytes), (P, 6 * P / 4));
        // A part of them would go back to the device.
        assert_eq!((half.gradient_bytes, half.host_gradient_bytes), (P, 0));
        assert_eq!((half.downloaded_bytes, half.uploaded_bytes), (P / 2, 0));
        // One rank alone: the device holds parameters, and gradients on their way.
        let alone = ZeroConfig {
            stage: Stage::DataParallel,
            ..host(1.0)
        };
        let alone_f32 = estimate(&ModelStates::adam(P), &alone, 1);
        assert_eq!(
            (alone_f32.peak_device_bytes(), alone_f32.host_bytes),
            (8 * P, 12 * P)
        );
        assert_eq!(alone_f32.uploaded_bytes, 4 * P);
        assert_eq!((alone_f32.sent_elements, alone_f32.buffer_bytes), (0, 0));
        let small = ZeroConfig {
            reduce_bucket_size: 1000,
            ..alone.clone()
        };
        let small = estimate(&ModelStates::adam(P), &small, 1);
        assert_eq!(
            (small.peak_device_bytes(), small.kept_host_bytes()),
            (4 * P + 3 * 4000, 16 * P)
        );
        let bf16 = ModelStates {
            layout: StateLayout::MixedPrecision,
            ..ModelStates::adam(P)
        };
        let bf16 = estimate(&bf16, &alone, 1);
        assert_eq!((bf16.peak_device_bytes(), bf16.host_bytes), (4 * P, 12 * P));
    }

    #[test]
    fn gradients_under_way_are_three_buckets_and_no_more_than_there_are() {
        let with_buckets = |stage, elements| ZeroConfig {
            reduce_bucket_size: elements,
            ..config(stage)
        };
        let peak = |stage, elements, ranks| {
            let config = with_buckets(stage, elements);
            estimate(&ModelStates::adam(P), &config, ranks).peak_gradient_bytes()
        };
        assert_eq!(peak(Stage::Gradients, 1000, 4), P + 3 * 4000);
        assert_eq!(peak(Stage::Gradients, P, 4), 4 * P, "one bucket is all");
        assert_eq!(peak(Stage::Gradients, 1000, 1), 4 * P);
        assert_eq!(peak(Stage::OptimizerState, 1000, 4), 4 * P);
        let small = estimate(
            &ModelStates::adam(P),
            &with_buckets(Stage::Gradients, 1000),
            4,
        );
        // In the step a copy of the shard is more than three buckets in backward.
        assert_eq!(small.peak_device_bytes(), 7 * P + P);
        assert_eq!(small.buffer_bytes, 4000);
    }

    #[test]
    fn what_accumulates_is_there_twice() {
        let accumulating = ZeroConfig {
            batch: BatchConfig {
                gradient_accumulation_steps: Some(2),
                ..Default::default()
            },
            ..config(Stage::OptimizerState)
        };
        let model = ModelStates::adam(P);
        let peak = estimate(&model, &accumulating, 2).peak_gradient_bytes();
        assert_eq!(peak, 8 * P);
        let on_host = ZeroConfig {
            offload_optimizer: OptimizerOffload::Host { ratio: 1.0 },
            reduce_bucket_size: 1000,
            ..accumulating
        };
        let on_host = estimate(&model, &on_host, 2);
        assert_eq!(on_host.peak_gradient_bytes(), 3 * 4000);
        assert_eq!(on_host.kept_host_bytes(), 12 * P / 2 + 8 * P);
    }

    #[test]
    fn halves_are_sent_in_half_the_bytes() {
        let bf16 = |stage| ZeroConfig {
            communication_dtype: BufferDtype::Bf16,
            ..config(stage)
        };
        let bytes = |stage| estimate(&ModelStates::adam(P), &bf16(stage), 2).sent_bytes;
        // The reduce-scatter and the all-gather of an all-reduce.
        assert_eq!(bytes(Stage::DataParallel), 2 * (P / 2 + P / 2));
        // Parameters are gathered as they are.
        assert_eq!(bytes(Stage::OptimizerState), 2 * P / 2 + 4 * P / 2);
        assert_eq!(bytes(Stage::Gradients), 2 * P / 2 + 4 * P / 2);
    }

    #[test]
    fn the_rank_with_the_most_counts() {
        let parameters = [60, 30, 20].map(|elements| Parameter::new("p", elements));
        let map = ShardMap::whole(parameters.to_vec(), 2, 1000).unwrap();
        let model = ModelStates::adam(110);
        let found = estimate_map(&model, &config(Stage::Gradients), &map);
        assert_eq!((found.padded_elements, found.shard_elements), (110, 60));
        assert_eq!((found.optimizer_bytes, found.gradient_bytes), (480, 240));
        // Either rank sends the other's gradients and its own parameters.
        assert_eq!((found.sent_elements, found.sent_bytes), (110, 440));
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
        fn a_map_that_cuts_anywhere_gives_the_same(
            elements in 0usize..10_000, bucket in 1usize..12_000, ranks in 1usize..9, stage in 0u8..3, steps in 1u64..4,
        ) {
            let config = ZeroConfig {
                reduce_bucket_size: bucket as u64,
                batch: BatchConfig { gradient_accumulation_steps: Some(steps), ..Default::default() },
                ..config(Stage::try_from(stage).unwrap())
            };
            let model = ModelStates::adam(elements as u64);
            let map = ShardMap::flat(vec![Parameter::new("all", elements)], ranks, bucket).unwrap();
            let (by_map, by_formula) = (estimate_map(&model, &config, &map), estimate(&model, &config, ranks));
            // A map fills buckets that divide by the ranks.
            let padding = (elements.div_ceil(bucket) * ranks) as u64;
            prop_assert!(by_map.padded_elements.abs_diff(by_formula.padded_elements) <= padding);
            prop_assert!(by_map.sent_bytes.abs_diff(by_formula.sent_bytes) <= 4 * (steps + 1) * padding);
            prop_assert!(by_map.gradient_bytes.abs_diff(by_formula.gradient_bytes) <= 4 * padding);
            prop_assert!(by_map.device_bytes().abs_diff(by_formula.device_bytes()) <= 12 * padding);
        }

        #[test]
        fn padding_is_less_than_a_rank_a_bucket(elements in 0u64..1 << 40, bucket in 1u64..1 << 32, ranks in 1u64..2048) {
            let padded = padded(elements, bucket, ranks);
            prop_assert_eq!(padded % ranks, 0);
            prop_assert!(padded >= elements);
            prop_assert!(padded - elements <= elements.div_ceil(bucket) * (ranks - 1));
        }
    }
}
