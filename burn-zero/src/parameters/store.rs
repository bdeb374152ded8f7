//! Parameters of stage 3, trained and frozen: a rank holds its shard of them, in host memory or on
//! the device, and a unit is gathered when an operation uses one of its parameters.
//!
//! All ranks use units in the same order, because they run the same program: each gather is a
//! collective whose label has the unit and the step, so that ranks that differ stop with an error
//! that has both labels. A rank holds two gathered units at most, in host memory: the one that was
//! used last, and the next one by the order of the first step, which is gathered while this one
//! computes. A parameter that steps cast before they use it, as autocast does, is gathered in the
//! type of the cast: each rank casts its shard of it after the update, a shard that does not change
//! once.

use core::fmt;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, OnceLock};

use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Shape, TensorData};
use burn_backend::tensor::{Device, FloatTensor};
use burn_checkpoint::{Delivery, delivered_in_order};
use burn_ranks::Pending;
use parking_lot::Mutex;

use super::shard::{Elements, Shard, cut};
use super::units::{Gathered, Unit, Units};
use super::{NewValue, Residence};
use crate::backend::leaf_node;
use crate::host::read;
use crate::reduce::GradientReducer;
use crate::{ZeroError, raise};

/// The parameters after one step, which the leaves of the model share.
pub(crate) struct ParameterStore {
    reducer: Arc<GradientReducer>,
    units: Arc<Units>,
    /// By parameter.
    own: Arc<[Arc<Shard>]>,
    /// The step, for labels.
    at: String,
    /// The parameters of the leaves that were made from these shards, by node.
    leaves: Mutex<HashMap<u64, usize>>,
    /// By parameter: the type in which it is gathered where a cast uses it, if that is not its own.
    low_types: Vec<Option<DType>>,
    /// By parameter: this rank's elements in that type, once there is a leaf of it.
    low: Vec<OnceLock<Elements>>,
    held: Mutex<Held>,
}

/// The gathered units, by number.
#[derive(Default)]
struct Held {
    /// The one that was used last.
    last: Option<(usize, Gathered)>,
    /// The one that is gathered ahead.
    next: Option<(usize, Pending<Gathered, ZeroError>)>,
}

impl ParameterStore {
    pub(crate) fn new(
        reducer: Arc<GradientReducer>,
        units: Arc<Units>,
        own: Vec<Arc<Shard>>,
        at: String,
    ) -> Arc<Self> {
        units.begin();
        Arc::new(Self {
            low: own.iter().map(|_| OnceLock::new()).collect(),
            low_types: units.low_types(),
            reducer,
            units,
            own: own.into(),
            at,
            leaves: Mutex::default(),
            held: Mutex::default(),
        })
    }

    /// This rank's shards, by parameter.
    pub(crate) fn own(&self) -> &[Arc<Shard>] {
        &self.own
    }

    /// The parameter of a leaf that was made from these shards, by its node.
    fn parameter_of(&self, node: Option<u64>) -> Option<usize> {
        self.leaves.lock().get(&node?).copied()
    }

    /// Whether this is the node of a leaf that was made from these shards.
    pub(crate) fn has(&self, node: Option<u64>) -> bool {
        node.is_some_and(|node| self.leaves.lock().contains_key(&node))
    }

    /// The nodes of the leaves of some parameters, by parameter.
    pub(crate) fn nodes(&self, parameters: &HashSet<usize>) -> HashMap<usize, u64> {
        let leaves = self.leaves.lock();
        let nodes = leaves.iter().map(|(node, parameter)| (*parameter, *node));
        nodes
            .filter(|(parameter, _)| parameters.contains(parameter))
            .collect()
    }

    pub(crate) fn units(&self) -> &Arc<Units> {
        &self.units
    }

    /// The module with new leaves, which are gathered from these shards of all ranks when they are
    /// used.
    pub(crate) fn put<B: AutodiffBackend, M: AutodiffModule<B>>(self: &Arc<Self>, module: M) -> M {
        let units = self.units.clone();
        units.map::<B, M>(module, |parameter, old| {
            self.leaf::<B>(parameter, &B::float_device(old))
        })
    }

