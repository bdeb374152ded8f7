//! Clones, and weights that something else has changed.

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::{GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::DType;
use burn::tensor::backend::AutodiffBackend;
use burn_zero::{OffloadConfig, OffloadedAdamW};

use super::support::*;

#[test]
fn a_clone_has_its_own_state() {
    let mut optimizer = config().init().unwrap();
    let model = train(&mut optimizer, Net::new(DType::BF16), 0..4);
    let mut clone = optimizer.clone();
    let once = train(&mut optimizer, model.clone(), 4..8);
    let again = train(&mut clone, model, 4..8);
    assert_eq!(bits(&once), bits(&again));
}

/// Halves all parameters.
struct Halve;

impl<B: Backend> ModuleMapper<B> for Halve {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let tensor = (tensor * 0.5).detach().require_grad();
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// The parameters after changed ones were trained on, and after a step at a learning rate of 0,
/// which shows the moments to be the same.
fn changed<O: Optimizer<Net<B>, B>>(mut optimizer: O, low: DType) -> Vec<Vec<f32>> {
    let model = train(&mut optimizer, Net::new(low), 0..4);
    let model = model.map(&mut Halve);
    parameters(&train(&mut optimizer, model, 4..6))
}

#[test]
fn the_host_follows_what_others_do_to_the_weights() {
    for low in [DType::F32, DType::BF16] {
        let halved = changed(config().init().unwrap(), low);
        let burns = burn::optim::AdamWConfig::new().with_weight_decay(0.125);
        let expected = changed(burns.init(), low);
        // f32 parameters are those of an optimizer without memory of weights.
        let pairs = halved[0].iter().zip(&expected[0]);
        assert!(pairs.into_iter().all(|(a, b)| (a - b).abs() < 1e-6));
    }
}

/// Exchanges the first two rows of a matrix: no sum of its elements changes.
struct SwapRows;

impl<B: Backend> ModuleMapper<B> for SwapRows {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let rows = tensor.dims()[0];
        let [first, second, rest] =
            [0..1, 1..2, 2..rows].map(|range| tensor.clone().slice([range]));
        let tensor = Tensor::cat(vec![second, first, rest], 0).detach();
        Param::from_mapped_value(id, tensor.require_grad(), mapper)
    }
}

/// Weights of whole numbers, whose sums are exact, after their rows were exchanged and a step at a
/// learning rate of 0: expected are the exchanged rows.
fn swapped<B: AutodiffBackend, O: Optimizer<Tied<B>, B>>(mut optimizer: O, dtype: DType) {
    let device = Default::default();
    let rows = Tensor::<B, 1, Int>::arange(0..9, &device).float();
    let weight = Param::from_tensor(rows.reshape([3, 3]).cast(dtype));
    let mut model = Tied {
        first: weight.clone(),
        second: weight,
    };
    let step = |optimizer: &mut O, model: Tied<B>| {
        let mut gradients = GradientsParams::new();
        let ones = Tensor::<B::InnerBackend, 2>::ones([3, 3], &device).cast(dtype);
        gradients.register(model.first.id, ones);
        optimizer.step(0.0, model, gradients)
    };
    for _ in 0..2 {
        model = step(&mut optimizer, model);
    }
    model.first = SwapRows.map_float(model.first);
    model.second = model.first.clone();
    model = step(&mut optimizer, model);
    let expected = [3.0, 4.0, 5.0, 0.0, 1.0, 2.0, 6.0, 7.0, 8.0];
    assert_eq!(parameters(&model), [expected, expected], "{dtype:?}");
}

#[test]
fn swapped_rows_are_noticed() {
    type Hooked = burn_zero::Sharded<B>;
    type Cast = burn_amp::Autocast<B, burn_amp::Off>;
    for dtype in [DType::F32, DType::BF16] {
        swapped::<B, _>(config().init().unwrap(), dtype);
        swapped::<Hooked, _>(config().init().unwrap(), dtype);
        swapped::<Cast, _>(config().init().unwrap(), dtype);
    }
}

/// Makes other leaves of the same values.
struct Again;

impl<B: Backend> ModuleMapper<B> for Again {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|tensor| tensor.detach().require_grad())
    }
}

#[test]
fn without_a_change_nothing_but_gradients_goes_to_the_host() {
    // A master ahead of its parameter stays ahead: other leaves of the same weights change nothing
    // either.
    let run = |again: bool| {
        let mut optimizer = config().init().unwrap();
        let mut model = Net::new(DType::BF16);
        for step in 0..10 {
            if again {
                model = model.map(&mut Again);
            }
            model = train(&mut optimizer, model, step..step + 1);
        }
        bits(&model)
    };
    assert_eq!(run(false), run(true));
}

/// A weight that the module holds twice.
#[derive(Module, Debug)]
struct Tied<B: Backend> {
    first: Param<Tensor<B, 2>>,
    second: Param<Tensor<B, 2>>,
}

#[test]
fn a_weight_that_is_held_twice_stays_one() {
    let weight = Param::from_tensor(tensor::<B, 2>(1, [3, 3]));
    let mut model = Tied {
        first: weight.clone(),
        second: weight,
    };
    let mut optimizer = OffloadConfig::default().init().unwrap();
    for step in 0..3 {
        let mut gradients = GradientsParams::new();
        gradients.register(model.first.id, tensor::<burn_flex::Flex, 2>(step, [3, 3]));
        model = optimizer.step(0.1, model, gradients);
        let [first, second] = parameters(&model).try_into().unwrap();
        assert_eq!(first, second);
    }
    assert!(model.first.val().is_require_grad());
}

#[test]
fn clones_on_two_threads_train_as_one_after_the_other() {
    type Hooked = burn_zero::Sharded<B>;
    let mut optimizer = config().init().unwrap();
    let loss = |model: &Net<Hooked>, step: usize| {
        let matrix = model.matrix.val() * tensor(step, [9, 13]);
        let low = model.inner.low.val() * tensor(step + 1, [2, 5, 3]);
        matrix.square().sum() + low.square().sum()
    };
    let step = |optimizer: &mut OffloadedAdamW, model: Net<Hooked>, at| {
        let gradients = GradientsParams::from_grads(loss(&model, at).backward(), &model);
        optimizer.step(0.01, model, gradients)
    };
    let model = step(&mut optimizer, Net::new(DType::F32), 0);
    let start = [100, 10_000].map(|data| (optimizer.clone(), model.clone(), data));
    let train = |(mut optimizer, model, data): (OffloadedAdamW, _, usize)| {
        bits(&(data..data + 300).fold(model, |model, at| step(&mut optimizer, model, at)))
    };
    let expected = start.clone().map(train);
    let together = std::thread::scope(|scope| {
        let threads = start.map(|start| scope.spawn(|| train(start)));
        threads.map(|thread| thread.join().unwrap())
    });
    assert!(together == expected);
}

#[test]
fn a_cast_of_the_model_is_followed() {
    let mut optimizer = config().init().unwrap();
    let mut model = train(&mut optimizer, Net::new(DType::F32), 0..2);
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let cast = |low: Tensor<B, 3>| low.cast(dtype).detach().require_grad();
        model.inner.low = model.inner.low.map(cast);
        model = train(&mut optimizer, model, 2..4);
        assert_eq!(model.inner.low.val().dtype(), dtype);
    }
}
