//! Save at N ranks, load at M: bit for bit the same.

use std::fs;

use burn_ranks::BufferDtype;
use burn_zero::{consolidate, consolidate_as};
use half::{bf16, f16};
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::json;

use super::*;

#[test]
fn any_ranks_read_what_any_ranks_saved() {
    let dir = tempfile::tempdir().unwrap();
    let whole = some(1);
    for saving in [1, 2, 3, 4] {
        let step = saving as u64;
        save(
            dir.path(),
            &whole,
            saving,
            &TrainingState::at_step(step),
            Keep::default(),
        );
        for loading in [1, 2, 3, 4, 7] {
            let state = assert_holds(dir.path(), &whole, loading);
            assert_eq!(state.step, step);
        }
    }
}

#[test]
fn state_comes_back_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let mut state = TrainingState::at_step(u64::MAX);
    state.user.insert(
        "scaler".into(),
        json!({"scale": 65536.0, "tiny": f64::MIN_POSITIVE, "third": 1.0 / 3.0}),
    );
    state.scheduler = json!([
        0.1 + 0.2,
        f64::from_bits(0x0010_0000_0000_0001),
        -0.0,
        9_007_199_254_740_993_u64
    ]);
    state.user.insert("text".into(), "\u{0}\"\\ größe".into());
    save(dir.path(), &few(1), 2, &state, Keep::All);
    let found = assert_holds(dir.path(), &few(1), 2);
    assert_eq!(found, state);
    let zero = found.scheduler[2].as_f64().unwrap();
    assert!(zero.is_sign_negative());
}

#[test]
fn ranks_read_no_more_than_they_want() {
    let dir = tempfile::tempdir().unwrap();
    let whole = whole(&[(Dtype::F32, vec![4 << 20])], 3);
    save(dir.path(), &whole, 2, &TrainingState::at_step(1), Keep::All);
    let mut record = ShardedRecord::open(dir.path(), None).unwrap();
    let spec = record.tensors().next().unwrap();
    // What is read is verified. So all is damaged but the last chunk of the first rank and the
    // first one of the second.
    for (rank, kept) in [(0, 7 << 20..8 << 20), (1, 0..1 << 20)] {
        let file = record.path().join(format!("rank-{rank}-of-2.safetensors"));
        let mut bytes = fs::read(&file).unwrap();
        let header = bytes.len() - (8 << 20);
        bytes[header..][..kept.start].fill(0);
        bytes[header..][kept.end..].fill(0);
        fs::write(&file, bytes).unwrap();
    }
    let mut read = |range: std::ops::Range<usize>| {
        let slice = TensorSlice::new(spec.clone(), range);
        let read = record.read(&slice)?;
        assert!(read == bytes_of(&whole, &slice));
        Ok::<_, ZeroError>(())
    };
    let (middle, chunk) = (2 << 20, 1 << 18);
    read(middle - 1..middle + 1).unwrap();
    read(middle - chunk..middle + chunk).unwrap();
    read(7..7).unwrap();
    read(middle - chunk - 1..middle).unwrap_err();
    read(middle..middle + chunk + 1).unwrap_err();
}

#[test]
fn the_files_are_safetensors() {
    let dir = tempfile::tempdir().unwrap();
    let whole = some(9);
    save(dir.path(), &whole, 3, &TrainingState::at_step(1), Keep::All);
    let record = ShardedRecord::open(dir.path(), None).unwrap();
    let mut tensors = 0;
    for rank in 0..3 {
        let file = record.path().join(format!("rank-{rank}-of-3.safetensors"));
        let bytes = std::fs::read(file).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (key, view) in file.iter() {
            let width = view.dtype().bitsize() / 8;
            let address = view.data().as_ptr().addr() - bytes.as_ptr().addr();
            assert!(address.is_multiple_of(width), "{key} is not aligned");
            let (name, range) = key.trim_end_matches(']').split_once('[').unwrap();
            let (start, end) = range.split_once("..").unwrap();
            let range = start.parse().unwrap()..end.parse().unwrap();
            let slice = TensorSlice::new(whole[name].0.clone(), range);
            assert!(view.data() == bytes_of(&whole, &slice), "{key}");
            tensors += 1;
        }
    }
    assert!(tensors >= 4, "{tensors}");
}

#[test]
fn consolidated_it_is_one_whole_file() {
    let dir = tempfile::tempdir().unwrap();
    let whole = some(4);
    save(dir.path(), &whole, 3, &TrainingState::at_step(8), Keep::All);
    let out = dir.path().join("model.safetensors");
    std::fs::write(&out, "older").unwrap();
    consolidate(dir.path(), &out).unwrap();
    let bytes = std::fs::read(&out).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.len(), 3);
    for index in [0, 2, 4] {
        let (spec, bytes) = &whole[&format!("model/layer.{index}")];
        let found = file.tensor(&format!("layer.{index}")).unwrap();
        assert_eq!(
            (found.dtype(), found.shape()),
            (spec.dtype, spec.shape.as_slice())
        );
        assert!(found.data() == bytes);
    }

    let mut other = whole;
    other.retain(|name, _| !name.starts_with("model/"));
    save(dir.path(), &other, 1, &TrainingState::at_step(9), Keep::All);
    let error = consolidate(dir.path(), &out).unwrap_err().to_string();
    assert!(error.ends_with("has no model"), "{error}");
    assert_eq!(std::fs::read(&out).unwrap(), bytes, "a file was lost");
}

