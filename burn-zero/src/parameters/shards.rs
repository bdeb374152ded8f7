//! Parameters of stage 3: a rank holds its shard of them in host memory, and a unit is gathered when an operation uses one of its
//! parameters.
//!
//! All ranks use units in the same order, because they run the same program: each gather is a collective whose label has the unit and the
//! step, so that ranks which differ stop with both labels. A rank holds one gathered unit, in host memory: the one that was used last.

use core::fmt;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::tensor::{Shape, TensorData, backend::AutodiffBackend};
use burn_backend::tensor::{Device, FloatTensor};
use burn_checkpoint::delivered;
use parking_lot::Mutex;

use super::NewValue;
use crate::backend::leaf_node;
use crate::group::{HostBuffer, Split};
use crate::optimizer::Parameters;
use crate::reduce::{GradientReducer, Layout};
use crate::shard::Bucket;
use crate::{ZeroError, raise};

/// Elements of this rank's shard of a parameter, in f32.
pub(crate) type Shard = Arc<Vec<f32>>;

/// Parameters that are gathered together: those of a repeated block, such as `blocks.0`, or all that are in none.
struct Unit {
    /// The path of the block; nothing for the unit of all others.
    path: String,
    parameters: Vec<usize>,
    buckets: Vec<Bucket>,
}

/// The units of a model.
pub(crate) struct Units {
    all: Vec<Unit>,
    /// By parameter.
    of: Vec<usize>,
}

impl Units {
    pub(crate) fn new(layout: &Layout) -> Self {
        let mut members: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (parameter, known) in layout.parameters().iter().enumerate() {
            members
                .entry(block(&known.path))
                .or_default()
                .push(parameter);
        }
        let mut of = vec![0; layout.parameters().len()];
        let all = members
            .into_iter()
            .enumerate()
            .map(|(unit, (path, parameters))| {
                for &parameter in &parameters {
                    of[parameter] = unit;
                }
                Unit {
                    path: path.to_owned(),
                    buckets: layout.map().fill(parameters.iter().copied()),
                    parameters,
                }
            });
        Self {
            all: all.collect(),
            of,
        }
    }
}

/// `blocks.0` of `blocks.0.mlp.weight`, nothing of `norm.gamma`.
fn block(path: &str) -> &str {
    let mut end = 0;
    for part in path.split('.') {
        end += part.len();
        if part.bytes().all(|byte| byte.is_ascii_digit()) {
            return &path[..end];
        }
        end += 1;
    }
    ""
}

/// The parameters after one step, which the leaves of the model share.
pub(crate) struct Shards {
    reducer: Arc<GradientReducer>,
    units: Arc<Units>,
    /// By parameter.
    own: Vec<Shard>,
    /// The step, for labels.
    at: String,
    /// The nodes of the leaves that were made of it, by parameter.
    leaves: Mutex<HashMap<usize, u64>>,
    /// The unit that was used last, with its parameters.
    gathered: Mutex<Option<(usize, HashMap<usize, TensorData>)>>,
}

impl Shards {
    pub(crate) fn new(
        reducer: Arc<GradientReducer>,
        units: Arc<Units>,
        own: Vec<Shard>,
        at: String,
    ) -> Arc<Self> {
        Arc::new(Self {
            reducer,
            units,
            own,
            at,
            leaves: Mutex::default(),
            gathered: Mutex::default(),
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
        let unit = self.units.of[parameter];
        let mut gathered = self.gathered.lock();
        if gathered.as_ref().is_none_or(|(held, _)| *held != unit) {
            *gathered = None; // before the next one arrives
            *gathered = Some((unit, raise(self.gather(&self.units.all[unit]))));
        }
        let (_, unit) = gathered.as_ref().expect("it was gathered");
        unit[&parameter].clone()
    }

    fn gather(&self, unit: &Unit) -> Result<HashMap<usize, TensorData>, ZeroError> {
        let layout = self.reducer.layout();
        let zeros = |&parameter: &usize| {
            (
                parameter,
                vec![0.0; layout.parameters()[parameter].elements()],
            )
        };
        let mut whole: HashMap<usize, Vec<f32>> = unit.parameters.iter().map(zeros).collect();
        for (number, bucket) in unit.buckets.iter().enumerate() {
            let mut part = Vec::with_capacity(bucket.part(layout.rank()).len());
            let segments = bucket.segments().iter();
            for segment in segments.filter(|segment| segment.owner == layout.rank()) {
                let from = layout.position(segment.parameter, segment.range.start);
                let own = &self.own[segment.parameter][from..from + segment.range.len()];
                part.extend_from_slice(own);
            }
            let part = HostBuffer::from_f32(layout.dtype(bucket), part);
            let label = format!("unit `{}`, part {number}, {}", unit.path, self.at);
            let split = Split::Counts(bucket.counts());
            let all = self.reducer.group().all_gather(&label, part, split)?;
            let all = all.into_f32();
            for segment in bucket.segments() {
                let parameter = whole.get_mut(&segment.parameter);
                let parameter = parameter.expect("a unit's buckets have its parameters only");
                parameter[segment.range.clone()].copy_from_slice(&all[segment.in_bucket()]);
            }
        }
        let tensor = |(parameter, elements): (usize, Vec<f32>)| {
            let known = &layout.parameters()[parameter];
            let data = TensorData::new(elements, known.shape.clone());
            (parameter, data.convert_dtype(known.dtype))
        };
        Ok(whole.into_iter().map(tensor).collect())
    }
}

impl fmt::Debug for Shards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shards = f.debug_struct("Shards");
        shards.field("at", &self.at).finish_non_exhaustive()
    }
}
