//! Formulas for what a rank holds and sends.

use std::collections::HashMap;

use burn::module::AutodiffModule;
use burn::tensor::{TensorMetadata, backend::AutodiffBackend};
use burn_backend::tensor::FloatTensor;
use burn_decorator::module::for_each_float;
use burn_decorator::repeated_block;
use serde::{Deserialize, Serialize};

use crate::config::ZeroConfig;
use crate::parameters::{Parameters, Statistics};
use crate::settings::{Memory, Stage};

/// What a model and its optimizer need for each element, before anything is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelStates {
    /// Elements of the parameters that are trained.
    pub elements: u64,
    /// Bytes of an element of a parameter, and of its gradient.
    ///
    /// 4 is what autocast trains: the f32 parameters are their own masters, and low-precision
    /// copies live no longer than the operation (or, cached, the forward pass) that reads them.
    /// With Adam 16 bytes an element, `8 + 8/N` at stage 1, `4 + 12/N` at stage 2.
    ///
    /// 2 is what the paper counts (arXiv 1910.02054, section 3.1), with an f32 master as part of
    /// the optimizer's state. With Adam 16 bytes an element, `4 + 12/N` at stage 1, `2 + 14/N` at
    /// stage 2. With the state on the host, [`OffloadedAdamW`](crate::OffloadedAdamW) trains a
    /// model in bf16 or f16 so. With the state on the device this crate does not: the numbers are
    /// for comparison with DeepSpeed.
    pub parameter_bytes: u64,
    /// Optimizer state of one element, in bytes: 8 for Adam's moments, 4 for a momentum, 0 for
    /// plain SGD.
    pub optimizer_bytes: u64,
    /// Elements of the largest parameter; 0 if none is larger than a bucket.
    pub largest_parameter: u64,
    /// Elements of the frozen parameters, which have no gradients and no optimizer state. They
    /// count with [`parameter_bytes`](Self::parameter_bytes) each. Running statistics are not
    /// parameters.
    pub frozen_elements: u64,
    /// Elements of the largest frozen parameter.
    pub largest_frozen: u64,
    /// Elements of the largest unit, which stage 3 gathers whole: a repeated block, or all
    /// parameters that are in none, frozen ones too. 0 if units do not count.
    pub largest_unit: u64,
}

impl ModelStates {
    /// The parameters of `module`, in f32, those that require gradients under Adam or AdamW. A
    /// trained parameter held twice counts once, a frozen one twice, as ranks hold a copy of it for
    /// each path.
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
    /// assert_eq!((model.elements, model.largest_parameter, model.largest_unit), (1010, 1000, 1010));
    /// ```
    pub fn of<B: AutodiffBackend, M: AutodiffModule<B>>(module: &M) -> Self {
        let parameters = Parameters::of::<B, M>(module).list;
        let sizes = parameters.iter().map(|parameter| parameter.elements());
        let mut units: HashMap<String, u64> = HashMap::new();
        let mut add_to_unit = |path: &str, elements: usize| {
            *units.entry(repeated_block(path).to_owned()).or_default() += elements as u64;
        };
        for parameter in &parameters {
            add_to_unit(&parameter.path, parameter.elements());
        }
        let statistics = Statistics::of::<B, M>(module);
        let mut frozen = Vec::new();
        for_each_float(module, |path, _, tensor: FloatTensor<B>| {
            if !B::float_is_require_grad(&tensor) && !statistics.contains(path) {
                let elements = tensor.shape().num_elements();
                add_to_unit(path, elements);
                frozen.push(elements as u64);
            }
        });
        Self {
            frozen_elements: frozen.iter().sum(),
            largest_frozen: frozen.into_iter().max().unwrap_or(0),
            largest_parameter: sizes.clone().max().unwrap_or(0) as u64,
            largest_unit: units.into_values().max().unwrap_or(0),
            ..Self::adam(sizes.sum::<usize>() as u64)
        }
    }

    /// Trained f32 parameters under Adam or AdamW, none of them larger than a bucket.
    pub fn adam(elements: u64) -> Self {
        Self {
            elements,
            parameter_bytes: 4,
            optimizer_bytes: 8,
            frozen_elements: 0,
            largest_frozen: 0,
            largest_parameter: 0,
            largest_unit: 0,
        }
    }
}