    /// The module with all parameters in the host memory of rank 0; the module as it is on others,
    /// which hold one unit at a time. All ranks call it.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn put_whole_on_rank_0<B, M>(&self, module: M) -> Result<M, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let is_rank_0 = self.units.layout().rank() == 0;
        let mut whole = HashMap::new();
        for unit in &self.units.all {
            let unit = self.start(unit, false, &self.at).wait()?;
            if is_rank_0 {
                whole.extend(unit);
            }
        }
        if !is_rank_0 {
            return Ok(module);
        }
        Ok(self.units.map::<B, M>(module, |parameter, old| {
            let data = whole.remove(&parameter);
            let data = data.expect("a parameter is in one unit, and is replaced once");
            let residence = Residence::alone_on_host();
            NewValue::Host(data).into_tensor::<B>(&residence, &B::float_device(old))
        }))
    }

    /// A new leaf of a parameter, gathered whenever an operation uses it.
    fn leaf<B: AutodiffBackend>(
        self: &Arc<Self>,
        parameter: usize,
        device: &Device<B>,
    ) -> FloatTensor<B> {
        let known = &self.units.layout().parameters()[parameter];
        let shape = Shape::from(known.shape.clone());
        let own = &self.own[parameter];
        match self.low_types[parameter] {
            Some(low) => {
                self.low[parameter].get_or_init(|| own.rounded::<B::InnerBackend>(low, device));
            }
            None => own.forget_rounded(),
        }
        let gathered = GatheredParameter {
            store: self.clone(),
            parameter,
        };
        let place = self.units.place(parameter);
        let leaf = delivered_in_order::<B>(place, shape, known.dtype, device, gathered);
        let leaf = leaf.expect("`prepare` refuses a backend without `Remat`");
        if let Some(node) = leaf_node::<B>(&leaf) {
            self.leaves.lock().insert(node, parameter);
        }
        leaf
    }

    /// Notes that a parameter is cast to this type, and returns whether it is gathered in that
    /// type.
    fn has_type(&self, parameter: usize, dtype: DType) -> bool {
        self.units.is_cast(parameter, dtype);
        self.low_types[parameter] == Some(dtype)
    }

    /// All elements of a parameter, in its own type or in the one in which it is gathered. Panics
    /// with the error of the group.
    fn get(&self, parameter: usize, dtype: DType) -> TensorData {
        let unit = self.units.of(parameter);
        let low = self.low_types[parameter];
        if low.is_some_and(|low| low != dtype) {
            self.units.is_used_whole(parameter);
        }
        let mut held = self.held.lock();
        let is_new = held.last.as_ref().is_none_or(|(last, _)| *last != unit);
        if is_new {
            held.last = None; // freed before another unit arrives
            let ahead = held.next.take().filter(|(next, _)| *next == unit);
            held.last = ahead.map(|(_, arriving)| (unit, raise(arriving.wait())));
        }
        let found = held.last.as_ref().map(|(_, unit)| unit[&parameter].dtype);
        if found != Some(dtype) {
            held.last = None;
            let in_low = low.is_none_or(|low| low == dtype);
            let arriving = self.start(&self.units.all[unit], in_low, &self.at);
            held.last = Some((unit, raise(arriving.wait())));
        }
        if is_new {
            held.next = self.units.next(unit).map(|next| {
                let [this, ahead] = [unit, next].map(|unit| &self.units.all[unit]);
                // Another label than that of a gather for a use, so that ranks which have used
                // different units are refused.
                let at = format!("while unit `{}` computes, {}", this.path, self.at);
                (next, self.start(ahead, true, &at))
            });
        }
        let (_, unit) = held.last.as_ref().expect("it was gathered");
        unit[&parameter].clone()
    }

    /// What [`get`](Self::get) returns now without a call of other ranks, and without a change of
    /// what is expected next.
    fn at_hand(&self, parameter: usize, dtype: DType) -> Option<TensorData> {
        if self.low_types[parameter].is_some_and(|low| low != dtype) {
            return None;
        }
        let held = self.held.try_lock()?;
        let (unit, gathered) = held.last.as_ref()?;
        let data = gathered
            .get(&parameter)
            .filter(|_| *unit == self.units.of(parameter))?;
        (data.dtype == dtype).then(|| data.clone())
    }

    /// Starts to gather a unit: in the types to which its parameters are rounded if `in_low`, else
    /// in their own.
    fn start(&self, unit: &Arc<Unit>, in_low: bool, at: &str) -> Pending<Gathered, ZeroError> {
        let parameters = unit.parameters.iter().copied();
        let own = parameters.clone().map(|parameter| {
            let low = self.low[parameter].get().filter(|_| in_low);
            low.unwrap_or(self.own[parameter].own()).clone()
        });
        let reads = Elements::start_reads(&own.collect::<Vec<_>>());
        let reads = parameters.zip(reads).collect();
        // Without the group: a job that owns the group which runs it would keep it alive.
        let (layout, unit, at) = (self.units.layout().clone(), unit.clone(), at.to_owned());
        let work = move |ranks: &mut _| unit.gather(&layout, reads, &at, ranks);
        Pending::start(self.reducer.group(), work)
    }
}

