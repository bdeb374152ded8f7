//! Laws of records: what is loaded is what was saved, at any number of ranks, whatever happens in
//! between.

mod burn;
mod crash;
mod damage;
mod disk;
mod faults;
mod round_trip;

use std::collections::BTreeMap;
use std::path::Path;

use burn_zero::record::{
    Dtype, Entry, Keep, RecordFault, Saved, ShardedRecord, TensorSlice, TensorSpec, TrainingState,
};
use burn_zero::{GroupOptions, ProcessGroup, ThreadGroup, ZeroError, load_sharded, save_sharded};

/// What each of `world_size` ranks returns.
fn on_ranks<T: Send>(world_size: usize, rank: impl Fn(&dyn ProcessGroup) -> T + Sync) -> Vec<T> {
    ThreadGroup::spawn(world_size, GroupOptions::default(), |group| rank(&group)).unwrap()
}

/// Whole tensors by name.
type Whole = BTreeMap<String, (TensorSpec, Vec<u8>)>;

/// Tensors of these shapes with bytes that depend on everything, `seed` too.
fn whole(shapes: &[(Dtype, Vec<usize>)], seed: u64) -> Whole {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        // Xorshift.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    let tensors = shapes.iter().enumerate().map(|(index, (dtype, shape))| {
        let section = ["model", "optimizer/moment_1"][index % 2];
        let spec = TensorSpec::new(format!("{section}/layer.{index}"), *dtype, shape.clone());
        let bytes = (0..TensorSlice::whole(spec.clone()).bytes()).map(|_| next());
        (spec.name.clone(), (spec, bytes.collect()))
    });
    tensors.collect()
}

/// A few tensors, one of them larger than a mebibyte.
fn some(seed: u64) -> Whole {
    let shapes = [
        (Dtype::F32, vec![3, 5]),
        (Dtype::BF16, vec![700, 1000]),
        (Dtype::F32, vec![]),
        (Dtype::I64, vec![0, 4]),
        (Dtype::U8, vec![7]),
    ];
    whole(&shapes, seed)
}

/// Small ones.
fn few(seed: u64) -> Whole {
    whole(&[(Dtype::F32, vec![4, 3]), (Dtype::F16, vec![5])], seed)
}

/// The slices of one rank, if all elements in a row are shared out evenly, in order.
fn even_slices(whole: &Whole, rank: usize, world_size: usize) -> Vec<TensorSlice> {
    let elements = |spec: &TensorSpec| spec.elements().unwrap();
    let total: usize = whole.values().map(|(spec, _)| elements(spec)).sum();
    let share = total.div_ceil(world_size);
    let mine = (rank * share).min(total)..((rank + 1) * share).min(total);
    let mut offset = 0;
    let slices = whole.values().map(|(spec, _)| {
        let end = offset + elements(spec);
        let start = mine.start.clamp(offset, end);
        let range = start - offset..mine.end.clamp(start, end) - offset;
        offset = end;
        TensorSlice::new(spec.clone(), range)
    });
    slices.collect()
}

fn bytes_of<'a>(whole: &'a Whole, slice: &TensorSlice) -> &'a [u8] {
    let (spec, bytes) = &whole[&slice.tensor.name];
    let width = spec.dtype.bitsize() / 8;
    &bytes[slice.range.start * width..slice.range.end * width]
}

fn entries<'a>(whole: &'a Whole, rank: usize, world_size: usize) -> Vec<Entry<'a>> {
    let slices = even_slices(whole, rank, world_size).into_iter();
    let entries = slices.map(|slice| {
        let bytes = bytes_of(whole, &slice);
        // Both ways of giving bytes.
        match slice.range.start % 2 {
            0 => Entry::new(slice, bytes),
            _ => Entry::lazy(slice, || Ok(bytes.into())),
        }
    });
    entries.collect()
}

/// What the ranks return that save a record of this step, of entries that `change` has changed.
fn try_save(
    dir: &Path,
    whole: &Whole,
    world_size: usize,
    step: u64,
    change: impl Fn(usize, &mut Vec<Entry>) + Sync,
) -> Vec<Result<Saved, ZeroError>> {
    on_ranks(world_size, |group| {
        let mut entries = entries(whole, group.rank(), world_size);
        change(group.rank(), &mut entries);
        let state = TrainingState::at_step(step);
        save_sharded(dir, group, entries, state, Keep::default())
    })
}

fn save(dir: &Path, whole: &Whole, world_size: usize, state: &TrainingState, keep: Keep) {
    let saved = on_ranks(world_size, |group| {
        let entries = entries(whole, group.rank(), world_size);
        save_sharded(dir, group, entries, state.clone(), keep)
    });
    saved.into_iter().for_each(|saved| drop(saved.unwrap()));
}

/// That the last record of `dir` is `whole`, read by `world_size` ranks.
fn assert_holds(dir: &Path, whole: &Whole, world_size: usize) -> TrainingState {
    let states = on_ranks(world_size, |group| {
        let wanted = even_slices(whole, group.rank(), world_size);
        let state = load_sharded(dir, group, None, &wanted, |index, bytes| {
            let slice = &wanted[index];
            assert!(bytes == bytes_of(whole, slice), "{slice:?} differs");
            Ok(())
        });
        state.unwrap()
    });
    states.into_iter().next().unwrap()
}

/// Names in a directory of records.
fn names(dir: &Path) -> Vec<String> {
    let files = std::fs::read_dir(dir).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// What is said if all tensors of the record with this directory are read.
fn read_all(record: &Path) -> Result<(), ZeroError> {
    let (_, step) = record.to_str().unwrap().rsplit_once('-').unwrap();
    let step = step.parse().unwrap();
    let mut record = ShardedRecord::open(record.parent().unwrap(), Some(step))?;
    let tensors: Vec<_> = record.tensors().collect();
    let mut tensors = tensors.into_iter().map(TensorSlice::whole);
    tensors.try_for_each(|slice| record.read(&slice).map(drop))
}
