//! A torn, foreign or older file is named, whichever byte of it is wrong.

use std::fs;
use std::path::PathBuf;

use super::*;

/// A record of two ranks, and its directory.
fn saved(dir: &Path, seed: u64) -> (Whole, PathBuf) {
    let whole = few(seed);
    save(dir, &whole, 2, &TrainingState::at_step(seed), Keep::All);
    let record = ShardedRecord::open(dir).unwrap();
    (whole, record.path().to_owned())
}

/// What is said if all of the record is read.
fn read_all(path: &Path) -> Result<(), RecordError> {
    ShardedRecord::open_record(path)?.verify()
}

#[test]
fn every_byte_is_verified() {
    let dir = tempfile::tempdir().unwrap();
    let (_, record) = saved(dir.path(), 1);
    let mut files = 0;
    for file in fs::read_dir(&record).unwrap() {
        let path = file.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        for index in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[index] ^= 1;
            fs::write(&path, &changed).unwrap();
            let error = read_all(&record).expect_err("a byte was changed");
            let named = error.to_string().contains(&path.display().to_string());
            assert!(named, "byte {index} of {}: {error}", path.display());
        }
        for length in 0..bytes.len() {
            fs::write(&path, &bytes[..length]).unwrap();
            let error = read_all(&record).expect_err("the file was cut");
            let named = error.to_string().contains(&path.display().to_string());
            assert!(named, "cut to {length}: {error}");
        }
        fs::write(&path, &bytes).unwrap();
        read_all(&record).unwrap();
        files += 1;
    }
    assert_eq!(files, 3);
}

#[test]
fn a_file_of_another_record_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let (_, first) = saved(dir.path(), 1);
    let (_, second) = saved(dir.path(), 2);
    let part = "rank-1-of-2.safetensors";
    fs::copy(first.join(part), second.join(part)).unwrap();
    let error = read_all(&second).unwrap_err();
    assert!(matches!(error, RecordError::ForeignFile { .. }), "{error}");
    let message = error.to_string();
    assert!(
        message
            .ends_with("it is of step 1, rank 1 of 2, but the manifest is of step 2, rank 1 of 2"),
        "{message}"
    );
    let spec = TensorSpec::new("model/layer.0", Dtype::F32, [4, 3]);
    // What is in the other file can still be read.
    let mut record = ShardedRecord::open_record(&second).unwrap();
    record.read(&Piece::new(spec, 0..1)).unwrap();

    let mut bytes = fs::read(first.join(part)).unwrap();
    bytes[7] = 1; // of the header's length
    fs::write(first.join(part), &bytes).unwrap();
    let error = read_all(&first).unwrap_err();
    assert!(matches!(error, RecordError::BadPart { .. }), "{error}");
    bytes[7] = 0;
    fs::write(first.join(part), &bytes).unwrap();

    fs::remove_file(second.join(part)).unwrap();
    let error = read_all(&second).unwrap_err().to_string();
    assert!(
        error.contains("is missing") && error.contains(part),
        "{error}"
    );
    read_all(&first).unwrap();
}

/// What can be listed says what cannot be loaded.
#[test]
fn inspect_tells_each_record_apart() {
    let dir = tempfile::tempdir().unwrap();
    for seed in 1..=3 {
        saved(dir.path(), seed);
    }
    let names = ["000001-step-1", "000002-step-2", "000003-step-3"];
    let manifest = dir.path().join(names[0]).join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text.replace("\"version\":1", "\"version\":0")).unwrap();
    let part = dir.path().join(names[1]).join("rank-0-of-2.safetensors");
    let bytes = fs::read(&part).unwrap();
    fs::write(&part, &bytes[1..]).unwrap();
    fs::create_dir(dir.path().join(".000004-step-9.partial")).unwrap();
    fs::create_dir(dir.path().join("plots")).unwrap();

    let text = inspect(dir.path()).unwrap().to_string();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 5, "{text}");
    assert!(
        lines[1].contains("000001-step-1: step 1") && lines[1].contains("version 0 of the format")
    );
    assert!(
        lines[2].contains("broken") && lines[2].contains("rank-0-of-2.safetensors holds"),
        "{text}"
    );
    assert!(lines[3].ends_with("complete, saved by 2 ranks"), "{text}");
    assert!(lines[4].ends_with("step 9, 0.0 MB, not finished"), "{text}");

    let nothing = tempfile::tempdir().unwrap();
    let text = inspect(nothing.path()).unwrap().to_string();
    assert!(text.starts_with("no records in "));
}

#[test]
fn an_older_record_is_opened_if_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let (old, _) = saved(dir.path(), 1);
    let (_, newest) = saved(dir.path(), 2);
    fs::write(newest.join("manifest.json"), "{").unwrap();
    let error = ShardedRecord::open(dir.path()).unwrap_err();
    assert!(matches!(error, RecordError::NotAManifest { .. }), "{error}");
    let mut record = ShardedRecord::open_step(dir.path(), 1).unwrap();
    let (spec, bytes) = old.values().next().unwrap();
    assert_eq!(record.read(&Piece::whole(spec.clone())).unwrap(), *bytes);
}

#[test]
fn consolidated_it_is_one_whole_file() {
    let dir = tempfile::tempdir().unwrap();
    let whole = some(4);
    save(dir.path(), &whole, 3, &TrainingState::at_step(8), Keep::All);
    let out = dir.path().join("model.safetensors");
    fs::write(&out, "older").unwrap();
    consolidate(dir.path(), &out).unwrap();
    let bytes = fs::read(&out).unwrap();
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
    let mut record = ShardedRecord::open(dir.path()).unwrap();
    let error = record
        .consolidate("optimiser", &out)
        .unwrap_err()
        .to_string();
    assert!(
        error.ends_with("its sections are model, optimizer"),
        "{error}"
    );
    assert_eq!(fs::read(&out).unwrap(), bytes, "a file was lost");
    record.consolidate("optimizer/moment_1", &out).unwrap();
    let bytes = fs::read(&out).unwrap();
    assert_eq!(
        safetensors::SafeTensors::deserialize(&bytes).unwrap().len(),
        2
    );
}
