//! A training loop that clips by hand has one call for the norm over all ranks.

use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{ElementConversion, Tensor};

use super::support::*;

/// What a training loop does by itself: the sum of the squares of its gradients.
struct Squares<'a> {
    gradients: &'a GradientsParams,
    sum: f64,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(gradient) = self.gradients.get::<B::InnerBackend, D>(param.id) {
            self.sum += gradient.powi_scalar(2).sum().into_scalar().elem::<f64>();
        }
    }
}

/// As a training loop computes it by itself.
fn norm_by_hand<B: AutodiffBackend>(
    model: &impl AutodiffModule<B>,
    gradients: &GradientsParams,
) -> f32 {
    let mut squares = Squares {
        gradients,
        sum: 0.0,
    };
    model.visit(&mut squares);
    squares.sum.sqrt() as f32
}

/// And how it clips.
struct Scale<'a> {
    gradients: &'a mut GradientsParams,
    factor: f32,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(gradient) = self.gradients.remove::<B::InnerBackend, D>(param.id) {
            self.gradients.register(param.id, gradient * self.factor);
        }
    }
}

fn clip<B: AutodiffBackend>(
    model: &impl AutodiffModule<B>,
    gradients: &mut GradientsParams,
    norm: f32,
) {
    let factor = (MAX_NORM / norm).min(1.0);
    model.visit(&mut Scale { gradients, factor });
}

/// Below the norms here.
const MAX_NORM: f32 = 0.05;
const STEPS: usize = 3;

/// The norms of a training that clips, and its parameters.
type Clipped = (Vec<f32>, Vec<Vec<f32>>);

fn plain() -> Clipped {
    let mut model = Net::<Plain>::new(&Default::default());
    let mut optimizer = AdamWConfig::new().init();
    let mut norms = Vec::new();
    for step in 0..STEPS {
        let loss = model.loss(batch(step, 0, 1));
        let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
        let norm = norm_by_hand::<Plain>(&model, &gradients);
        clip::<Plain>(&model, &mut gradients, norm);
        norms.push(norm);
        model = optimizer.step(0.05, model, gradients);
    }
    (norms, parameters(&model))
}

#[test]
fn the_norm_over_all_ranks_is_that_of_one_rank_and_clips_as_there() {
    let (norms, trained) = plain();
    assert!(norms.iter().all(|norm| *norm > MAX_NORM), "{norms:?}");
    let mut of_stages: Vec<Clipped> = Vec::new();
    for world_size in [1, 2, 3] {
        for stage in WITH_PARAMETERS {
            let found = on_ranks(world_size, |group| {
                let (rank, adamw) = (group.rank(), AdamWConfig::new().init());
                let (mut update, reduction) = reduced(adamw, group, small_buckets(stage))?;
                let mut model = update.prepare(Net::<B>::new(&Default::default()))?;
                let mut norms = Vec::new();
                for step in 0..STEPS {
                    let loss = model.loss(batch(step, rank, world_size));
                    let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
                    let norm = reduction.global_norm::<B, _>(&model, &gradients)?;
                    // It changes nothing.
                    assert_eq!(reduction.global_norm::<B, _>(&model, &gradients)?, norm);
                    if world_size > 1 {
                        let by_hand = norm_by_hand::<B>(&model, &gradients);
                        assert!((by_hand - norm).abs() > 1e-3 * norm, "{by_hand} {norm}");
                    }
                    clip::<B>(&model, &mut gradients, norm);
                    norms.push(norm);
                    model = update.step(0.05, model, gradients)?;
                }
                Ok((norms, parameters(&model)))
            });
            let case = format!("{world_size} ranks, {stage}");
            for (found, expected) in found.0.iter().zip(&norms) {
                let error = (found - expected).abs() / expected;
                assert!(error < 1e-5, "{case}: {found} is not {expected}");
            }
            let distance = distance(&trained, &found.1);
            assert!(distance < 2e-5, "{case}: {distance}");
            of_stages.push(found);
        }
        // The norms of the same gradients have the same bits in all stages. Those of a later step
        // differ in rounding: the gradients are scaled after their reduction in stages 2 and 3, and
        // before it in stages 0 and 1.
        let first = of_stages[0].0[0];
        assert!(
            of_stages.iter().all(|found| found.0[0] == first),
            "{world_size} ranks"
        );
        for of_stages in of_stages.chunks(2) {
            assert_eq!(of_stages[0], of_stages[1], "{world_size} ranks");
        }
        of_stages.clear();
    }
}

#[test]
fn the_norm_of_a_model_that_was_not_prepared_is_refused() {
    on_ranks(2, |group| {
        let adamw = AdamWConfig::new().init();
        let settings = small_buckets(WITH_PARAMETERS[0]);
        let (_, reduction) = reduced::<Net<B>, B>(adamw, group, settings)?;
        let model = Net::<B>::new(&Default::default());
        let refused = reduction.global_norm::<B, _>(&model, &GradientsParams::new());
        let refused = refused.map_err(|error| error.to_string());
        assert!(refused.is_err_and(|error| error.contains("prepare")));
        Ok(())
    });
}
