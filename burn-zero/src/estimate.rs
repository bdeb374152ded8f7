//! Formulas for what a rank holds and sends.

use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;
use serde::{Deserialize, Serialize};

use crate::optimizer::Parameters;
use crate::shard::Bucket;
use crate::{Memory, ShardMap, Stage, ZeroConfig};

/// What a model and its optimizer need for each element, before anything is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelStates {
    /// Elements of the parameters that are trained.
    pub elements: u64,
    /// Types of parameters and gradients.
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
    /// an element on the device, and as many for gradients that do not leave during backward, and `12/N` on the host. With the state
    /// on the device this crate does not train so: then it is for comparison with DeepSpeed.
    MixedPrecision,
}

impl StateLayout {
    /// Bytes on the device of an element of a parameter or a gradient, and of the master beside it.
    fn bytes(self) -> (u64, u64) {
        match self {
            Self::F32 => (4, 0),
            Self::MixedPrecision => (2, 4),
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
        let sizes = parameters.iter().map(|parameter| parameter.elements());
        Self {
            largest_parameter: sizes.clone().max().unwrap_or(0) as u64,
            ..Self::adam(sizes.sum::<usize>() as u64)
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

/// What a rank holds and sends at most: each field is the maximum over ranks. Without activations.
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
    /// Gradients on the device during backward, in addition to [`gradient_bytes`](Self::gradient_bytes). Where gradients leave the
    /// device (stage 2, and [`Memory::Host`] in every stage) three buckets: one that backward fills, one that waits, and one that is
    /// copied into the buffer that is sent, or to the host. Otherwise 0: all gradients stay until the step.
    pub underway_bytes: u64,
    /// The gradient of the largest parameter, if it spans several buckets: it is held whole until its last bucket is reduced, in
    /// addition to what is reduced.
    pub spanning_bytes: u64,
    /// Sums of earlier micro-batches, if gradients are accumulated: held in addition to the gradients of the last one, and in the same
    /// memory.
    pub window_bytes: u64,
    /// Copies of the rank's shards of the parameters, during a step of stages 1 and 2.
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
    /// The same in bytes: gradients in the type of communication, parameters in their own (stage 0 sends only
    /// gradients). Without the call descriptions, some hundred bytes a collective.
    pub sent_bytes: u64,
    /// Bytes from the device to the host for one update because the optimizer's state is there: gradients, in their own type.
    /// With [`Memory::Host`] those of all parameters, in each accumulated micro-batch. Otherwise those of the offloaded elements of the
    /// shard; the copies for sending to other ranks are not counted.
    pub downloaded_bytes: u64,
    /// Bytes from the host to the device for one update because the optimizer's state is there: parameters, in their own type.
    /// 0 where several ranks gather them (stages 1 and 2): then all parameters are uploaded after the gather, wherever the state is.
    pub uploaded_bytes: u64,
}

impl Estimate {
    /// On the device, what is held through a step: parameters, gradients, optimizer state. The paper's figure.
    pub fn device_bytes(&self) -> u64 {
        self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
    }

    /// Gradients on the device at their peak, during backward.
    pub fn peak_gradient_bytes(&self) -> u64 {
        let window = if_(!self.gradients_on_host(), self.window_bytes);
        self.gradient_bytes + self.underway_bytes + self.spanning_bytes + window
    }

    /// In host memory: the optimizer's state and masters, gradients and their sums. Without the [buffer](Self::buffer_bytes).
    pub fn kept_host_bytes(&self) -> u64 {
        let window = if_(self.gradients_on_host(), self.window_bytes);
        self.host_bytes + self.host_gradient_bytes + window
    }

    fn gradients_on_host(&self) -> bool {
        self.host_gradient_bytes > 0
    }

    /// The peak on the device, in backward or in the step. Burn's `Learner` keeps the old parameters during a step, which adds
    /// [`parameter_bytes`](Self::parameter_bytes) to the step.
    pub fn peak_device_bytes(&self) -> u64 {
        let stays = self.parameter_bytes + self.optimizer_bytes;
        // A step of stages 1 and 2 holds shards of the reduced gradients and of the parameters.
        let pieces = if self.gradients_on_host() { 1 } else { 2 };
        stays + self.peak_gradient_bytes().max(pieces * self.piece_bytes)
    }
}

/// What a rank of `world_size` will hold and send, computed before anything is built. Parameters are cut at any element
/// ([`Partition::Flat`](crate::Partition::Flat), as with a [`ZeroConfig`]); [`estimate_map`] is for whole parameters.
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
/// 0 ranks count as 1.
pub fn estimate(model: &ModelStates, config: &ZeroConfig, world_size: usize) -> Estimate {
    let ranks = (world_size as u64).max(1);
    let bucket = config.settings().bucket_elements as u64;
    let bucket = bucket.clamp(1, model.elements.max(1));
    let (buckets, rest) = (model.elements / bucket, model.elements % bucket);
    let padded = buckets * bucket.next_multiple_of(ranks) + rest.next_multiple_of(ranks);
    let cut = Cut {
        ranks,
        padded,
        shards: vec![padded / ranks],
        bucket: bucket.min(model.elements),
    };
    formulas(model, config, &cut)
}

/// [`estimate`] for the parameters and ranks of a map, such as [`ShardMap::whole`], whose shards differ in size. The buckets are
/// the map's, not the configuration's.
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
    let sizes = map.parameters().iter().map(|parameter| parameter.elements);
    let model = ModelStates {
        largest_parameter: sizes.max().unwrap_or(0) as u64,
        ..*model
    };
    let cut = Cut {
        ranks: map.world_size() as u64,
        padded: buckets().sum::<usize>() as u64,
        shards: shards.collect(),
        bucket: buckets().max().unwrap_or(0) as u64,
    };
    formulas(&model, config, &cut)
}

/// How a model is cut, in elements.
struct Cut {
    ranks: u64,
    padded: u64,
    /// The sizes that shards have.
    shards: Vec<u64>,
    bucket: u64,
}

/// Buckets of gradients that exist at once during backward: one that backward fills, one in the queue of the communication thread,
/// and one that it reduces.
const BUCKETS_UNDER_WAY: u64 = 3;

/// `amount` where the condition holds, else 0.
fn if_(holds: bool, amount: u64) -> u64 {
    u64::from(holds) * amount
}

/// All figures of a rank.
fn formulas(model: &ModelStates, config: &ZeroConfig, cut: &Cut) -> Estimate {
    let (elements, ranks, padded) = (model.elements, cut.ranks, cut.padded);
    let stage = config.stage;
    let steps = config.batch.gradient_accumulation_steps.unwrap_or(1);
    let several = ranks > 1;
    let gathers = several && stage.shards_optimizer_state();
    let to_host = config.settings().gradients == Memory::Host;

    // Elements.
    let shard = cut.shards.iter().copied().max().unwrap_or(0);
    let share = |sharded: bool| if sharded { shard } else { elements };
    let states = share(stage.shards_optimizer_state());
    let gradients = share(stage.shards_gradients());
    let offloaded = if_(to_host, states);
    // Reduced gradients on the host are additional to the buckets in transfer; on the device they replace them.
    let leaving = match to_host {
        true => elements,
        false => if_(several, elements.saturating_sub(gradients)),
    };
    let spans = (several || to_host) && model.largest_parameter > cut.bucket;
    let downloaded = if to_host { steps * elements } else { offloaded };

    // What a rank with this shard sends for one update, given the weight of an element: 1, or its bytes.
    let sent_by = |shard: u64, gradient: u64, parameter: u64| match stage {
        // An all-reduce cuts each bucket equally, whatever the partition.
        Stage::DataParallel => 2 * gradient * (padded - padded / ranks),
        Stage::OptimizerState => gradient * (padded - shard) + parameter * (ranks - 1) * shard,
        Stage::Gradients => gradient * steps * (padded - shard) + parameter * (ranks - 1) * shard,
    };
    let sent = |gradient, parameter| {
        let of_rank = |&shard: &u64| sent_by(shard, gradient, parameter);
        cut.shards.iter().map(of_rank).max().unwrap_or(0)
    };

    // Bytes.
    let (bytes, master_bytes) = model.layout.bytes();
    let sent_as = config.communication_dtype.size_bytes() as u64;
    Estimate {
        padded_elements: padded,
        shard_elements: shard,
        parameter_bytes: bytes * elements,
        gradient_bytes: if_(!to_host, bytes * gradients),
        underway_bytes: bytes * leaving.min(BUCKETS_UNDER_WAY * cut.bucket),
        spanning_bytes: if_(spans, bytes * model.largest_parameter),
        window_bytes: if_(steps > 1, bytes * gradients),
        piece_bytes: if_(gathers, bytes * shard),
        optimizer_bytes: (model.optimizer_bytes + master_bytes) * (states - offloaded),
        buffer_bytes: if_(several, sent_as * cut.bucket),
        host_bytes: (model.optimizer_bytes + 4) * offloaded,
        host_gradient_bytes: if_(to_host, bytes * gradients),
        sent_elements: sent(1, 1),
        sent_bytes: sent(sent_as, bytes),
        downloaded_bytes: bytes * downloaded,
        uploaded_bytes: if_(!gathers, bytes * offloaded),
    }
}

/// A table of estimates for 1 to 8 ranks at every stage, all else as configured.
///
/// ```
/// use burn_zero::{ModelStates, ZeroConfig, estimate_table};
///
/// let table = estimate_table(&ModelStates::adam(124_000_000), &ZeroConfig::default());
/// assert_eq!(table.lines().nth(2), Some("    1    1.85 GiB    1.85 GiB    1.85 GiB           0 B"));
/// ```
pub fn estimate_table(model: &ModelStates, config: &ZeroConfig) -> String {
    let mut table = format!(
        "{} elements; memory of a device at the highest, activations apart:\n\
         ranks     stage 0     stage 1     stage 2  sent an update (stage 2)\n",
        model.elements
    );
    for ranks in 1..=8 {
        let [zero, one, two] = Stage::ALL.map(|stage| {
            let config = ZeroConfig {
                stage,
                ..config.clone()
            };
            estimate(model, &config, ranks)
        });
        let peaks = [zero, one, two].map(|estimate| in_units(estimate.peak_device_bytes()));
        let sent = in_units(two.sent_bytes);
        table += &format!(
            "{ranks:5}{:>12}{:>12}{:>12}{sent:>14}\n",
            peaks[0], peaks[1], peaks[2]
        );
    }
    let alone = estimate(model, config, 1);
    if alone.host_bytes > 0 {
        let kept = in_units(alone.kept_host_bytes());
        table += &format!("and {kept} / ranks of host memory\n");
    }
    table
}

fn in_units(bytes: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let fitting = units.iter().find(|(_, power)| bytes >= 1 << power);
    match fitting {
        Some((unit, power)) => format!("{:.2} {unit}", bytes as f64 / 2f64.powi(*power)),
        None => format!("{bytes} B"),
    }
}