#[test]
fn consolidated_its_floats_are_of_the_type_that_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    // More than a mebibyte.
    let floats: Vec<f32> = [1.0, -0.3, 65_504.0, 1e-7].repeat(100_000);
    let spec = |name: &str, dtype| {
        let elements = if dtype == Dtype::U8 { 4 } else { floats.len() };
        TensorSpec::new(format!("model/{name}"), dtype, [elements])
    };
    let of_f32 =
        |value: fn(f32) -> Vec<u8>| floats.iter().copied().flat_map(value).collect::<Vec<_>>();
    let whole: Whole = [
        (
            spec("double", Dtype::F64),
            of_f32(|x| f64::from(x).to_le_bytes().into()),
        ),
        (
            spec("single", Dtype::F32),
            of_f32(|x| x.to_le_bytes().into()),
        ),
        (
            spec("brain", Dtype::BF16),
            of_f32(|x| bf16::from_f32(x).to_le_bytes().into()),
        ),
        (spec("integers", Dtype::U8), vec![1, 2, 3, 4]),
    ]
    .map(|(spec, bytes)| (spec.name.clone(), (spec, bytes)))
    .into();
    save(dir.path(), &whole, 3, &TrainingState::at_step(1), Keep::All);
    let out = dir.path().join("model.safetensors");
    for (dtype, in_file, rounded) in [
        (
            BufferDtype::F32,
            Dtype::F32,
            (|x| x.to_le_bytes().into()) as fn(f32) -> Vec<u8>,
        ),
        (BufferDtype::F16, Dtype::F16, |x| {
            f16::from_f32(x).to_le_bytes().into()
        }),
        (BufferDtype::Bf16, Dtype::BF16, |x| {
            bf16::from_f32(x).to_le_bytes().into()
        }),
    ] {
        consolidate_as(dir.path(), &out, dtype).unwrap();
        let bytes = std::fs::read(&out).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for name in ["double", "single"] {
            let found = file.tensor(name).unwrap();
            assert_eq!(found.dtype(), in_file);
            assert!(found.data() == of_f32(rounded), "{name}");
        }
        let brain = floats.iter().map(|x| bf16::from_f32(*x).to_f32());
        let brain: Vec<u8> = brain.flat_map(rounded).collect();
        assert!(file.tensor("brain").unwrap().data() == brain);
        let integers = file.tensor("integers").unwrap();
        assert_eq!(
            (integers.dtype(), integers.data()),
            (Dtype::U8, &[1, 2, 3, 4][..])
        );
    }
}

/// A rank may hold several slices of a tensor, in any order, and ranks need not share evenly.
#[derive(Clone, Debug)]
struct Sharing {
    shapes: Vec<(Dtype, Vec<usize>)>,
    /// For each tensor, where it is cut, as thousandths of it.
    cuts: Vec<Vec<usize>>,
    /// For each tensor, the owner of each slice.
    owners: Vec<Vec<usize>>,
    saving: usize,
    loading: usize,
    seed: u64,
}

fn sharing() -> impl Strategy<Value = Sharing> {
    let dtype = prop_oneof![
        Just(Dtype::F32),
        Just(Dtype::BF16),
        Just(Dtype::F64),
        Just(Dtype::U8),
        Just(Dtype::BOOL),
    ];
    let shape = vec(0_usize..9, 0..4);
    let tensors = vec(
        ((dtype, shape), vec(0_usize..1001, 0..6), vec(0_usize..5, 6)),
        1..6,
    );
    (tensors, 1_usize..6, 1_usize..6, any::<u64>()).prop_map(|(tensors, saving, loading, seed)| {
        let mut sharing = Sharing {
            shapes: vec![],
            cuts: vec![],
            owners: vec![],
            saving,
            loading,
            seed,
        };
        for (shape, mut cuts, owners) in tensors {
            cuts.sort_unstable();
            sharing.shapes.push(shape);
            sharing.cuts.push(cuts);
            sharing.owners.push(owners);
        }
        sharing
    })
}

impl Sharing {
    /// The slices that `rank` owns. Rank 0 also declares what no one has an element of.
    fn slices(&self, whole: &Whole, rank: usize) -> Vec<TensorSlice> {
        let mut slices = Vec::new();
        for ((spec, _), (cuts, owners)) in whole.values().zip(self.cuts.iter().zip(&self.owners)) {
            let elements = spec.elements().unwrap();
            let mut start = 0;
            let ends = cuts.iter().map(|cut| cut * elements / 1000);
            for (end, owner) in ends.chain([elements]).zip(owners) {
                if owner % self.saving == rank && start < end {
                    slices.push(TensorSlice::new(spec.clone(), start..end));
                }
                start = end;
            }
            if rank == 0 {
                slices.push(TensorSlice::new(spec.clone(), 0..0));
            }
        }
        slices.reverse();
        slices
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_sharing_comes_back(sharing in sharing()) {
        let dir = tempfile::tempdir().unwrap();
        let whole = whole(&sharing.shapes, sharing.seed);
        for saved in on_ranks(sharing.saving, |group| {
            let slices = sharing.slices(&whole, group.rank()).into_iter();
            let entries = slices.map(|slice| {
                let bytes = bytes_of(&whole, &slice);
                Entry::new(slice, bytes)
            });
            let state = TrainingState::at_step(1);
            save_sharded(dir.path(), group, entries.collect(), state, Keep::All)
        }) {
            saved.unwrap();
        }
        assert_holds(dir.path(), &whole, sharing.loading);
        let record = ShardedRecord::open(dir.path(), None).unwrap();
        let tensors: Vec<_> = record.tensors().collect();
        prop_assert!(tensors.iter().eq(whole.values().map(|(spec, _)| spec)));
    }
}
