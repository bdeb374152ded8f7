//! The tensors of a module, by their paths.

use core::ops::Range;
use std::collections::HashSet;
use std::rc::Rc;

use burn::module::{AutodiffModule, Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, DType, Int, Tensor, backend::AutodiffBackend, backend::Backend};

use super::MODEL;
use crate::ZeroOptimizerError;
use crate::optimizer::Parameters;
use crate::record::{Entry, TensorSlice, TensorSpec};
use crate::state::{in_file, to_file};

/// A tensor of a module: a parameter, trained or frozen, or a buffer.
pub(super) struct ModelTensor {
    pub(super) path: String,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    /// Its position among the optimizer's parameters; `None` for a further path of a tied parameter.
    pub(super) parameter: Option<usize>,
    read: Rc<dyn Fn(Range<usize>) -> Vec<u8>>,
}

/// All tensors of a module, in its order.
pub(super) fn tensors<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    parameters: &Parameters,
) -> Vec<ModelTensor> {
    let mut collect = Collect {
        parameters,
        met: HashSet::new(),
        path: Vec::new(),
        found: Vec::new(),
    };
    // `valid` detaches from graphs and updates running statistics.
    Module::<B::InnerBackend>::visit(&module.valid(), &mut collect);
    collect.found
}

impl ModelTensor {
    /// Its description in a record.
    ///
    /// # Errors
    ///
    /// [`ZeroOptimizerError::State`].
    pub(super) fn spec(&self) -> Result<TensorSpec, ZeroOptimizerError> {
        let name = format!("{MODEL}/{}", self.path);
        let dtype = in_file(&name, self.dtype)?;
        Ok(TensorSpec::new(name, dtype, self.shape.clone()))
    }

    /// The elements in `ranges` as lazy entries of a record, read from the device when they are written.
    ///
    /// # Errors
    ///
    /// [`ZeroOptimizerError::State`].
    pub(super) fn into_entries(
        self,
        ranges: Vec<Range<usize>>,
    ) -> Result<Vec<Entry<'static>>, ZeroOptimizerError> {
        let spec = self.spec()?;
        let entries = ranges.into_iter().map(|range| {
            let (read, elements) = (self.read.clone(), range.clone());
            let slice = TensorSlice::new(spec.clone(), range);
            Entry::lazy(slice, move || Ok(read(elements).into()))
        });
        Ok(entries.collect())
    }
}

struct Collect<'a> {
    parameters: &'a Parameters,
    met: HashSet<ParamId>,
    path: Vec<String>,
    found: Vec<ModelTensor>,
}

impl Collect<'_> {
    fn add(
        &mut self,
        id: ParamId,
        dtype: DType,
        shape: Vec<usize>,
        read: impl Fn(Range<usize>) -> Vec<u8> + 'static,
    ) {
        let first = self.met.insert(id);
        self.found.push(ModelTensor {
            path: self.path.join("."),
            dtype,
            shape,
            parameter: self.parameters.index.get(&id).copied().filter(|_| first),
            read: Rc::new(read),
        });
    }
}

/// Reads a part of a tensor's elements.
macro_rules! reader {
    ($tensor:ident) => {
        move |range: Range<usize>| {
            let elements = $tensor.shape().num_elements();
            if range.is_empty() {
                return Vec::new();
            }
            let flat = $tensor.clone().reshape([elements]);
            let part = if range.len() == elements {
                flat
            } else {
                flat.slice([range])
            };
            to_file(part.into_data())
        }
    };
}

impl<B: Backend> ModuleVisitor<B> for Collect<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let tensor = param.val();
        let (dtype, shape) = (tensor.dtype(), tensor.dims().to_vec());
        self.add(param.id, dtype, shape, reader!(tensor));
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        let tensor = param.val();
        let (dtype, shape) = (tensor.dtype(), tensor.dims().to_vec());
        self.add(param.id, dtype, shape, reader!(tensor));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        let tensor = param.val();
        let (dtype, shape) = (tensor.dtype(), tensor.dims().to_vec());
        self.add(param.id, dtype, shape, reader!(tensor));
    }
}

/// The path of a record's model tensor, if this model has no such tensor.
pub(super) fn unknown(name: &str, model: &[ModelTensor]) -> Option<String> {
    let path = name.strip_prefix(MODEL)?.strip_prefix('/')?;
    let is_known = model.iter().any(|tensor| tensor.path == path);
    (!is_known).then(|| path.to_owned())
}
