//! Bringing a tensor back from the host because somebody uses it.

use std::sync::Arc;

use burn_backend::Backend;

use crate::budget;
use crate::error::RematError;
use crate::node::{Entry, Origin, Storage};

/// Brings a node back that is in host memory, and uploads ahead what backward will ask for next. Returns whether the node is
/// resident.
pub(crate) fn fetch<B: Backend>(node: &Arc<dyn Entry<B>>) -> bool {
    let head = node.head();
    let ahead = match &node.state().storage {
        Storage::Resident(_) => return true,
        Storage::Evicted => return false,
        Storage::Host(copy) => copy.is_ahead(),
    };
    if !ahead {
        budget::make_room(&head.ledger, head.op.name, head.bytes);
    }
    let mut state = node.state();
    let Storage::Host(copy) = &mut state.storage else {
        return state.is_resident();
    };
    let ahead = copy.is_ahead();
    let value = match copy.tensor(head) {
        Ok(value) => value,
        Err(reason) => {
            drop(state);
            return lost(node, reason);
        }
    };
    let place = copy.place;
    let storage = std::mem::replace(&mut state.storage, Storage::Resident(value));
    let unneeded = match storage {
        // The budget may want the room once more: then there is a copy already.
        Storage::Host(copy) if head.ledger.may_evict() => {
            state.copy = Some(copy);
            None
        }
        storage => {
            state.origin = Origin::Fixed;
            Some(storage)
        }
    };
    if !ahead {
        head.came_back();
    }
    drop(state);
    drop(unneeded);
    node.forget_recipe();
    if !ahead {
        head.uploaded();
    }
    if let Some(budget) = head.ledger.budget() {
        // Nothing is uploaded ahead under a budget: what it evicts would depend on when copies arrive.
        head.ledger.line().forget(place);
        budget.list(node);
    } else {
        head.ledger.line().asked_for(place);
    }
    true
}

/// What could not be read from the device is computed once more, if it can be.
fn lost<B: Backend>(node: &Arc<dyn Entry<B>>, reason: String) -> bool {
    let head = node.head();
    let error = RematError::HostCopyLost {
        op: head.op.name,
        shape: head.shape.to_vec(),
        dtype: head.dtype,
        reason,
    };
    assert!(node.has_recipe(), "{error}");
    log::warn!("{error}; it is computed once more");
    let mut state = node.state();
    let storage = match &state.storage {
        Storage::Host(_) => std::mem::replace(&mut state.storage, Storage::Evicted),
        Storage::Resident(_) | Storage::Evicted => return state.is_resident(),
    };
    state.origin = Origin::Recorded;
    drop(state);
    drop(storage);
    false
}
