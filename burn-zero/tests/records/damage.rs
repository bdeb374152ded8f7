//! A torn, foreign or older file is named, whichever byte of it is wrong; none is read wrong.

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// A record of two ranks, and its directory.
fn saved(dir: &Path, seed: u64) -> (Whole, PathBuf) {
    let whole = few(seed);
    save(dir, &whole, 2, &TrainingState::at_step(seed), Keep::All);
    let record = ShardedRecord::open(dir, None).unwrap();
    (whole, record.path().to_owned())
}

/// That the error of reading all of a record with a damaged file names the file.
fn assert_named(record: &Path, path: &Path, damage: impl std::fmt::Display) {
    let error = read_all(record)
        .expect_err("the file was damaged")
        .to_string();
    let named = error.contains(&path.display().to_string());
    assert!(named, "{damage} of {}: {error}", path.display());
}

/// Each byte of each file flipped alone, and each file cut before each of its bytes.
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
            assert_named(&record, &path, format_args!("byte {index}"));
            fs::write(&path, &bytes[..index]).unwrap();
            assert_named(&record, &path, format_args!("cut to {index}"));
        }
        fs::write(&path, &bytes).unwrap();
        read_all(&record).unwrap();
        files += 1;
    }
    assert_eq!(files, 3);
}

/// One change of a file: where, in millionths of its length, how many bytes there are taken out,
/// and what is put in.
#[derive(Clone, Debug)]
struct Damage {
    file: usize,
    at: usize,
    removed: usize,
    added: Vec<u8>,
}

fn damage() -> impl Strategy<Value = Damage> {
    let added = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..20),
        // What changes numbers and structure of JSON rather than breaking it.
        "[0-9]{1,20}|,|\"|\\{\\}|null|-1|1e9".prop_map(String::into_bytes),
    ];
    let parts = (0_usize..3, 0_usize..1_000_000, 0_usize..20, added);
    parts.prop_map(|(file, at, removed, added)| Damage {
        file,
        at,
        removed,
        added,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    /// Bytes flipped, removed, added and replaced, in several places.
    #[test]
    fn no_damage_is_read_wrong(damages in proptest::collection::vec(damage(), 1..4)) {
        thread_local! {
            static SAVED: (tempfile::TempDir, PathBuf, Vec<(PathBuf, Vec<u8>)>) = {
                let dir = tempfile::tempdir().unwrap();
                let (_, record) = saved(dir.path(), 1);
                let files = fs::read_dir(&record).unwrap().map(|file| {
                    let path = file.unwrap().path();
                    let bytes = fs::read(&path).unwrap();
                    (path, bytes)
                });
                let mut files: Vec<_> = files.collect();
                files.sort();
                (dir, record, files)
            };
        }
        SAVED.with(|(_, record, files)| {
            let mut damaged = files.clone();
            for Damage { file, at, removed, added } in damages {
                let bytes = &mut damaged[file].1;
                let at = at * bytes.len() / 1_000_000;
                let end = bytes.len().min(at + removed);
                bytes.splice(at..end, added);
            }
            for (path, bytes) in &damaged {
                fs::write(path, bytes).unwrap();
            }
            let found = read_all(record);
            for (path, bytes) in files {
                fs::write(path, bytes).unwrap();
            }
            let is_same = damaged == *files;
            prop_assert_eq!(found.is_ok(), is_same, "{:?}", found);
            Ok(())
        })?;
    }
}

#[test]
fn a_file_of_another_record_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let (_, first) = saved(dir.path(), 1);
    let (_, second) = saved(dir.path(), 2);
    let file = "rank-1-of-2.safetensors";
    fs::copy(first.join(file), second.join(file)).unwrap();
    let error = read_all(&second).unwrap_err();
    assert!(
        matches!(error, ZeroError::Record(RecordFault::Torn { .. })),
        "{error}"
    );
    let message = error.to_string();
    assert!(message.contains(file), "{message}");
    let spec = TensorSpec::new("model/layer.0", Dtype::F32, [4, 3]);
    // What is in the other file can still be read.
    let mut record = ShardedRecord::open(dir.path(), Some(2)).unwrap();
    record.read(&TensorSlice::new(spec, 0..1)).unwrap();

    let mut bytes = fs::read(first.join(file)).unwrap();
    bytes[7] = 1; // of the header's length
    fs::write(first.join(file), &bytes).unwrap();
    let error = read_all(&first).unwrap_err();
    assert!(
        matches!(error, ZeroError::Record(RecordFault::Torn { .. })),
        "{error}"
    );
    bytes[7] = 0;
    fs::write(first.join(file), &bytes).unwrap();
    read_all(&first).unwrap();

    fs::remove_file(second.join(file)).unwrap();
    let error = read_all(&second).unwrap_err().to_string();
    assert!(
        error.contains("is missing") && error.contains(file),
        "{error}"
    );
}

