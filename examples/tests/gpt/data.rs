//! The text, and which of its sequences a step reads.

use std::fs;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderIterator};
use burn_flex::Flex;
use burn_update::{EpochOfRank, RankLoader};
use burn_zero::BatchSizes;
use examples::gpt::loader::{Cut, Loader, Plan, TokenBatch, hash};
use examples::gpt::text::Text;

use super::turn;

const CONTEXT: usize = 5;

const SEED: u64 = 1;

fn batches(micro: u64, steps: u64, world_size: usize) -> BatchSizes {
    BatchSizes {
        train: micro * steps * world_size as u64,
        micro,
        steps,
        world_size,
    }
}

fn random(text: usize, batch: BatchSizes, plan: Plan) -> Loader<Flex> {
    let text: Vec<u8> = (0..text).map(|i| (i % 256) as u8).collect();
    let cut = Cut::new(&text, CONTEXT);
    Loader::new(cut, batch, plan, SEED, &Default::default())
}

/// The sequences of an epoch's batches.
fn read(epoch: Box<dyn DataLoaderIterator<TokenBatch<Flex>> + '_>) -> Vec<Vec<i32>> {
    epoch
        .map(|batch| {
            let (inputs, targets) = (batch.inputs.into_data(), batch.targets.into_data());
            let inputs: Vec<i32> = inputs.iter().collect();
            for (input, target) in inputs.iter().zip(targets.iter::<i32>()) {
                assert_eq!((input + 1) % 256, target, "the byte after it");
            }
            inputs
        })
        .collect()
}

fn plan(steps: usize, epoch: usize) -> Plan {
    Plan { steps, epoch }
}

#[test]
fn epochs_partition_the_steps() {
    for (steps, epoch) in [(12, 4), (13, 4), (3, 3), (1, 1), (7, 2)] {
        let plan = plan(steps, epoch);
        let mut next = 0;
        for number in 1..=plan.epochs() {
            let updates = plan.updates_of(number);
            assert_eq!(updates.start, next);
            assert!((1..=epoch).contains(&updates.len()));
            next = updates.end;
        }
        assert_eq!(next, steps);
        assert!(plan.updates_of(plan.epochs() + 1).is_empty());
    }
}

#[test]
fn sequences_depend_neither_on_epochs_nor_on_accumulation() {
    let _turn = turn();
    let whole = random(999, batches(4, 1, 1), plan(12, 12));
    let whole = read(whole.iter()).concat();
    assert_eq!(whole.len(), 12 * 4 * CONTEXT);
    let parts = random(999, batches(2, 2, 1), plan(12, 5));
    let epochs = [(); 3].map(|()| read(parts.iter()));
    assert_eq!(epochs.each_ref().map(Vec::len), [10, 10, 4]);
    assert_eq!(epochs.concat().concat(), whole);
    let third = EpochOfRank {
        epoch: 3,
        rank: 0,
        ranks: 1,
    };
    let resumed = parts.of_rank(third);
    assert_eq!(read(resumed.iter()), epochs[2], "from the third epoch on");
}

#[test]
fn sequences_reach_both_ends() {
    let _turn = turn();
    let all = random(10, batches(100, 1, 1), plan(1, 1));
    let batches = read(all.iter());
    let mut starts: Vec<_> = batches[0].chunks(CONTEXT).map(|row| row[0]).collect();
    starts.sort_unstable();
    starts.dedup();
    assert_eq!(starts, [0, 1, 2, 3, 4]);
}

#[test]
fn ranks_read_the_parts_of_one_large_batch() {
    let _turn = turn();
    let whole = random(999, batches(6, 2, 1), plan(5, 3));
    let parts = random(999, batches(2, 2, 3), plan(5, 3));
    assert_eq!(parts.num_items(), whole.num_items());
    let part = parts.num_items() / 3;
    let ranks = [0, 1, 2].map(|rank| parts.slice(rank * part, (rank + 1) * part));
    // The first epoch has three updates, the second two.
    for (epoch, updates) in [(1, 3), (2, 2)] {
        let of_ranks = ranks.each_ref().map(|rank| read(rank.iter()));
        for (rank, slice) in of_ranks.iter().enumerate() {
            let first = EpochOfRank {
                epoch,
                rank,
                ranks: 3,
            };
            assert_eq!(&read(parts.of_rank(first).iter()), slice, "rank {rank}");
        }
        for (batch, expected) in read(whole.iter()).into_iter().enumerate() {
            let found = of_ranks.iter().flat_map(|rank| rank[batch].clone());
            assert_eq!(found.collect::<Vec<_>>(), expected);
        }
        assert!(of_ranks.iter().all(|rank| rank.len() == updates * 2));
    }
}

