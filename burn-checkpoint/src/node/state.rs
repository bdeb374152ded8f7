//! What changes of a tensor: above all its storage, which comes and goes.

use std::sync::Arc;

use burn_backend::Backend;

use super::Head;
use crate::host::HostCopy;
use crate::kind::Value;
use crate::recipe::Source;
use crate::scope::Scope;
use crate::verify;

/// Whether and how a tensor without storage can come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// It cannot: its storage stays as long as the node.
    Fixed,
    /// By its recipe.
    Recorded,
    /// By its recipe, which is kept whatever happens: it stands for data elsewhere.
    Source,
    /// By its copy in host memory.
    Hosted,
}

/// What changes.
pub(crate) struct State<B: Backend> {
    pub storage: Storage<B>,
    pub origin: Origin,
    /// Replays under way that need the storage.
    pub locks: u32,
    /// The next load is the last one of a replay and may have the storage itself.
    pub hand_over: bool,
    /// The scope that evicts it: replays for tensors of other scopes do not keep it.
    pub scope: Option<Arc<Scope>>,
    /// Whether a scope inside of that one has used it: it is what that scope is replayed from, whether it has users or not.
    pub feeds_inner_scope: bool,
    /// Whether several recipes start from it, as from a residual stream, or scopes, as from the result of another one: under a budget it
    /// stays when its last handle goes.
    pub junction: bool,
    /// The thread's operation count at the last use.
    pub last_used: u64,
    /// What the storage held when it was dropped, in verify mode.
    pub witness: Option<u64>,
    /// The copy in host memory of a storage that is resident, and may go once more.
    pub copy: Option<Box<HostCopy<B>>>,
    /// Of a view or a reshaped copy, where the scope may offload: what it is a view of.
    pub viewed: Option<Box<Viewed<B>>>,
}

/// A tensor that others are views of, and its storage, which may have been dropped with that tensor's last handle. Theirs may lie in
/// another order than their shapes', this one does not.
pub(crate) struct Viewed<B: Backend> {
    pub owner: Source<B>,
    pub value: Value<B>,
}

impl<B: Backend> Clone for Viewed<B> {
    fn clone(&self) -> Self {
        Self {
            owner: self.owner.clone(),
            value: self.value.clone(),
        }
    }
}

pub(crate) enum Storage<B: Backend> {
    Resident(Value<B>),
    Evicted,
    /// Boxed, for it is larger than a tensor.
    Host(Box<HostCopy<B>>),
}

impl<B: Backend> State<B> {
    #[inline]
    pub fn new(
        storage: Storage<B>,
        origin: Origin,
        last_used: u64,
        scope: Option<Arc<Scope>>,
    ) -> Self {
        Self {
            storage,
            origin,
            locks: 0,
            hand_over: false,
            scope,
            feeds_inner_scope: false,
            junction: false,
            last_used,
            witness: None,
            copy: None,
            viewed: None,
        }
    }

    /// Whether the storage stays when the last handle goes: that of a junction does.
    ///
    /// Autodiff saves what it differentiates with, and of a residual stream that may be nothing. What is evicted of a block could
    /// then come back only by way of all the blocks before it.
    #[inline]
    pub fn outlasts_handles(&mut self, head: &Head<B>, recipes: usize) -> bool {
        if !self.junction && recipes > 1 && self.origin == Origin::Recorded && self.scope.is_none()
        {
            self.junction = head.ledger.keeps_junctions();
        }
        self.junction
    }

    #[inline]
    pub fn is_resident(&self) -> bool {
        matches!(self.storage, Storage::Resident(_))
    }

    /// Whether it takes the device's memory: resident, or uploaded before it is asked for.
    pub fn occupies_device(&self) -> bool {
        match &self.storage {
            Storage::Resident(_) => true,
            Storage::Evicted => false,
            Storage::Host(copy) => copy.is_ahead(),
        }
    }

    /// What the storage becomes when it goes.
    fn gone(&mut self) -> Storage<B> {
        match self.copy.take() {
            Some(copy) => Storage::Host(copy),
            None => Storage::Evicted,
        }
    }
}

/// Takes the storage out of a node, if it can come back, and says how many bytes that frees. The storage is to be dropped
/// after the lock.
#[inline]
pub(crate) fn vacate<B: Backend>(
    head: &Head<B>,
    state: &mut State<B>,
) -> Option<(Storage<B>, u64)> {
    if state.origin == Origin::Fixed || state.locks > 0 || !state.is_resident() {
        return None;
    }
    let bytes = about_to_go(head, state);
    let gone = state.gone();
    Some((std::mem::replace(&mut state.storage, gone), bytes))
}

/// Takes the storage out of a node for somebody who goes on with it.
#[inline]
pub(crate) fn take_value<B: Backend>(head: &Head<B>, state: &mut State<B>) -> Option<Value<B>> {
    if !state.is_resident() {
        return None;
    }
    about_to_go(head, state);
    let gone = state.gone();
    match std::mem::replace(&mut state.storage, gone) {
        Storage::Resident(value) => Some(value),
        Storage::Evicted | Storage::Host(_) => None,
    }
}

/// Counts storage that is there but not for long. Returns the bytes that this frees.
#[inline]
fn about_to_go<B: Backend>(head: &Head<B>, state: &mut State<B>) -> u64 {
    if let Storage::Resident(value) = &state.storage {
        state.witness = verify::witness(state.origin, value);
    }
    state.hand_over = false;
    state.viewed = None;
    head.went()
}