/// Only what a save has named is a record, and one of another version of the format is refused.
#[test]
fn other_names_are_no_records() {
    let dir = tempfile::tempdir().unwrap();
    let (_, record) = saved(dir.path(), 1);
    fs::create_dir(dir.path().join(".000004-step-9.partial")).unwrap();
    for other in [
        "plots",
        "7-step-1",
        "000007-step-01",
        "000007-step-+1",
        "latest",
        "000007-step-",
    ] {
        fs::create_dir(dir.path().join(other)).unwrap();
    }
    let found = ShardedRecord::open(dir.path(), None).unwrap();
    assert_eq!(found.path(), record);

    let manifest = record.join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text.replace("\"version\":5", "\"version\":2")).unwrap();
    let error = read_all(&record).unwrap_err().to_string();
    assert!(error.contains("version 2 of the format"), "{error}");
}

#[test]
fn an_older_record_is_opened_if_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let (old, _) = saved(dir.path(), 1);
    let (_, newest) = saved(dir.path(), 2);
    fs::write(newest.join("manifest.json"), "{").unwrap();
    let error = ShardedRecord::open(dir.path(), None).unwrap_err();
    assert!(
        matches!(error, ZeroError::Record(RecordFault::Torn { .. })),
        "{error}"
    );
    let mut record = ShardedRecord::open(dir.path(), Some(1)).unwrap();
    let (spec, bytes) = old.values().next().unwrap();
    let slice = TensorSlice::whole(spec.clone());
    assert_eq!(record.read(&slice).unwrap(), *bytes);
}

/// Manifests that are wrong although their checksum is right: another program wrote them.
#[test]
fn a_manifest_that_leads_outside_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (_, record) = saved(dir.path(), 1);
    let path = record.join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    let whole: Value = serde_json::from_str(&text).unwrap();
    let second = "/tensors/model~1layer.0/slices/1";
    let changes = [
        ("/files".to_owned(), json!([]), "in no file"),
        (
            "/files/1/bytes".to_owned(),
            json!(u64::MAX),
            "bytes, but 18446744073709551615 were written",
        ),
        (
            "/files/1/header/bytes".to_owned(),
            json!(u64::MAX),
            "is shorter than its header",
        ),
        (
            format!("{second}/crc32"),
            json!([]),
            "has elements 9..12 without all of their checksums",
        ),
        (
            format!("{second}/rank"),
            json!(2),
            "has elements 9..12 in no file",
        ),
        (
            format!("{second}/at"),
            json!(u64::MAX),
            "has elements 9..12 in no file",
        ),
        (
            format!("{second}/offset"),
            json!(8),
            "has elements 8..9 on rank 0 and again on rank 1",
        ),
        (
            format!("{second}/offset"),
            json!(10),
            "elements, of which 10..13 are no range",
        ),
        (
            format!("{second}/offset"),
            json!(u64::MAX),
            "has 12 elements, of which",
        ),
        (
            format!("{second}/len"),
            json!(2),
            "has elements 11..12 on no rank",
        ),
        (
            "/tensors/model~1layer.0/shape".to_owned(),
            json!([13]),
            "has elements 12..13 on no rank",
        ),
        (
            "/tensors/model~1layer.0/shape".to_owned(),
            json!([u64::MAX, 4]),
            "elements, of which",
        ),
        ("/step".to_owned(), json!(1), "unknown field"),
    ];
    for (pointer, value, expected) in changes {
        let mut manifest = whole["manifest"].clone();
        match manifest.pointer_mut(&pointer) {
            Some(field) => *field = value,
            None => manifest[pointer.trim_start_matches('/')] = value,
        }
        let text = manifest.to_string();
        let crc32 = crc32fast::hash(text.as_bytes());
        let head = r#"{"format":"burn-zero sharded record","version":5"#;
        fs::write(
            &path,
            format!(r#"{head},"crc32":{crc32},"manifest":{text}}}"#),
        )
        .unwrap();
        let error = read_all(&record).expect_err(&pointer).to_string();
        assert!(error.contains(expected), "{pointer}: {error}");
    }
}