#[test]
fn slices_and_devices_keep_order_and_epoch() {
    let _turn = turn();
    let loader = || random(5000, batches(3, 1, 1), plan(7, 7));
    let whole = read(loader().iter()).concat();
    let slice = loader().slice(4, 9).slice(1, 5);
    assert_eq!(slice.num_items(), 4);
    let batches = read(slice.to_device(&Default::default()).iter());
    assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [15, 5]);
    assert_eq!(batches.concat(), whole[5 * CONTEXT..9 * CONTEXT]);
    assert_eq!(loader().slice(0, 99).num_items(), 21);
}

#[test]
fn progress_counts_sequences() {
    let _turn = turn();
    let loader = random(5000, batches(3, 1, 1), plan(20, 6));
    let mut epoch = loader.iter();
    for done in 1..=6 {
        epoch.next().unwrap();
        let progress = epoch.progress();
        let counted = (progress.items_processed, progress.items_total);
        assert_eq!(counted, (3 * done, 18));
    }
    assert!(epoch.next().is_none());
}

#[test]
fn a_validation_covers_the_text_once() {
    let text: Vec<u8> = (0..101).collect();
    let cut = Cut::new(&text, 10);
    for (parts, most, expected) in [
        (batches(5, 1, 1), 100, 10),
        (batches(5, 1, 1), 8, 5),
        (batches(2, 3, 1), 8, 6),
        (batches(4, 5, 1), 8, 8),
        (batches(50, 1, 1), 8, 10),
    ] {
        assert_eq!(cut.spread(&parts, most).len(), expected, "{parts:?}");
    }
    let starts = cut.spread(&batches(5, 1, 1), 100);
    assert_eq!(starts, [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]);
    let batch: TokenBatch<Flex> = cut.batch(starts, &Default::default());
    let [first, last] = [0, 99].map(|at| batch.inputs.to_data().iter::<i32>().nth(at));
    assert_eq!((first, last), (Some(0), Some(99)));
}

#[test]
fn hash_is_splitmix64() {
    // The reference implementation's first outputs for seed 1234567.
    assert_eq!(hash(1_234_567, 0), 6_457_827_717_110_365_317);
    assert_eq!(hash(1_234_567, 1), 3_203_168_211_198_807_973);
}

#[test]
fn a_tenth_is_held_out_and_nothing_is_lost() {
    let bytes: Vec<u8> = (0..10_000).map(|i| (i % 251) as u8).collect();
    let text = Text::split(&bytes);
    assert_eq!((text.valid.len(), text.train.len()), (1_000, 9_000));
    assert_eq!(&text.train[..450], &bytes[..450]);
    assert_eq!(&text.valid[..50], &bytes[450..500]);
    assert_eq!(&text.train[450..900], &bytes[500..950]);
}

#[test]
fn the_default_text_is_inside_the_program() {
    let text = Text::load(&[], 64).unwrap();
    assert!(text.bytes() > 1_000_000, "{}", text.bytes());
    let sources = [text.train, text.valid].concat();
    let own = "fn the_default_text_is_inside_the_program";
    let has = |part: &str| {
        let mut parts = sources.windows(part.len());
        parts.any(|window| window == part.as_bytes())
    };
    assert!(has("pub struct RankReduction {"));
    assert!(!has(own), "tests are not in it");
}

#[test]
fn missing_empty_and_short_texts_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("text.txt");
    let error = |context| {
        let loaded = Text::load(std::slice::from_ref(&file), context);
        loaded.unwrap_err().to_string()
    };
    let missing = error(1);
    assert!(missing.contains(file.to_str().unwrap()), "{missing}");
    for (bytes, context, expected) in [
        (
            0,
            1,
            "the text is too short: 0 bytes leave 0 for validation, and --context 1 needs 2",
        ),
        (
            600,
            60,
            "the text is too short: 600 bytes leave 60 for validation, and --context 60 needs 61",
        ),
    ] {
        fs::write(&file, vec![b'x'; bytes]).unwrap();
        let found = error(context);
        assert!(found.starts_with(expected), "{found}");
    }
    assert!(Text::load(&[file], 59).is_ok());
}
