//! The average of the weights, of which each rank has that of its shards.

use std::path::Path;
use std::sync::Arc;

use burn::optim::AdamWConfig;
use burn::record::{FullPrecisionSettings, Record};
use burn_accum::AccumConfig;
use burn_amp::GradScalerConfig;
use burn_update::{AverageConfig, Update, UpdateError};
use burn_zero::record::{Keep, TrainingState};
use burn_zero::{
    Memory, Partition, ProcessGroup, RankReduction, Recorder, ReduceOverRanks, Stage, Training,
    ZeroSettings,
};
use ciborium::Value;
use tempfile::tempdir;

use super::support::*;

type Averaging = Update<Net<B>, B>;
type Run = Training<Net<B>, Averaging, f64>;

fn average() -> AverageConfig {
    AverageConfig::new(0.7)
}

/// With a loss scale and windows of two micro-batches.
fn build(
    group: Arc<dyn ProcessGroup>,
    settings: ZeroSettings,
) -> Result<(Run, Recorder), UpdateError> {
    let reduction = RankReduction::new(settings, group)?;
    let mut update = Update::new(AdamWConfig::new().init())
        .average(average())?
        .reduce_by(&reduction)?
        .accumulate(AccumConfig::mean(2))?
        .scale(GradScalerConfig::default())?;
    let model = update.prepare(Net::new(&Default::default()))?;
    let recorder = reduction.recorder()?;
    let training = Training {
        model,
        optimizer: update,
        scheduler: 0.05,
    };
    Ok((training, recorder))
}

/// So many micro-steps, of which the second overflows on the last rank.
fn train(mut run: Run, steps: core::ops::Range<usize>, group: &dyn ProcessGroup) -> Run {
    let (rank, ranks) = (group.rank(), group.world_size());
    for step in steps {
        let mut loss = run.model.loss(batch(step, rank, ranks));
        if step == 1 && rank == ranks - 1 {
            loss = loss * f32::INFINITY;
        }
        let gradients = run.optimizer.backward(&run.model, loss);
        run.model = run.optimizer.step(0.05, run.model, gradients).unwrap();
    }
    run
}

fn averaged(run: &Run) -> Vec<Vec<f32>> {
    parameters(&run.optimizer.averaged(&run.model).unwrap())
}

const STEPS: usize = 9;

fn trained_averages(ranks: usize, settings: &ZeroSettings) -> Vec<Vec<f32>> {
    on_ranks(ranks, |group| {
        let (run, _) = build(group.clone(), settings.clone())?;
        let before = run.optimizer.averaged(&run.model).map(drop);
        let before = before.unwrap_err();
        assert!(matches!(before, UpdateError::NoAverage { has_part: true }));
        let run = train(run, 0..STEPS, &*group);
        let (found, weights) = (averaged(&run), parameters(&run.model));
        assert_ne!(found, weights);
        // The model goes on as if it had not been averaged.
        let run = train(run, STEPS..STEPS + 2, &*group);
        assert_ne!(parameters(&run.model), weights);
        Ok(found)
    })
}

#[test]
fn the_average_of_ranks_is_that_of_one() {
    let mut plain = Update::new(AdamWConfig::new().init())
        .average(average())
        .unwrap()
        .accumulate(AccumConfig::mean(2))
        .unwrap();
    let mut model = Net::<Plain>::new(&Default::default());
    for step in (0..STEPS).filter(|step| *step != 1) {
        let gradients = plain.backward(&model, model.loss(batch(step, 0, 1)));
        model = plain.step(0.05, model, gradients).unwrap();
    }
    let one = parameters(&plain.averaged(&model).unwrap());
    for ranks in 1..=3 {
        let each = WITH_PARAMETERS.map(|stage| trained_averages(ranks, &small_buckets(stage)));
        assert!(distance(&each[0], &one) < 1e-4, "{ranks}");
        // Stages 2 and 3 add windows up in another order.
        assert_eq!(each[0], each[1], "{ranks}");
        assert_eq!(each[2], each[3], "{ranks}");
    }
}

#[test]
fn it_is_the_same_wherever_parameters_and_shards_are() {
    let usual = trained_averages(2, &small_buckets(Stage::Parameters));
    let parts = Partition::Whole;
    let small = small_buckets(Stage::Parameters);
    let (host, device) = (Memory::Host, Memory::Device);
    for settings in [
        ZeroSettings {
            partition: parts,
            ..small.clone()
        },
        ZeroSettings {
            shards: device,
            ..small.clone()
        },
        ZeroSettings {
            shards: host,
            ..small
        },
        ZeroSettings {
            parameters: host,
            ..small_buckets(Stage::Gradients)
        },
    ] {
        assert_eq!(trained_averages(2, &settings), usual, "{settings:?}");
    }
}

