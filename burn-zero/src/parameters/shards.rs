//! Parameters of stage 3: a rank holds its shard of them in host memory, and a unit is gathered when an operation uses one of its
//! parameters.
//!
//! All ranks use units in the same order, because they run the same program: each gather is a collective whose label has the unit and the
//! step, so that ranks which differ stop with both labels. A rank holds two gathered units at most, in host memory: the one that was
//! used last, and the next one by the order of the first step, which is gathered while this one computes.

use core::fmt;
use std::collections::HashMap;
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::tensor::{Shape, TensorData, backend::AutodiffBackend};
use burn_backend::tensor::{Device, FloatTensor};
use burn_checkpoint::delivered;
use parking_lot::Mutex;

use super::NewValue;
use super::units::{Gathered, Shard, Unit, Units};
use crate::backend::leaf_node;
use crate::group::Pending;
use crate::optimizer::Parameters;
use crate::reduce::GradientReducer;
use crate::{ZeroError, raise};

/// The parameters after one step, which the leaves of the model share.
pub(crate) struct Shards {
    reducer: Arc<GradientReducer>,
    units: Arc<Units>,
    /// By parameter.
    own: Arc<[Shard]>,
    /// The step, for labels.
    at: String,
    /// The nodes of the leaves that were made of it, by parameter.
    leaves: Mutex<HashMap<usize, u64>>,
    held: Mutex<Held>,
}

/// The gathered units, by number.
#[derive(Default)]
struct Held {
    /// The one that was used last.
    last: Option<(usize, Gathered)>,
    /// The one that is gathered ahead.
    next: Option<(usize, Pending<Gathered>)>,
}

impl Shards {
    pub(crate) fn new(
        reducer: Arc<GradientReducer>,
        units: Arc<Units>,
        own: Vec<Shard>,
        at: String,
    ) -> Arc<Self> {
        units.begin();
        Arc::new(Self {
            reducer,
            units,
            own: own.into(),
            at,
            leaves: Mutex::default(),
            held: Mutex::default(),
        })
    }

    /// This rank's shard of a parameter whose leaf, of this node, was made of it.
    pub(crate) fn own(&self, parameter: usize, node: Option<u64>) -> Option<&Shard> {
        let is_own = node.is_some() && self.node(parameter) == node;
        is_own.then(|| &self.own[parameter])
    }

    /// Whether this is the node of a leaf that was made of it.
    pub(crate) fn has(&self, node: Option<u64>) -> bool {
        node.is_some_and(|node| self.leaves.lock().values().any(|own| *own == node))
    }

    /// The node of the leaf of a parameter.
    pub(crate) fn node(&self, parameter: usize) -> Option<u64> {
        self.leaves.lock().get(&parameter).copied()
    }

    pub(crate) fn units(&self) -> &Arc<Units> {
        &self.units
    }

    /// The module with new leaves, which are gathered from these shards of all ranks when they are used.
    pub(crate) fn put<B: AutodiffBackend, M: AutodiffModule<B>>(self: &Arc<Self>, module: M) -> M {
        let parameters = Parameters::of::<B, M>(&module);
        parameters.map::<B, M>(module, |parameter, old| {
            self.leaf::<B>(parameter, &B::float_device(&old))
        })
    }

    /// The module with all parameters in the host memory of rank 0; the module as it is on others, which hold one unit at a time. All ranks
    /// call it.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn put_whole_on_rank_0<B, M>(&self, module: M) -> Result<M, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let is_rank_0 = self.reducer.layout().rank() == 0;
        let mut whole = HashMap::new();
        for unit in &self.units.all {
            let unit = self.gather(unit)?;
            if is_rank_0 {
                whole.extend(unit);
            }
        }
        if !is_rank_0 {
            return Ok(module);
        }
        let parameters = Parameters::of::<B, M>(&module);
        Ok(parameters.map::<B, M>(module, |parameter, old| {
            let data = whole.remove(&parameter);
            let data = data.expect("a parameter is in one unit, and is replaced once");
            let leaf = NewValue::Host(data).into_tensor::<B>(true, &B::float_device(&old));
            B::float_set_require_grad(leaf, true)
        }))
    }

    /// A new leaf of a parameter, gathered whenever an operation uses it.
    fn leaf<B: AutodiffBackend>(
        self: &Arc<Self>,
        parameter: usize,
        device: &Device<B>,
    ) -> FloatTensor<B> {
        let known = &self.reducer.layout().parameters()[parameter];
        let (shape, shards) = (Shape::from(known.shape.clone()), self.clone());
        let leaf = delivered::<B>(shape, known.dtype, device, move || shards.get(parameter));
        let leaf = leaf.expect("`prepare` refuses a backend without `Remat`");
        let leaf = B::float_set_require_grad(leaf, true);
        if let Some(node) = leaf_node::<B>(&leaf) {
            self.leaves.lock().insert(parameter, node);
        }
        leaf
    }

    /// All elements of a parameter. Panics with the error of the group.
    fn get(&self, parameter: usize) -> TensorData {
        let unit = self.units.of(parameter);
        let mut held = self.held.lock();
        if held.last.as_ref().is_none_or(|(last, _)| *last != unit) {
            held.last = None; // before another arrives
            let ahead = held.next.take().filter(|(next, _)| *next == unit);
            let arriving = match ahead {
                Some((_, arriving)) => arriving,
                None => self.start(&self.units.all[unit], &self.at),
            };
            held.last = Some((unit, raise(arriving.wait())));
            held.next = self.units.next(unit).map(|next| {
                let [this, ahead] = [unit, next].map(|unit| &self.units.all[unit]);
                // Told from a gather for a use: ranks that have used other units differ.
                let at = format!("while unit `{}` computes, {}", this.path, self.at);
                (next, self.start(ahead, &at))
            });
        }
        let (_, unit) = held.last.as_ref().expect("it was gathered");
        unit[&parameter].clone()
    }

    fn gather(&self, unit: &Arc<Unit>) -> Result<Gathered, ZeroError> {
        self.start(unit, &self.at).wait()
    }

    fn start(&self, unit: &Arc<Unit>, at: &str) -> Pending<Gathered> {
        // Not the group, which its own jobs must not own.
        let (unit, layout) = (unit.clone(), self.units.layout.clone());
        let (own, at) = (self.own.clone(), at.to_owned());
        let work = move |ranks: &mut _| unit.gather(&layout, &own, &at, ranks);
        Pending::start(self.reducer.group(), work)
    }
}

impl fmt::Debug for Shards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shards = f.debug_struct("Shards");
        shards.field("at", &self.at).finish_non_exhaustive()
    }
}
