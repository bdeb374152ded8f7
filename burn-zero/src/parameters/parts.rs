//! A tensor in parts in the host memory of the ranks, gathered whenever an operation uses it.
//! Parameters of stage 3 are stored so until the optimizer has prepared them, and frozen parameters
//! always.

use core::fmt;
use core::ops::Range;
use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Shape, TensorData};
use burn_backend::tensor::{Device, FloatTensor};
use burn_checkpoint::delivered;
use burn_ranks::shard::balanced_offsets;
use burn_ranks::{BufferDtype, HostBuffer, ProcessGroup, Split};

use super::{NewValue, Residence, refused};
use crate::backend::leaf_node;
use crate::host::{exchanged, floats, read};
use crate::{ZeroError, raise};
use burn_decorator::module::{for_each_float, map_floats};

/// The parts of a tensor, of which this rank has one. Their lengths differ by at most 1.
#[derive(Clone)]
pub(crate) struct Parts {
    group: Arc<dyn ProcessGroup>,
    /// Names the tensor in collectives.
    label: String,
    shape: Shape,
    dtype: DType,
    /// By rank: the position of the first element of its part; and the end.
    offsets: Vec<usize>,
    own: HostBuffer,
}

impl Parts {
    /// This rank's part of `whole`, of which all ranks have the same elements.
    pub(crate) fn of(
        group: &Arc<dyn ProcessGroup>,
        label: String,
        whole: TensorData,
        buffer_dtype: BufferDtype,
    ) -> Self {
        let (shape, dtype) = (whole.shape.clone(), whole.dtype);
        let offsets = balanced_offsets(whole.num_elements(), group.world_size());
        let own = offsets[group.rank()]..offsets[group.rank() + 1];
        Self {
            offsets,
            own: HostBuffer::from_f32(buffer_dtype, floats(whole)[own].to_vec()),
            group: group.clone(),
            label,
            shape,
            dtype,
        }
    }

    /// The same parts with `own` as the elements of this rank's.
    pub(crate) fn with_own(&self, own: TensorData) -> Self {
        Self {
            own: HostBuffer::from_f32(self.own.dtype(), floats(own)),
            ..self.clone()
        }
    }

    /// The positions of this rank's elements in the flat tensor.
    pub(crate) fn range(&self) -> Range<usize> {
        let rank = self.group.rank();
        self.offsets[rank]..self.offsets[rank + 1]
    }

    /// This rank's elements, flat, in the tensor's type.
    pub(crate) fn own(&self) -> TensorData {
        let data = TensorData::new(self.own.clone().into_f32(), [self.own.len()]);
        data.convert_dtype(self.dtype)
    }

    /// Gathers the whole tensor.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn gather(&self) -> Result<TensorData, ZeroError> {
        let counts = self.offsets.windows(2).map(|part| part[1] - part[0]);
        let split = Split::Counts(counts.collect());
        let whole = self
            .group
            .all_gather(&self.label, self.own.clone(), split)?
            .into_f32();
        Ok(TensorData::new(whole, self.shape.clone()).convert_dtype(self.dtype))
    }

    /// A tensor that is gathered when an operation uses it.
    ///
    /// # Errors
    ///
    /// [`ZeroOptimizerError::NoRemat`](crate::ZeroOptimizerError::NoRemat).
    pub(crate) fn leaf<B: AutodiffBackend>(
        self: &Arc<Self>,
        device: &Device<B>,
    ) -> Result<FloatTensor<B>, ZeroError> {
        let parts = self.clone();
        let gather = move || raise(parts.gather());
        let leaf = delivered::<B>(self.shape.clone(), self.dtype, device, gather);
        Ok(leaf.map_err(refused)?)
    }
}

/// The parts of a module's frozen parameters, by path, and the nodes of the leaves that were made
/// from them. A parameter that something else has set since is another leaf.
#[derive(Clone, Default)]
pub(crate) struct Frozen(BTreeMap<String, (Arc<Parts>, Option<u64>)>);

impl Frozen {
    /// `node` is that of the leaf that was made from the parts, if any was.
    pub(crate) fn insert(&mut self, path: &str, parts: Arc<Parts>, node: Option<u64>) {
        self.0.insert(path.to_owned(), (parts, node));
    }

    pub(crate) fn extend(&mut self, new: Self) {
        self.0.extend(new.0);
    }

    /// The parts of the tensor at a path.
    pub(crate) fn of<B: AutodiffBackend>(
        &self,
        path: &str,
        tensor: &FloatTensor<B>,
    ) -> Option<&Arc<Parts>> {
        let (parts, node) = self.0.get(path)?;
        let is_own = node.is_some() && *node == leaf_node::<B>(tensor);
        is_own.then_some(parts)
    }

    /// The module with leaves of these parts at their paths.
    pub(crate) fn put<B: AutodiffBackend, M: AutodiffModule<B>>(&mut self, module: M) -> M {
        if self.0.is_empty() {
            return module;
        }
        map_floats(module, |path, _, old: FloatTensor<B>| {
            let Some((parts, node)) = self.0.get_mut(path) else {
                return old;
            };
            let leaf = parts.leaf::<B>(&B::float_device(&old));
            let leaf = leaf.expect("`prepare` refuses a backend without `Remat`");
            *node = leaf_node::<B>(&leaf);
            leaf
        })
    }

    /// Takes over the parameters that something else has set, which have the same values on all
    /// ranks. All ranks call it, as reading such a parameter may gather it.
    pub(crate) fn follow<B: AutodiffBackend, M: AutodiffModule<B>>(&mut self, module: &M) {
        for_each_float(module, |path, _, tensor: FloatTensor<B>| {
            let Some((parts, _)) = self
                .0
                .get(path)
                .filter(|_| self.of::<B>(path, &tensor).is_none())
            else {
                return;
            };
            let (group, label) = (parts.group.clone(), parts.label.clone());
            let node = leaf_node::<B>(&tensor);
            let whole = read::<B>(tensor);
            match exchanged(whole.dtype) {
                Some(dtype) => {
                    let parts = Parts::of(&group, label, whole, dtype);
                    self.insert(path, Arc::new(parts), node);
                }
                None => drop(self.0.remove(path)),
            }
        });
    }

    /// The module with whole frozen parameters in host memory on rank 0; the module as it is on
    /// other ranks. All ranks call it.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn put_whole_on_rank_0<B, M>(&self, module: M) -> Result<M, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let mut whole = BTreeMap::new();
        for (path, (parts, _)) in &self.0 {
            let data = parts.gather()?;
            if parts.group.rank() == 0 {
                whole.insert(path.as_str(), data);
            }
        }
        Ok(map_floats(
            module,
            |path, _, old: FloatTensor<B>| match whole.remove(path) {
                Some(data) => {
                    let residence = Residence::alone_on_host();
                    NewValue::Host(data).into_tensor::<B>(&residence, &B::float_device(&old))
                }
                None => old,
            },
        ))
    }
}

impl fmt::Debug for Frozen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}
