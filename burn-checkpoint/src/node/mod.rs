//! A managed tensor: what is known of it for good (`head.rs`), its storage, which comes and goes (`state.rs`), and its
//! recipe. `any.rs` is what scopes and budgets see of it.

mod any;
mod head;
mod state;

use std::sync::Arc;

use burn_backend::Backend;
use parking_lot::{Mutex, MutexGuard};

use crate::kind::Value;
use crate::recipe::{Input, Recipe};
use crate::trace::EventKind;

pub(crate) use any::{AnyEntry, Facts};
pub(crate) use head::{Head, Lineage, bytes};
pub(crate) use state::{Origin, State, Storage, Viewed, take_value, vacate};

/// A node with its recipe.
pub(crate) struct Node<B: Backend, R> {
    pub head: Head<B>,
    pub state: Mutex<State<B>>,
    pub recipe: Mutex<Option<R>>,
}

/// A node of backend `B`, whatever its recipe.
pub(crate) trait Entry<B: Backend>: AnyEntry {
    fn head(&self) -> &Head<B>;
    fn state(&self) -> MutexGuard<'_, State<B>>;
    /// Shows the recipe's inputs, none if it has no recipe.
    fn inputs(&self, visit: &mut dyn FnMut(Input<'_, B>));
    /// Shows the other results of the operation that this is one of several results of.
    fn siblings(&self, visit: &mut dyn FnMut(Arc<dyn Entry<B>>));
    /// Whether the recipe runs an operation, and not only hands out one of the several results of another node.
    fn computes(&self) -> bool;
    /// Runs the recipe; `None` if there is none.
    fn run(&self) -> Option<Value<B>>;
    fn has_recipe(&self) -> bool;
    /// Drops the recipe: it is not needed any more.
    fn forget_recipe(&self);
}

impl<B: Backend, R: Recipe<B>> Entry<B> for Node<B, R> {
    fn head(&self) -> &Head<B> {
        &self.head
    }

    fn state(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock()
    }

    fn inputs(&self, visit: &mut dyn FnMut(Input<'_, B>)) {
        if let Some(recipe) = &*self.recipe.lock() {
            recipe.inputs(visit);
        }
    }

    fn siblings(&self, visit: &mut dyn FnMut(Arc<dyn Entry<B>>)) {
        if let Some(recipe) = &*self.recipe.lock() {
            recipe.siblings(visit);
        }
    }

    fn computes(&self) -> bool {
        R::COMPUTES
    }

    fn run(&self) -> Option<Value<B>> {
        self.recipe.lock().as_ref().map(Recipe::run)
    }

    fn has_recipe(&self) -> bool {
        self.recipe.lock().is_some()
    }

    fn forget_recipe(&self) {
        let recipe = self.recipe.lock().take();
        drop(recipe);
    }
}

impl<B: Backend, R> Drop for Node<B, R> {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        if state.occupies_device() {
            let bytes = self.head.went();
            self.head
                .emit(|op, node| EventKind::Free { op, node }, bytes);
        }
        if let Storage::Host(copy) = &state.storage {
            self.head.ledger.line().forget(copy.place);
        }
        if self.head.place.is_taken()
            && let Some(budget) = self.head.ledger.budget()
        {
            budget.neighbours.gone(&self.head.place);
        }
    }
}
