//! An update that is divided over ranks, or moved to the host.

use crate::classes::Kind;

/// Where the optimizer's state, gradients and parameters are, for
/// [`Estimate::shared`](crate::Estimate::shared): the stages of ZeRO (arXiv 1910.02054), and
/// burn-zero's offload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shares {
    /// Ranks that train together.
    pub ranks: u64,
    /// Whether a rank has its part of the optimizer's state only: stage 1.
    pub optimizer_state: bool,
    /// Whether a rank has its part of the gradients only: stage 2.
    pub gradients: bool,
    /// Whether a parameter is on the device only while an operation uses it: stage 3, or on one
    /// rank parameters in host memory (DeepSpeed's `offload_param`).
    pub parameters: bool,
    /// Whether a rank's part of the parameters stays on the device where
    /// [`parameters`](Self::parameters) come and go: otherwise it is in host memory.
    pub shards_on_device: bool,
    /// Whether the optimizer's state is in host memory, and with it the gradients, as soon as
    /// backward has computed them.
    pub offload: bool,
    /// Bytes of gradients that are sent or copied at once.
    pub bucket_bytes: u64,
}

impl Shares {
    /// One rank, all on the device.
    pub const NONE: Self = Self {
        ranks: 1,
        optimizer_state: false,
        gradients: false,
        parameters: false,
        shards_on_device: false,
        offload: false,
        bucket_bytes: 0,
    };

    /// Whether gradients leave the device during backward.
    pub(crate) fn gradients_leave(&self) -> bool {
        self.offload || (self.gradients && self.ranks > 1)
    }

    /// Whether new parameters come from the host, or from all ranks, one by one.
    pub(crate) fn replaces_parameters(&self) -> bool {
        self.offload || (self.optimizer_state && self.ranks > 1)
    }

    /// Whether this rank's parts of parameters that come and go stay on the device.
    pub(crate) fn keeps_parts(&self) -> bool {
        self.shards_on_device && self.parameters && self.ranks > 1
    }

    fn part(&self, is_shared: bool) -> f64 {
        if is_shared {
            1.0 / self.ranks.max(1) as f64
        } else {
            1.0
        }
    }

    /// How much of a kind of memory stays on the device, before the update and in it.
    pub(crate) fn factors(&self, kind: Kind, born_in_update: bool) -> (f64, f64) {
        let state = match self.offload {
            true => 0.0,
            false => self.part(self.optimizer_state),
        };
        match kind {
            Kind::OptimizerState => (state, state),
            // Reduced and freed before the optimizer steps on shards.
            Kind::Gradient if self.offload => (0.0, 0.0),
            Kind::Gradient => (self.part(self.gradients), state),
            Kind::Parameter if self.parameters => (1.0, state),
            Kind::Temporary | Kind::Input if born_in_update => (1.0, state),
            _ => (1.0, 1.0),
        }
    }

    /// What the device holds in addition: before the update, of gradients that leave it, at most
    /// three buckets under way; in the update shards of the parameters.
    pub(crate) fn added_bytes(&self, parameter_bytes: u64) -> (u64, u64) {
        let sharded = self.optimizer_state && self.ranks > 1 && !self.offload && !self.parameters;
        let shards = if sharded {
            parameter_bytes / self.ranks
        } else {
            0
        };
        // On one rank nothing waits to be sent.
        let buckets = if self.parameters && self.ranks == 1 {
            0
        } else {
            3
        };
        (buckets * self.bucket_bytes, shards)
    }

    /// The part of the update's arithmetic that the device does.
    pub(crate) fn update(&self) -> f64 {
        self.factors(Kind::OptimizerState, true).0
    }
}
