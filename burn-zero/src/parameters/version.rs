//! Versions of parameters.

use super::shard::Shard;

/// A version of a parameter. It never changes, as each update makes a new one, so that the stores
/// before and after an update share those of parameters that it leaves alone.
pub(crate) struct ParameterVersion {
    residence: Residence,
    maker: Maker,
}

/// Where the elements of a version are.
enum Residence {
    /// In the leaf that the model holds: on the device, or in host memory.
    Leaf,
    /// With all ranks, of which this one has this shard.
    Sharded(Box<Shard>),
    /// Nowhere: the model has the parameter no more, or in another shape or type.
    Gone,
}

/// What has made a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Maker {
    /// The optimizer on the host: its state has the elements too, at least as precise.
    HostOptimizer,
    /// Anything else, such as an optimizer on the device, or a program that has set weights.
    Other,
}

impl ParameterVersion {
    /// Of elements that the leaf has.
    pub(crate) fn in_leaf(maker: Maker) -> Self {
        let residence = Residence::Leaf;
        Self { residence, maker }
    }

    /// Of elements of which this rank has a shard.
    pub(crate) fn sharded(own: Shard, maker: Maker) -> Self {
        let residence = Residence::Sharded(Box::new(own));
        Self { residence, maker }
    }

    /// Of a parameter that the model does not have.
    pub(crate) fn gone() -> Self {
        Self {
            residence: Residence::Gone,
            maker: Maker::Other,
        }
    }

    /// This rank's shard, where it is sharded.
    pub(crate) fn shard(&self) -> Option<&Shard> {
        match &self.residence {
            Residence::Sharded(own) => Some(own),
            Residence::Leaf | Residence::Gone => None,
        }
    }

    /// Whether a leaf of this version has the elements, rather than the ranks.
    pub(super) fn is_in_leaf(&self) -> bool {
        matches!(self.residence, Residence::Leaf)
    }

    /// Whether the state of the optimizer on the host has the elements.
    pub(crate) fn is_of_host_optimizer(&self) -> bool {
        self.maker == Maker::HostOptimizer
    }
}
