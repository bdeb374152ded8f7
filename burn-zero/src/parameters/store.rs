//! Parameters of stage 3: a rank holds its shard of them in host memory, and a unit is gathered
//! when an operation uses one of its parameters.
//!
//! All ranks use units in the same order, because they run the same program: each gather is a
//! collective whose label has the unit and the step, so that ranks that differ stop with an error
//! that has both labels. A rank holds two gathered units at most, in host memory: the one that was
//! used last, and the next one by the order of the first step, which is gathered while this one
//! computes. A parameter that steps cast before they use it, as autocast does, is gathered in the
//! type of the cast: each rank casts its shard of it after the update.

use core::fmt;
use std::collections::HashMap;
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Shape, TensorData};
use burn_backend::tensor::{Device, FloatTensor};
use burn_checkpoint::{Delivery, delivered_in_order};
use burn_ranks::Pending;
use parking_lot::Mutex;

use super::units::{Gathered, Rounded, Shard, Unit, Units};
use super::{NewValue, Residence};
use crate::backend::leaf_node;
use crate::host::{read, read_floats};
use crate::optimizer::Parameters;
use crate::reduce::{GradientReducer, Layout};
use crate::{ZeroError, raise};

/// The parameters after one step, which the leaves of the model share.
pub(crate) struct ParameterStore {
    reducer: Arc<GradientReducer>,
    units: Arc<Units>,
    /// By parameter.
    own: Arc<[Shard]>,
    /// The step, for labels.
    at: String,
    /// The nodes of the leaves that were made from these shards, by parameter.
    leaves: Mutex<HashMap<usize, u64>>,
    /// By parameter: this rank's shard in the type that the parameter is cast to.
    rounded: Mutex<Rounded>,
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

impl ParameterStore {
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
            rounded: Mutex::default(),
            held: Mutex::default(),
        })
    }

    /// This rank's shard of a parameter, if `node` is that of the leaf which was made from it.
    pub(crate) fn own(&self, parameter: usize, node: Option<u64>) -> Option<&Shard> {
        let is_own = node.is_some() && self.node(parameter) == node;
        is_own.then(|| &self.own[parameter])
    }

    /// Whether this is the node of a leaf that was made from these shards.
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

    /// The module with new leaves, which are gathered from these shards of all ranks when they are
    /// used.
    pub(crate) fn put<B: AutodiffBackend, M: AutodiffModule<B>>(self: &Arc<Self>, module: M) -> M {
        let parameters = Parameters::of::<B, M>(&module);
        parameters.map::<B, M>(module, |parameter, old| {
            self.leaf::<B>(parameter, &B::float_device(&old))
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
            let residence = Residence::alone_on_host();
            let leaf = NewValue::Host(data).into_tensor::<B>(&residence, &B::float_device(&old));
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
        let shape = Shape::from(known.shape.clone());
        if let Some(low) = self
            .units
            .low_type(parameter)
            .filter(|_| known.dtype == DType::F32)
        {
            let low = rounded::<B::InnerBackend>(&self.own[parameter], low, device);
            self.rounded.lock().insert(parameter, Arc::new(low));
        }
        let gathered = GatheredParameter {
            store: self.clone(),
            parameter,
        };
        let place = self.units.place(parameter);
        let leaf = delivered_in_order::<B>(place, shape, known.dtype, device, gathered);
        let leaf = leaf.expect("`prepare` refuses a backend without `Remat`");
        let leaf = B::float_set_require_grad(leaf, true);
        if let Some(node) = leaf_node::<B>(&leaf) {
            self.leaves.lock().insert(parameter, node);
        }
        leaf
    }

    /// Notes that a parameter is cast to this type, and returns whether it is gathered in that
    /// type.
    fn has_type(&self, parameter: usize, dtype: DType) -> bool {
        self.units.is_cast(parameter, dtype);
        self.rounded_to(parameter) == Some(dtype)
    }

    /// The type in which a parameter is gathered where a cast uses it, if that is not its own.
    fn rounded_to(&self, parameter: usize) -> Option<DType> {
        let rounded = self.rounded.lock();
        rounded.get(&parameter).map(|own| own.dtype)
    }

    /// All elements of a parameter, in its own type or in the one in which it is gathered. Panics
    /// with the error of the group.
    fn get(&self, parameter: usize, dtype: DType) -> TensorData {
        let unit = self.units.of(parameter);
        let rounded = self.rounded_to(parameter);
        if rounded.is_some_and(|rounded| rounded != dtype) {
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
            let in_low = rounded.is_none_or(|rounded| rounded == dtype);
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
        if self
            .rounded_to(parameter)
            .is_some_and(|rounded| rounded != dtype)
        {
            return None;
        }
        let held = self.held.try_lock()?;
        let (unit, gathered) = held.last.as_ref()?;
        let data = gathered
            .get(&parameter)
            .filter(|_| *unit == self.units.of(parameter))?;
        (data.dtype == dtype).then(|| data.clone())
    }

    fn gather(&self, unit: &Arc<Unit>) -> Result<Gathered, ZeroError> {
        Ok(self.start(unit, false, &self.at).wait()?)
    }

    /// Starts to gather a unit: its rounded parameters in the types they are rounded to if
    /// `in_low`, else in their own.
    fn start(&self, unit: &Arc<Unit>, in_low: bool, at: &str) -> Pending<Gathered> {
        let low: Rounded = match in_low {
            false => Rounded::new(),
            true => {
                let rounded = self.rounded.lock();
                let of_unit = unit.parameters.iter();
                let of_unit = of_unit.filter_map(|parameter| rounded.get_key_value(parameter));
                of_unit
                    .map(|(parameter, own)| (*parameter, own.clone()))
                    .collect()
            }
        };
        // Without the group: a job that owns the group which runs it would keep it alive.
        let (layout, unit) = (self.units.layout.clone(), unit.clone());
        let (own, at) = (self.own.clone(), at.to_owned());
        let work = move |ranks: &mut _| unit.gather(&layout, &low, &own, &at, ranks);
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

/// This rank's shard in `dtype`, rounded by the backend's own cast.
fn rounded<I: Backend>(own: &Shard, dtype: DType, device: &Device<I>) -> TensorData {
    let data = TensorData::new(own.to_vec(), [own.len()]);
    if own.is_empty() {
        return data.convert_dtype(dtype);
    }
    let own = I::float_from_data(data, device);
    read::<I>(I::float_cast(own, dtype.into()))
}

impl fmt::Debug for ParameterStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shards = f.debug_struct("ParameterStore");
        shards.field("at", &self.at).finish_non_exhaustive()
    }
}

/// This rank's shards of the module's parameters: those in `known` for leaves that were made from
/// `known`. Other leaves, which have the same values on all ranks, are read.
pub(crate) fn own_shards<B: AutodiffBackend, M: AutodiffModule<B>>(
    known: Option<&ParameterStore>,
    layout: &Layout,
    parameters: &Parameters,
    module: &M,
) -> Vec<Shard> {
    let values = parameters.values::<B, M>(module).into_iter();
    let shards = values.map(|(parameter, value)| {
        let node = parameters.nodes[parameter];
        match known.and_then(|shards| shards.own(parameter, node)) {
            Some(own) => own.clone(),
            // The read may be a collective, so a rank without elements of the parameter makes it
            // too.
            None => {
                let whole = read_floats::<B::InnerBackend>(value);
                let ranges = layout.shard(parameter).iter();
                let own = ranges.flat_map(|range| &whole[range.clone()]);
                Arc::new(own.copied().collect())
            }
        }
    });
    shards.collect()
}
