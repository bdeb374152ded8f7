//! Laws of records: what is loaded is what was saved, at any number of ranks, whatever happens in between.

mod faults;
mod foreign;
mod power;
mod round_trip;
mod slow;

use std::collections::BTreeMap;
use std::path::Path;

use super::*;
use crate::{GroupOptions, ProcessGroup, ThreadGroup};

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
        let bytes = (0..Piece::whole(spec.clone()).bytes()).map(|_| next());
        (spec.name.clone(), (spec, bytes.collect()))
    });
    tensors.collect()
}

/// The pieces of one rank, if all elements in a row are shared out evenly, in order.
fn even_pieces(whole: &Whole, rank: usize, world_size: usize) -> Vec<Piece> {
    let elements = |spec: &TensorSpec| spec.elements().unwrap();
    let total: usize = whole.values().map(|(spec, _)| elements(spec)).sum();
    let share = total.div_ceil(world_size);
    let mine = (rank * share).min(total)..((rank + 1) * share).min(total);
    let mut offset = 0;
    let pieces = whole.values().map(|(spec, _)| {
        let end = offset + elements(spec);
        let start = mine.start.clamp(offset, end);
        let range = start - offset..mine.end.clamp(start, end) - offset;
        offset = end;
        Piece::new(spec.clone(), range)
    });
    pieces.collect()
}

fn bytes_of<'a>(whole: &'a Whole, piece: &Piece) -> &'a [u8] {
    let (spec, bytes) = &whole[&piece.tensor.name];
    let width = spec.element_bytes();
    &bytes[piece.range.start * width..piece.range.end * width]
}

fn entries<'a>(whole: &'a Whole, rank: usize, world_size: usize) -> Vec<Entry<'a>> {
    let pieces = even_pieces(whole, rank, world_size).into_iter();
    pieces
        .map(|piece| {
            let bytes = bytes_of(whole, &piece);
            // Both ways of giving bytes.
            match piece.range.start % 2 {
                0 => Entry::new(piece, bytes),
                _ => Entry::lazy(piece, || Ok(bytes.into())),
            }
        })
        .collect()
}

fn save(dir: &Path, whole: &Whole, world_size: usize, state: &TrainingState, keep: Keep) {
    for saved in on_ranks(world_size, |group| {
        let entries = entries(whole, group.rank(), world_size);
        let mut state = state.clone();
        state.generator = format!("generator {}", group.rank()).into();
        save_sharded(dir, group, entries, state, keep)
    }) {
        saved.unwrap();
    }
}

/// That the last record of `dir` is `whole`, read by `world_size` ranks.
fn assert_holds(dir: &Path, whole: &Whole, world_size: usize) -> TrainingState {
    let states = on_ranks(world_size, |group| {
        let wanted = even_pieces(whole, group.rank(), world_size);
        let state = load_sharded(dir, group, None, &wanted, |index, bytes| {
            let piece = &wanted[index];
            assert!(bytes == bytes_of(whole, piece), "{piece:?} differs");
            Ok(())
        });
        state.unwrap()
    });
    states.into_iter().next().unwrap()
}

/// A few tensors, one of them larger than a chunk.
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
