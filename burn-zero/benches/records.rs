//! Saving and loading a record against writing and reading the same bytes as one plain file.
#![allow(missing_docs)] // criterion_group

use std::fs::{self, File};
use std::hint::black_box;
use std::io::Write;
use std::path::Path;

use burn_zero::record::{Dtype, Entry, Keep, TensorSlice, TensorSpec, TrainingState};
use burn_zero::{GroupOptions, ProcessGroup, ThreadGroup, load_sharded, save_sharded};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const TENSORS: usize = 16;
const TENSOR_ELEMENTS: usize = 1 << 20;

/// This rank's share of every tensor.
fn pieces(group: &dyn ProcessGroup) -> Vec<TensorSlice> {
    let share = TENSOR_ELEMENTS / group.world_size();
    let first = group.rank() * share;
    let names = (0..TENSORS).map(|i| format!("optimizer/moment_1/{i}"));
    names
        .map(|name| TensorSpec::new(name, Dtype::F32, [TENSOR_ELEMENTS]))
        .map(|tensor| TensorSlice::new(tensor, first..first + share))
        .collect()
}

fn save(dir: &Path, ranks: usize, bytes: &[u8]) {
    ThreadGroup::spawn(ranks, GroupOptions::default(), |group| {
        let entries = pieces(&group).into_iter().map(|piece| {
            let length = piece.bytes();
            Entry::new(piece, &bytes[..length])
        });
        let state = TrainingState::at_step(1);
        let saved = save_sharded(dir, &group, entries.collect(), state, Keep::default());
        saved.expect("the disk has space");
    })
    .expect("no rank panics");
}

fn load(dir: &Path, ranks: usize) {
    ThreadGroup::spawn(ranks, GroupOptions::default(), |group| {
        let wanted = pieces(&group);
        let loaded = load_sharded(dir, &group, None, &wanted, |_, bytes| {
            black_box(bytes);
            Ok(())
        });
        loaded.expect("it was just saved");
    })
    .expect("no rank panics");
}

fn records(c: &mut Criterion) {
    let bytes = vec![7; TENSOR_ELEMENTS * size_of::<f32>()];
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut group = c.benchmark_group("record of 64 MiB");
    group.throughput(Throughput::Bytes((TENSORS * bytes.len()) as u64));
    group.sample_size(10);

    let plain = dir.path().join("plain");
    group.bench_function("plain file, written and synced", |b| {
        b.iter(|| {
            let mut file = File::create(&plain).expect("a new file");
            for _ in 0..TENSORS {
                file.write_all(&bytes).expect("the disk has space");
            }
            file.sync_all().expect("the disk works");
        });
    });
    for ranks in [1, 4] {
        group.bench_function(format!("saved by {ranks}"), |b| {
            b.iter(|| save(dir.path(), ranks, &bytes));
        });
    }
    group.bench_function("plain file, read", |b| {
        b.iter(|| black_box(fs::read(&plain).expect("it was just written")));
    });
    for ranks in [1, 4] {
        group.bench_function(format!("saved by 4, loaded by {ranks}"), |b| {
            b.iter(|| load(dir.path(), ranks));
        });
    }
}

criterion_group!(benches, records);
criterion_main!(benches);
