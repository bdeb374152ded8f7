//! Models and gradients that do not fit: what is said, before anything is sent.

use std::sync::Arc;

use burn::module::{AutodiffModule, Module, Param, ParamId};
use burn::nn::LinearConfig;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::FloatDType;
use burn::tensor::TensorData;
use burn_zero::{Partition, ShardingFault, SingleRank, Stage, ZeroSettings};

use super::support::*;

/// A single parameter of `D` dimensions.
#[derive(Module, Debug)]
struct Block<B: Backend, const D: usize> {
    weight: Param<Tensor<B, D>>,
}

impl<B: Backend, const D: usize> Block<B, D> {
    fn new() -> Self {
        let values = values(1 << D, 1);
        let weight = Tensor::<B, 1>::from_data(values.as_slice(), &Default::default());
        Self {
            weight: Param::from_tensor(weight.reshape([2; D])),
        }
    }

    fn gradients(&self) -> GradientsParams
    where
        B: burn::tensor::backend::AutodiffBackend,
        Self: AutodiffModule<B>,
    {
        let loss = self.weight.val().powi_scalar(3).sum();
        GradientsParams::from_grads(loss.backward(), self)
    }
}

fn whole() -> ZeroSettings {
    ZeroSettings {
        partition: Partition::Whole,
        ..ZeroSettings::stage(Stage::OptimizerState)
    }
}

#[test]
fn whole_parameters_of_as_many_dimensions_as_burns_optimizers_take() {
    let mut optimizer = AdamWConfig::new().init();
    let mut plain = Block::<Plain, 8>::new();
    for _ in 0..2 {
        let gradients = plain.gradients();
        plain = optimizer.step(0.05, plain, gradients);
    }
    let sharded = on_ranks(2, |group| {
        let mut update = over_ranks(AdamWConfig::new().init(), group, whole())?;
        let mut model = update.prepare(Block::<B, 8>::new())?;
        for _ in 0..2 {
            let gradients = model.gradients();
            model = update.step(0.05, model, gradients)?;
        }
        Ok(parameters(&model))
    });
    assert_eq!(sharded, parameters(&plain));
}

#[test]
fn more_dimensions_are_refused_before_the_first_step() {
    let error = on_ranks(2, |group| {
        let mut update = over_ranks(AdamWConfig::new().init(), group, whole())?;
        let refused = update.prepare(Block::<B, 9>::new()).err();
        Ok(refused.as_ref().and_then(refused_by_reduction).cloned())
    });
    let Some(ShardingFault::TooManyDimensions { path, dimensions }) = error else {
        panic!("{error:?}")
    };
    assert_eq!((path.as_str(), dimensions), ("weight", 9));
}

#[test]
fn a_type_that_ranks_do_not_exchange_is_refused() {
    let error = on_ranks(2, |group| {
        let mut model = Block::<B, 2>::new();
        let doubled = model.weight.val().cast(FloatDType::F64).detach();
        model.weight = Param::from_tensor(doubled);
        let sgd = SgdConfig::new().init();
        let mut update = over_ranks(sgd, group, ZeroSettings::default())?;
        let refused = update.prepare(model).err();
        Ok(refused.as_ref().and_then(refused_by_reduction).cloned())
    });
    let Some(ShardingFault::UnsupportedDtype { path, dtype }) = error else {
        panic!("{error:?}")
    };
    assert_eq!((path.as_str(), dtype), ("weight", burn::tensor::DType::F64));
}

#[test]
fn ranks_whose_models_differ_get_the_first_parameter_that_does() {
    let errors = on_each_rank(3, |group| {
        let mut model = Net::<B>::new(&Default::default());
        if group.rank() == 2 {
            model.first.bias = None;
        }
        let sgd = SgdConfig::new().init();
        let mut update = over_ranks(sgd, group, ZeroSettings::default()).unwrap();
        update.prepare(model).unwrap_err().to_string()
    });
    let [bias, tied] = ["first.bias [11] F32", "tied [11, 13] F32"];
    let said = |own: usize, value, peer: usize, other| {
        format!(
            "parameters, entry 1: rank {own} has `{value}`, but rank {peer} has `{other}`; all ranks must have the same"
        )
    };
    let expected = [
        said(0, bias, 2, tied),
        said(1, bias, 2, tied),
        said(2, tied, 0, bias),
    ];
    assert_eq!(errors, expected);
}