/// A parameter that is gathered when it is used.
struct GatheredParameter {
    store: Arc<ParameterStore>,
    parameter: usize,
}

impl Delivery for GatheredParameter {
    fn data(&self, dtype: DType) -> TensorData {
        self.store.get(self.parameter, dtype)
    }

    fn has(&self, dtype: DType) -> bool {
        self.store.has_type(self.parameter, dtype)
    }

    fn at_hand(&self, dtype: DType) -> Option<TensorData> {
        self.store.at_hand(self.parameter, dtype)
    }
}

impl fmt::Debug for ParameterStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shards = f.debug_struct("ParameterStore");
        shards.field("at", &self.at).finish_non_exhaustive()
    }
}

/// This rank's shards of the sharded parameters, by position: those in `known` for leaves that were
/// made from `known`, if all ranks hold the same elements of them as there. Other leaves, which have
/// the same values on all ranks, are read. Shards of frozen parameters that the module has no more
/// are those in `known`.
pub(crate) fn own_shards<B: AutodiffBackend, M: AutodiffModule<B>>(
    known: Option<&ParameterStore>,
    units: &Units,
    module: &M,
) -> Vec<Arc<Shard>> {
    let (layout, values) = (units.layout(), units.values::<B, M>(module));
    let known = known.map(|known| (known, known.units.layout().cuts(), layout.cuts()));
    let shards = (0..layout.parameters().len()).map(|parameter| {
        let of_known = known.as_ref().and_then(|(known, known_cuts, cuts)| {
            let Some(leaf) = values.get(&parameter) else {
                return Some(&known.own[parameter]);
            };
            let its_parameter = known.parameter_of(leaf_node::<B>(leaf))?;
            // By those of all ranks: a rank whose own elements alone are the same, none for
            // example, would leave out the read, which the others make together.
            let is_cut_so = cuts
                .iter()
                .zip(known_cuts)
                .all(|(now, before)| now[parameter] == before[its_parameter]);
            is_cut_so.then(|| &known.own[its_parameter])
        });
        if let Some(own) = of_known {
            return own.clone();
        }
        let leaf = values.get(&parameter);
        let leaf = leaf.expect("the module that is prepared has all parameters");
        // The read may be a collective, so a rank without elements of the parameter makes it too.
        let whole = read::<B::InnerBackend>(B::inner(leaf.clone()));
        let own = NewValue::Host(cut(&whole, layout.shard(parameter)));
        let device = B::float_device(leaf);
        Arc::new(Shard::new::<B::InnerBackend>(own, units.memory(), &device))
    });
    shards.collect()
}
