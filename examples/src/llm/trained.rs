//! Which parameters of a model are trained.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::prelude::*;
use burn::tensor::DType;
use burn_decorator::follow_path;
use burn_update::Paths;

use super::weights::name_in_files;
use super::{Llm, LlmError};

impl<B: Backend> Llm<B> {
    /// Trains the parameters whose names in the files look like one of `patterns` (`lm_head.*`,
    /// `*.layers.29.*`), and freezes the others. No parameter gets its values by this.
    ///
    /// # Errors
    ///
    /// [`LlmError::NoParameter`] for a pattern that matches nothing.
    pub fn with_trained(self, patterns: &[String]) -> Result<Self, LlmError> {
        let mut names = Names::default();
        self.visit(&mut names);
        for pattern in patterns {
            let paths = Paths::glob(pattern);
            if !names
                .found
                .iter()
                .any(|(name, shape)| paths.matches(name, shape))
            {
                return Err(LlmError::NoParameter {
                    pattern: pattern.clone(),
                    instead: "* stands for any text: '*.layers.29.*', 'lm_head.*', '*norm.weight'",
                });
            }
        }
        let paths: Vec<_> = patterns.iter().map(Paths::glob).collect();
        Ok(self.train_where(|name, shape| paths.iter().any(|paths| paths.matches(name, shape))))
    }

    /// The model with no trained parameter.
    pub(super) fn frozen(self) -> Self {
        self.train_where(|_, _| false)
    }

    fn train_where(self, is_trained: impl Fn(&str, &[usize]) -> bool) -> Self {
        let mut mapper = SetTrained {
            path: Vec::new(),
            is_trained,
            numbers: 0,
        };
        let model = self.map(&mut mapper);
        model.with_trained_parameters(mapper.numbers)
    }

    /// The model with its frozen matrices in another type; vectors, which are small, stay.
    #[must_use]
    pub fn with_frozen_in(self, dtype: DType) -> Self {
        self.map(&mut FrozenIn(dtype))
    }
}

/// The names in files, and the shapes, of all parameters.
#[derive(Default)]
struct Names {
    path: Vec<String>,
    found: Vec<(String, Vec<usize>)>,
}

impl<B: Backend> ModuleVisitor<B> for Names {
    follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let name = name_in_files(&self.path.join("."));
        self.found.push((name, param.lazy_shape().to_vec()));
    }
}

struct SetTrained<F> {
    path: Vec<String>,
    is_trained: F,
    /// Those that are trained.
    numbers: usize,
}

impl<B: Backend, F: Fn(&str, &[usize]) -> bool> ModuleMapper<B> for SetTrained<F> {
    follow_path!();

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let name = name_in_files(&self.path.join("."));
        let shape = param.lazy_shape();
        let is_trained = (self.is_trained)(&name, &shape.to_vec());
        if is_trained {
            self.numbers += shape.num_elements();
        }
        param.set_require_grad(is_trained)
    }
}

struct FrozenIn(DType);

impl<B: Backend> ModuleMapper<B> for FrozenIn {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        if D < 2 {
            return param;
        }
        let dtype = self.0;
        param.init_mapper(move |tensor| {
            if tensor.is_require_grad() {
                tensor
            } else {
                tensor.cast(dtype)
            }
        })
    }
}
