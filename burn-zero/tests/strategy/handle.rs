//! A handle to the reduction, which a part of the update keeps, knows the ranks of the Learner's
//! strategy.

use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::backend::AutodiffBackend;
use burn_update::{Part, Stateful, Step, Update, UpdateError};
use burn_zero::{
    GroupOptions, RankReduction, ReduceOverRanks, ShardingFault, Stage, ThreadGroup, ZeroError,
    ZeroSettings,
};
use parking_lot::Mutex;

use crate::learner::{Setup, train};
use crate::model::{Model, rows};
use crate::{STAGES, Z, falling, repeated};

/// Of each update on each rank: the number of ranks, and the norm of the gradient.
type Found = Arc<Mutex<Vec<(usize, f32)>>>;

/// A part that measures the gradient with a handle, and looks at it only.
#[derive(Clone)]
struct Measures {
    handle: RankReduction,
    found: Found,
}

impl<B: AutodiffBackend> Stateful<B> for Measures {
    fn name(&self) -> String {
        "measures".to_owned()
    }
}

impl<M: AutodiffModule<B>, B: AutodiffBackend> Part<M, B> for Measures {
    fn gradients(
        &mut self,
        _: &mut Step<B::InnerBackend>,
        model: &M,
        gradients: GradientsParams,
    ) -> Result<GradientsParams, UpdateError> {
        let group = self.handle.group()?;
        let norm = self.handle.global_norm::<B, M>(model, &gradients)?;
        self.handle.share_statistics::<B, M>(model)?;
        self.found.lock().push((group.world_size(), norm));
        Ok(gradients)
    }
}

fn settings(stage: Stage) -> ZeroSettings {
    ZeroSettings {
        bucket_elements: 20,
        ..ZeroSettings::stage(stage)
    }
}

fn measuring(stage: Stage) -> (Update<Model<Z>, Z>, Found) {
    let handle = RankReduction::in_learner(settings(stage));
    let found = Found::default();
    let part = Measures {
        handle: handle.clone(),
        found: found.clone(),
    };
    let update = Update::new(AdamWConfig::new().init());
    let update = update.reduce_by(&handle).unwrap().with(part).unwrap();
    (update, found)
}

/// Each rank has the same rows, so the norm is that of one rank.
fn setup(ranks: usize) -> Setup {
    Setup::new(repeated(&rows(0, 12), ranks), 1)
}

fn on_threads(ranks: usize, stage: Stage) -> Vec<(usize, f32)> {
    let (update, found) = measuring(stage);
    let strategy = Some(update.strategy().threads(ranks).into());
    train(Model::new(), update, falling(), setup(ranks), strategy);
    found.lock().clone()
}

#[test]
fn a_part_of_the_update_measures_over_the_ranks_of_the_strategy() {
    let _turn = crate::turn();
    for stage in STAGES {
        let one = on_threads(1, stage);
        assert!(one.len() > 1 && one.iter().all(|(ranks, _)| *ranks == 1));
        let two = on_threads(2, stage);
        assert_eq!(two.len(), 2 * one.len(), "{stage}");
        for (ranks, norm) in two {
            assert_eq!(ranks, 2, "{stage}");
            let is_known = |known: &(usize, f32)| (norm - known.1).abs() < 1e-5 * known.1;
            assert!(one.iter().any(is_known), "{stage}: {norm}, {one:?}");
        }
    }
}

/// As where each rank is a process, which has one handle.
#[test]
fn so_it_does_where_the_strategy_has_a_group() {
    let _turn = crate::turn();
    let one = on_threads(1, Stage::Gradients);
    let each = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
        let (update, found) = measuring(Stage::Gradients);
        let strategy = update.strategy().process(Arc::new(group));
        train(
            Model::new(),
            update,
            falling(),
            setup(2),
            Some(strategy.into()),
        );
        found.lock().clone()
    });
    for found in each.unwrap() {
        let norms = found.iter().zip(&one);
        assert_eq!(found.len(), one.len());
        for ((ranks, norm), (_, known)) in norms {
            assert_eq!(*ranks, 2);
            assert!((norm - known).abs() < 1e-5 * known, "{found:?}, {one:?}");
        }
    }
}

#[test]
fn before_the_strategy_has_brought_the_ranks_it_says_so() {
    let handle = RankReduction::in_learner(ZeroSettings::default());
    let model = Model::<Z>::new();
    let shared = handle.share_statistics::<Z, _>(&model).unwrap_err();
    for error in [handle.group().map(drop).unwrap_err(), shared] {
        let expected = ZeroError::Sharding(ShardingFault::NotPrepared);
        assert_eq!(error.to_string(), expected.to_string());
    }
}