#[test]
fn a_rank_that_has_fewer_parameters_is_named() {
    let errors = on_each_rank(2, |group| {
        let mut weights = vec![Block::<B, 2>::new(), Block::new()];
        weights.truncate(2 - group.rank());
        let sgd = SgdConfig::new().init();
        let mut update = over_ranks(sgd, group, ZeroSettings::default()).unwrap();
        update.prepare(weights).unwrap_err().to_string()
    });
    assert!(
        errors[1].contains("rank 1 has `none`, but rank 0 has `1.weight [2, 2] F32`"),
        "{}",
        errors[1]
    );
}

/// What has no gradient.
#[derive(Module, Debug)]
struct Tables<B: Backend> {
    weight: Param<Tensor<B, 1>>,
    order: Param<Tensor<B, 2, Int>>,
    mask: Param<Tensor<B, 1, Bool>>,
}

impl<B: Backend> Tables<B> {
    fn of(rank: usize) -> Self {
        let (device, rank) = (Default::default(), rank as i32);
        let order = TensorData::from([[rank, 7], [rank + 1, -rank]]);
        let mask = [rank == 0, rank > 0, true];
        Self {
            weight: Param::from_tensor(Tensor::ones([3], &device) * rank),
            order: Param::initialized(ParamId::new(), Tensor::from_data(order, &device)),
            mask: Param::initialized(ParamId::new(), Tensor::from_data(mask, &device)),
        }
    }

    fn values(&self) -> (Vec<f32>, Vec<i64>, Vec<bool>) {
        (
            self.weight.val().into_data().iter().collect(),
            self.order.val().into_data().iter().collect(),
            self.mask.val().into_data().iter().collect(),
        )
    }
}

#[test]
fn tables_of_integers_and_masks_are_those_of_rank_0_too() {
    let expected = Tables::<Plain>::of(0).values();
    let prepared = on_ranks(3, |group| {
        let own = Tables::<B>::of(group.rank());
        assert_eq!(own.values() == expected, group.rank() == 0);
        let sgd = SgdConfig::new().init();
        let mut update = over_ranks(sgd, group, ZeroSettings::default())?;
        Ok(update.prepare(own)?.values())
    });
    assert_eq!(prepared, expected);
}

#[test]
fn tables_of_other_sizes_are_named() {
    let errors = on_each_rank(2, |group| {
        let mut own = Tables::<B>::of(0);
        if group.rank() == 1 {
            let mask = Tensor::from_data([true; 4], &Default::default());
            own.mask = Param::initialized(ParamId::new(), mask);
        }
        let sgd = SgdConfig::new().init();
        let mut update = over_ranks(sgd, group, ZeroSettings::default()).unwrap();
        update.prepare(own).unwrap_err().to_string()
    });
    for error in errors {
        assert!(
            error.contains("initial mask [3]") && error.contains("initial mask [4]"),
            "{error}"
        );
    }
}

/// What a step says that is refused.
fn says<M: AutodiffModule<B> + 'static>(
    prepared: M,
    stepped: impl FnOnce(M) -> (M, GradientsParams),
) -> String {
    let group = Arc::new(SingleRank::new());
    let sgd = SgdConfig::new().init();
    let mut update = over_ranks(sgd, group, ZeroSettings::default()).unwrap();
    let (model, gradients) = stepped(update.prepare(prepared).unwrap());
    let refused = update.step(0.1, model, gradients);
    refused.expect_err("the step is refused").to_string()
}

#[test]
fn a_step_with_another_model_names_what_differs() {
    let linear = |outputs| LinearConfig::new(2, outputs).init::<B>(&Default::default());
    let said = says(linear(3), |_| (linear(4), GradientsParams::new()));
    assert!(
        said.contains("weight [2, 4]") && said.contains("weight [2, 3]"),
        "{said}"
    );
}

#[test]
fn a_gradient_of_something_else_is_named() {
    let said = says(Block::<B, 2>::new(), |model| {
        let mut gradients = GradientsParams::new();
        let foreign = Tensor::<B, 1>::ones([3], &Default::default()).inner();
        gradients.register(model.weight.id, foreign);
        (model, gradients)
    });
    assert!(
        said.contains("the gradient of weight has 3 elements where 4 belong"),
        "{said}"
    );
}