/// What a rank holds and sends at most: each field is the maximum over ranks. Without activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Estimate {
    /// Elements of all buckets with the padding of the last, to a multiple of the ranks.
    pub padded_elements: u64,
    /// Elements of the rank's shard, padding included.
    pub shard_elements: u64,
    /// Parameters on the device, frozen ones too: all, or where they are in host memory
    /// ([`ZeroConfig::offload_param`]) the two largest: the one in use, and the next one, whose
    /// upload has begun.
    pub parameter_bytes: u64,
    /// This rank's shards of the parameters on the device, frozen ones too, at stage 3 of several
    /// ranks with [`ZeroConfig::shards`] there. Shards of those that autocast casts are there in
    /// the low type too, which is not counted.
    pub parameter_shard_bytes: u64,
    /// Parameters in host memory, frozen ones too: all, or at stage 3 of several ranks the rank's
    /// shards, as [`parameter_shard_bytes`](Self::parameter_shard_bytes).
    pub host_parameter_bytes: u64,
    /// Units in host memory, at stage 3 of several ranks: the one in use, and the next one, which
    /// is gathered meanwhile.
    pub unit_bytes: u64,
    /// Gradients on the device at the end of backward. At stage 2 the rank's shard; none where they
    /// go to the host ([`Memory::Host`]).
    pub gradient_bytes: u64,
    /// Gradients on the device during backward, in addition to
    /// [`gradient_bytes`](Self::gradient_bytes). Where gradients leave the device (stage 2, and
    /// [`Memory::Host`] in every stage) three buckets: one that backward fills, one that waits, and
    /// one that is copied into the buffer that is sent, or to the host. Otherwise 0: all gradients
    /// stay until the step.
    pub underway_bytes: u64,
    /// The gradient of the largest parameter, if it spans several buckets: it is held whole until
    /// its last bucket is reduced, in addition to what is reduced.
    pub spanning_bytes: u64,
    /// Sums of earlier micro-batches, if gradients are accumulated: held in addition to the
    /// gradients of the last micro-batch, in the same memory.
    pub window_bytes: u64,
    /// Copies of the rank's shards of the parameters, during a step of stages 1 and 2. Where
    /// parameters are in host memory: the parameters that the optimizer has updated on the device,
    /// if its state is there.
    pub shard_bytes: u64,
    /// Optimizer state on the device, master parameters included.
    pub optimizer_bytes: u64,
    /// One bucket in the type in which it is sent, in host memory.
    pub buffer_bytes: u64,
    /// Optimizer state and f32 master parameters in host memory.
    pub host_bytes: u64,
    /// Gradients in host memory at the end of backward.
    pub host_gradient_bytes: u64,
    /// Elements that the rank sends to other ranks for one update: `2 P (N - 1) / N`, which the
    /// paper rounds to `2 P` (section 7.1). Stage 2 reduces each accumulated micro-batch:
    /// `(k + 1) P (N - 1) / N`. Stage 3 also gathers parameters twice for each:
    /// `3 k P (N - 1) / N`, without scopes and with scopes of one unit. A scope of several units
    /// gathers them once more at most. Stage 3 gathers frozen parameters in forward and in backward
    /// too; in backward not those that it does not use, and in a scope once more.
    pub sent_elements: u64,
    /// [`sent_elements`](Self::sent_elements) in bytes: gradients in the type of communication,
    /// parameters in their own (stage 0 sends only gradients). Without the call descriptions, some
    /// hundred bytes a collective.
    pub sent_bytes: u64,
}

impl Estimate {
    /// On the device, what is held through a step: parameters, gradients, optimizer state. The
    /// paper's figure.
    pub fn device_bytes(&self) -> u64 {
        self.kept_device_bytes() + self.gradient_bytes
    }

    /// On the device, what stays there between steps: parameters and optimizer state.
    fn kept_device_bytes(&self) -> u64 {
        self.parameter_bytes + self.parameter_shard_bytes + self.optimizer_bytes
    }

    /// Gradients on the device at their peak, during backward.
    pub fn peak_gradient_bytes(&self) -> u64 {
        let window = if_(!self.gradients_on_host(), self.window_bytes);
        self.gradient_bytes + self.underway_bytes + self.spanning_bytes + window
    }

    /// In host memory: parameters and units of them, the optimizer's state and masters, gradients
    /// and their sums. Without the [buffer](Self::buffer_bytes).
    pub fn kept_host_bytes(&self) -> u64 {
        let window = if_(self.gradients_on_host(), self.window_bytes);
        self.host_parameter_bytes
            + self.unit_bytes
            + self.host_bytes
            + self.host_gradient_bytes
            + window
    }

    fn gradients_on_host(&self) -> bool {
        self.host_gradient_bytes > 0
    }