fn save(dir: &Path, ranks: usize, stage: Stage) -> Vec<Vec<f32>> {
    on_ranks(ranks, |group| {
        let (run, recorder) = build(group.clone(), small_buckets(stage))?;
        let run = train(run, 0..STEPS, &*group);
        let state = TrainingState::at_step(1);
        let saved = recorder.save::<B, _, _, _>(dir, run.by_ref(), state, Keep::default());
        saved.unwrap();
        Ok(averaged(&run))
    })
}

/// Saved by two ranks and loaded by one and three.
#[test]
fn a_record_has_it_for_any_number_of_ranks() {
    for from in WITH_PARAMETERS {
        let first = tempdir().unwrap();
        let expected = save(first.path(), 2, from);
        let saved = contents(first.path());
        let name = "optimizer/average/tied";
        assert!(saved.0.contains_key(name), "{:?}", saved.0.keys());
        for ranks in [1, 3] {
            for stage in WITH_PARAMETERS {
                let second = tempdir().unwrap();
                let found = on_ranks(ranks, |group| {
                    let (run, recorder) = build(group, small_buckets(stage))?;
                    let loaded = recorder.load::<B, _, _, _>(first.path(), None, run);
                    let (run, state) = loaded.unwrap();
                    let state = state.unwrap();
                    let keep = Keep::default();
                    let saved =
                        recorder.save::<B, _, _, _>(second.path(), run.by_ref(), state, keep);
                    saved.unwrap();
                    Ok(averaged(&run))
                });
                assert_eq!(found, expected, "{from:?} to {ranks}, {stage:?}");
                assert!(saved == contents(second.path()), "{from:?}, {stage:?}");
            }
        }
    }
}

#[test]
fn a_training_with_it_goes_on_bit_for_bit() {
    for stage in WITH_PARAMETERS {
        let dir = tempdir().unwrap();
        save(dir.path(), 2, stage);
        let [straight, resumed] = [false, true].map(|resumes| {
            on_ranks(2, |group| {
                let (mut run, recorder) = build(group.clone(), small_buckets(stage))?;
                let mut begun = 0;
                if resumes {
                    run = recorder
                        .load::<B, _, _, _>(dir.path(), None, run)
                        .unwrap()
                        .0;
                    begun = STEPS;
                }
                let run = train(run, begun..STEPS + 6, &*group);
                Ok([averaged(&run), parameters(&run.model)])
            })
        });
        assert_eq!(straight, resumed, "{stage:?}");
    }
}

/// The elements of the averages that a rank has, by its own record.
fn held(update: &Averaging) -> usize {
    fn bytes(value: &Value) -> usize {
        match value {
            Value::Bytes(bytes) => bytes.len(),
            Value::Map(fields) => fields.iter().map(|(_, value)| bytes(value)).sum(),
            _ => 0,
        }
    }
    let item = update.record().into_item::<FullPrecisionSettings>();
    let tree = Value::serialized(&item).unwrap();
    let field = |value: &Value, name: &str| {
        let fields = value.as_map().unwrap();
        let found = fields.iter().find(|(key, _)| key.as_text() == Some(name));
        found.unwrap().1.clone()
    };
    bytes(&field(&field(&tree, "parts"), "average")) / size_of::<f32>()
}

#[test]
fn a_rank_holds_the_averages_of_its_shards_only() {
    let elements: usize = parameters(&Net::<Plain>::new(&Default::default()))
        .iter()
        .map(Vec::len)
        .sum();
    for stage in WITH_PARAMETERS {
        let each = on_each_rank(3, |group| {
            let (run, _) = build(group.clone(), small_buckets(stage)).unwrap();
            held(&train(run, 0..STEPS, &*group).optimizer)
        });
        if stage == Stage::DataParallel {
            assert_eq!(each, [elements; 3]);
        } else {
            assert_eq!(each.iter().sum::<usize>(), elements, "{stage:?}");
            assert!(each.iter().all(|held| *held < elements / 2), "{each:?}");
        }
    }
}

/// Before the reduction or after it: a DeepSpeed file's update reduces already.
#[test]
fn it_can_be_added_before_or_after_the_reduction() {
    let averages = [false, true].map(|after| {
        on_ranks(2, |group| {
            let settings = small_buckets(Stage::Gradients);
            let update = Update::new(AdamWConfig::new().init());
            let mut update = if after {
                update.reduce(settings, group.clone())?.average(average())?
            } else {
                update.average(average())?.reduce(settings, group.clone())?
            };
            let twice = update.clone().average(average()).unwrap_err();
            assert!(matches!(twice, UpdateError::SameName { .. }));
            let mut model = update.prepare(Net::<B>::new(&Default::default()))?;
            for step in 0..3 {
                let loss = model.loss(batch(step, group.rank(), 2));
                let gradients = update.backward(&model, loss);
                model = update.step(0.05, model, gradients)?;
            }
            Ok(parameters(&update.averaged(&model)?))
        })
    });
    assert_eq!(averages[0], averages[1]);
}
