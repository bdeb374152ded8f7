//! Running statistics: tensors that clones of a module share, behind a lock, and that a forward pass changes.
//!
//! Burn's `RunningState`, of which BatchNorm has two, holds its lock while a visitor or a mapper looks at it. So nothing in here
//! waits for another rank while a module is visited or mapped: tensors are collected, exchanged, and then put back.

use core::any::Any;
use std::collections::{BTreeSet, HashMap, VecDeque};

use burn::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param, ParamMapper};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData, backend::AutodiffBackend};
use parking_lot::Mutex;

use super::replace::replace_tensors;
use crate::ZeroError;
use crate::group::ProcessGroup;

/// A copy of a module that shares nothing with it: clones share running statistics, such as BatchNorm's, and a copy has its own. The
/// parameters are the same leaves under the same ids, as in a clone; no data is copied.
///
/// For ranks that are threads and begin with one model: each must train its own. [`ZeroOptimizer::prepare`](crate::ZeroOptimizer::prepare)
/// and [`ZeroStrategy`](crate::ZeroStrategy) make such copies themselves.
///
/// ```
/// # use burn::{backend::Autodiff, nn::{BatchNorm, BatchNormConfig}, tensor::Tensor};
/// # type B = Autodiff<burn_flex::Flex>;
/// let device = Default::default();
/// let norm: BatchNorm<B> = BatchNormConfig::new(3).init(&device);
/// let (clone, own) = (norm.clone(), burn_zero::independent::<B, _>(&norm));
///
/// norm.forward(Tensor::<B, 2>::ones([4, 3], &device));
/// let mean = |norm: &BatchNorm<B>| norm.running_mean.value_sync().into_data();
/// assert_eq!(mean(&clone), mean(&norm));
/// assert_ne!(mean(&own), mean(&norm));
/// ```
pub fn independent<B: AutodiffBackend, M: AutodiffModule<B>>(module: &M) -> M {
    // First of all, for it initialises parameters that are lazy, which each clone would do for itself.
    let inner = module.valid();
    let mut kept = Keep(VecDeque::new());
    drop(module.clone().map(&mut kept));
    M::from_inner(inner).map(&mut PutBack(kept.0))
}

/// The module, or an [`independent`] one if it may share something with its clones: it holds float tensors that are not trained.
pub(super) fn independent_if_shared<B: AutodiffBackend, M: AutodiffModule<B>>(module: M) -> M {
    match trains_all::<B, M>(&module) {
        true => module,
        false => independent::<B, M>(&module),
    }
}

/// What a way to the inner backend and back loses of parameters: leaves and mappers, in the order of the module.
struct Keep(VecDeque<Box<dyn Any>>);

impl Keep {
    fn keep<T: 'static>(&mut self, kept: T) {
        self.0.push_back(Box::new(kept));
    }
}

impl<B: AutodiffBackend> ModuleMapper<B> for Keep {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        self.keep((tensor.clone(), mapper.clone()));
        Param::from_mapped_value(id, tensor, mapper)
    }

    fn map_int<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D, Int>>,
    ) -> Param<Tensor<B, D, Int>> {
        let (id, tensor, mapper) = param.consume();
        self.keep(mapper.clone());
        Param::from_mapped_value(id, tensor, mapper)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D, Bool>>,
    ) -> Param<Tensor<B, D, Bool>> {
        let (id, tensor, mapper) = param.consume();
        self.keep(mapper.clone());
        Param::from_mapped_value(id, tensor, mapper)
    }
}

struct PutBack(VecDeque<Box<dyn Any>>);

impl PutBack {
    fn next<T: 'static>(&mut self) -> T {
        let kept = self.0.pop_front().and_then(|kept| kept.downcast().ok());
        *kept.expect("a module and what `from_inner` makes of it have the same tensors")
    }
}

impl<B: AutodiffBackend> ModuleMapper<B> for PutBack {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let id = param.id;
        let (tensor, mapper): (Tensor<B, D>, ParamMapper<Tensor<B, D>>) = self.next();
        Param::from_mapped_value(id, tensor, mapper)
    }

    fn map_int<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D, Int>>,
    ) -> Param<Tensor<B, D, Int>> {
        let (id, tensor, _) = param.consume();
        Param::from_mapped_value(id, tensor, self.next())
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D, Bool>>,
    ) -> Param<Tensor<B, D, Bool>> {
        let (id, tensor, _) = param.consume();
        Param::from_mapped_value(id, tensor, self.next())
    }
}

/// The running statistics of a module, by their paths. They are told from frozen parameters by what makes them special: what is done
/// to those of a clone is done to those of the module.
#[derive(Debug, Default)]
pub(crate) struct Statistics(BTreeSet<String>);

/// Modules that threads share are marked by one thread after the other.
static MARKING: Mutex<()> = Mutex::new(());