    /// The peak on the device, in backward or in the step. Burn's `Learner` keeps the old
    /// parameters during a step, which adds to the step those of
    /// [`parameter_bytes`](Self::parameter_bytes) that are trained.
    pub fn peak_device_bytes(&self) -> u64 {
        // A step of stages 1 and 2 holds shards of the reduced gradients and of the parameters.
        // Parameters that come and go replace their gradients one by one.
        let come_and_go = self.host_parameter_bytes + self.parameter_shard_bytes > 0;
        let shards = if self.gradients_on_host() || come_and_go {
            1
        } else {
            2
        };
        self.kept_device_bytes() + self.peak_gradient_bytes().max(shards * self.shard_bytes)
    }
}

/// What a rank of `world_size` will hold and send, computed before anything is built. Parameters
/// are cut at any element ([`Partition::Flat`](crate::Partition::Flat)); shards of whole parameters
/// may be larger, by the largest parameter at most.
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
    let settings = config.settings();
    let (stage, elements, ranks) = (settings.stage, model.elements, (world_size as u64).max(1));
    let steps = config.batch.gradient_accumulation_steps.unwrap_or(1);
    let several = ranks > 1;
    let gathers = several && stage.shards_optimizer_state();
    let to_host = settings.gradients == Memory::Host;
    let in_units = several && stage == Stage::Parameters;
    let come_and_go = in_units || settings.parameters == Memory::Host;

    // Elements.
    // As `ShardMap::flat`, whose buckets divide by the ranks but for the last.
    let full_bucket = (settings.bucket_elements as u64).max(ranks) / ranks * ranks;
    let bucket = full_bucket.min(elements);
    let padded = elements.next_multiple_of(ranks);
    let shard = padded / ranks;
    let share = |sharded: bool| if sharded { shard } else { elements };
    let states = share(stage.shards_optimizer_state());
    let gradients = share(stage.shards_gradients());
    let offloaded = if_(to_host, states);
    // Reduced gradients on the host are additional to the buckets in transfer; on the device they
    // replace them.
    let leaving = if to_host {
        elements
    } else {
        if_(several, elements.saturating_sub(gradients))
    };
    let spans = (several || to_host) && model.largest_parameter > bucket;
    let all = elements + model.frozen_elements;
    let largest = match model.largest_parameter {
        0 => bucket,
        largest => largest,
    };
    let in_use = if come_and_go {
        all.min(2 * largest.max(model.largest_frozen))
    } else {
        all
    };
    let frozen_shard = model.frozen_elements.div_ceil(ranks);
    let copies = if come_and_go { !to_host } else { gathers };
    // What a rank sends for one update, given the weight of an element: 1, or its bytes.
    let others = padded - shard;
    let gathered = others + model.frozen_elements - frozen_shard;
    let sent = |gradient: u64, parameter: u64| match stage {
        Stage::DataParallel => 2 * gradient * others,
        Stage::OptimizerState => (gradient + parameter) * others,
        Stage::Gradients => (gradient * steps + parameter) * others,
        // Gathered in forward and in backward.
        Stage::Parameters => (gradient * others + 2 * parameter * gathered) * steps,
    };

    // Bytes.
    let bytes = model.parameter_bytes;
    let master_bytes = if_(bytes < 4, 4);
    let parameter_shard_bytes = if_(in_units, bytes * (shard + frozen_shard));
    let sent_as = settings.communication_dtype.size_bytes() as u64;
    Estimate {
        padded_elements: padded,
        shard_elements: shard,
        parameter_bytes: bytes * in_use,
        parameter_shard_bytes: if_(settings.shards == Memory::Device, parameter_shard_bytes),
        host_parameter_bytes: if in_units {
            if_(settings.shards == Memory::Host, parameter_shard_bytes)
        } else {
            if_(come_and_go, bytes * all)
        },
        unit_bytes: if_(in_units, bytes * all.min(2 * model.largest_unit)),
        gradient_bytes: if_(!to_host, bytes * gradients),
        underway_bytes: bytes * leaving.min(BUCKETS_UNDER_WAY * bucket),
        spanning_bytes: if_(spans, bytes * model.largest_parameter),
        window_bytes: if_(steps > 1, bytes * gradients),
        shard_bytes: if_(copies, bytes * states),
        optimizer_bytes: (model.optimizer_bytes + master_bytes) * (states - offloaded),
        buffer_bytes: if_(several, sent_as * bucket),
        host_bytes: (model.optimizer_bytes + 4) * offloaded,
        host_gradient_bytes: if_(to_host, bytes * gradients),
        sent_elements: sent(1, 1),
        sent_bytes: sent(sent_as, bytes),
    }
}

/// Buckets of gradients that exist at once during backward: one that backward fills, one in the
/// queue of the communication thread, and one that it reduces.
const BUCKETS_UNDER_WAY: u64 = 3;

/// `amount` where the condition holds, else 0.
fn if_(holds: bool, amount: u64) -> u64 {
    u64::from(holds) * amount
}