impl Statistics {
    /// Those of a module that this thread alone has.
    pub(crate) fn of<B: AutodiffBackend, M: AutodiffModule<B>>(module: &M) -> Self {
        if trains_all::<B, M>(module) {
            return Self::default();
        }
        let _marking = MARKING.lock();
        let paths = flip::<B, M>(module);
        flip_back::<B, M>(module, &paths);
        Self(paths)
    }

    pub(crate) fn contains(&self, path: &str) -> bool {
        self.0.contains(path)
    }

    /// Gives the module, and with it all its clones, those of rank 0. One collective, if there are any.
    ///
    /// # Errors
    ///
    /// [`ZeroError::Disagreement`] if rank 0's are of another size; those of the group.
    pub(crate) fn share<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        module: &M,
        group: &dyn ProcessGroup,
    ) -> Result<(), ZeroError> {
        if group.world_size() == 1 || self.0.is_empty() {
            return Ok(());
        }
        drop(module.valid()); // brings them up to date with the last forward pass
        let own = floats::<B, M>(module).into_iter();
        let own: Vec<_> = own.filter(|float| self.contains(&float.path)).collect();
        let bytes = match group.rank() {
            0 => {
                let data = own.iter().map(|float| (float.read)().bytes.to_vec());
                data.collect::<Vec<_>>().concat()
            }
            _ => Vec::new(),
        };
        let first = group
            .gather_bytes("running statistics", bytes)?
            .swap_remove(0);
        let expected: usize = own.iter().map(Float::bytes).sum();
        if first.len() != expected {
            return Err(ZeroError::Disagreement {
                label: "bytes of running statistics".to_owned(),
                rank: group.rank(),
                value: expected.to_string(),
                peer: 0,
                peer_value: first.len().to_string(),
            });
        }
        let (mut arrived, mut rest) = (HashMap::new(), &first[..]);
        for float in own {
            let (bytes, behind) = rest.split_at(float.bytes());
            rest = behind;
            let data = TensorData::from_bytes_vec(bytes.to_vec(), float.shape, float.dtype);
            arrived.insert(float.path, data);
        }
        if group.rank() != 0 {
            // Those of a clone are those of the module.
            drop(replace_tensors::<B, M>(module.clone(), &mut |path, _| {
                arrived.remove(path)
            }));
        }
        Ok(())
    }
}

/// Asks of what is shared with clones the opposite of what it is asked for, whether it requires gradients: the only thing
/// that is known of every tensor, at no cost. Which they are.
fn flip<B: AutodiffBackend, M: AutodiffModule<B>>(module: &M) -> BTreeSet<String> {
    let before = floats::<B, M>(module);
    drop(module.clone().map(&mut Flip {
        only: None,
        path: Vec::new(),
    }));
    let after = floats::<B, M>(module);
    let flipped = before.into_iter().zip(after);
    let flipped = flipped.filter(|(before, after)| before.requires_grad != after.requires_grad);
    flipped.map(|(before, _)| before.path).collect()
}

fn flip_back<B: AutodiffBackend, M: AutodiffModule<B>>(module: &M, paths: &BTreeSet<String>) {
    drop(module.clone().map(&mut Flip {
        only: Some(paths),
        path: Vec::new(),
    }));
}

struct Flip<'a> {
    only: Option<&'a BTreeSet<String>>,
    path: Vec<String>,
}

impl<B: AutodiffBackend> ModuleMapper<B> for Flip<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        match self.only {
            Some(only) if !only.contains(&self.path.join(".")) => param,
            _ => param.map(|tensor| {
                let requires_grad = tensor.is_require_grad();
                tensor.detach().set_require_grad(!requires_grad)
            }),
        }
    }
}

/// A float tensor of a module.
struct Float {
    path: String,
    requires_grad: bool,
    shape: Vec<usize>,
    dtype: DType,
    read: Box<dyn Fn() -> TensorData>,
}

impl Float {
    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }
}

/// The float tensors of a module, in its order.
fn floats<B: AutodiffBackend, M: AutodiffModule<B>>(module: &M) -> Vec<Float> {
    let mut floats = Floats {
        list: Vec::new(),
        path: Vec::new(),
    };
    module.visit(&mut floats);
    floats.list
}

/// Whether each float tensor is trained: then none is a running statistic.
fn trains_all<B: AutodiffBackend, M: AutodiffModule<B>>(module: &M) -> bool {
    floats::<B, M>(module)
        .iter()
        .all(|float| float.requires_grad)
}

struct Floats {
    list: Vec<Float>,
    path: Vec<String>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Floats {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let tensor = param.val();
        self.list.push(Float {
            path: self.path.join("."),
            requires_grad: tensor.is_require_grad(),
            shape: tensor.dims().to_vec(),
            dtype: tensor.dtype(),
            // Read when it is asked for, outside of the visit.
            read: Box::new(move || tensor.clone().inner().into_data()),
        });
    }
}
