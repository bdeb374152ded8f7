//! What the Learner logs is in the files: names, steps and values.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use burn::train::logger::{InMemoryMetricLogger, MetricLogger};
use burn::train::metric::store::{EpochSummary, MetricsUpdate, NumericMetricUpdate, Split};
use burn::train::metric::{
    MetricAttributes, MetricDefinition, MetricEntry, MetricId, NumericEntry, SerializedEntry,
};
use burn_tensorboard::TensorBoard;

fn id(name: &str) -> MetricId {
    MetricId::new(Arc::new(format!("id of {name}")))
}

/// A batch's values, and the means so far.
fn update(metrics: &[(&str, f64, f64)]) -> MetricsUpdate {
    let numeric = metrics.iter().map(|(name, value, mean)| {
        let serialized = SerializedEntry::new(value.to_string(), value.to_string());
        NumericMetricUpdate::new(
            MetricEntry::new(id(name), serialized),
            NumericEntry::Value(*value),
            NumericEntry::Value(*mean),
        )
    });
    MetricsUpdate::new(Vec::new(), numeric.collect())
}

/// Points by the name of their curve.
type Curves = BTreeMap<String, Vec<(u64, f32)>>;

/// The curves in all files of a directory.
fn curves(directory: &Path) -> Curves {
    let mut curves = Curves::new();
    let entries = fs::read_dir(directory).expect("a directory");
    let mut files: Vec<_> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.sort();
    for file in files {
        let bytes = fs::read(file).expect("an event file");
        let mut rest = &bytes[..];
        while let Some((length, after)) = rest.split_first_chunk() {
            let length = u64::from_le_bytes(*length) as usize;
            let (event, after) = after[4..].split_at(length);
            rest = &after[4..];
            let mut step = 0;
            for (field, value) in fields(event) {
                match (field, value) {
                    (2, Field::Number(number)) => step = number,
                    (5, Field::Bytes(summary)) => {
                        for (_, value) in fields(summary) {
                            let (name, value) = point(value);
                            curves.entry(name).or_default().push((step, value));
                        }
                    }
                    _ => {}
                }
            }
        }
    }
    curves
}

fn point(value: Field<'_>) -> (String, f32) {
    let Field::Bytes(value) = value else {
        panic!("a value is a message");
    };
    match fields(value)[..] {
        [(1, Field::Bytes(name)), (2, Field::Float(value))] => {
            let name = String::from_utf8(name.to_vec());
            (name.expect("a name"), value)
        }
        _ => panic!("a tag and a simple value"),
    }
}

enum Field<'a> {
    Number(u64),
    Float(f32),
    Bytes(&'a [u8]),
}

/// The fields of a message in protobuf's wire format, but for doubles.
fn fields(mut message: &[u8]) -> Vec<(u8, Field<'_>)> {
    let mut found = Vec::new();
    let number = |message: &mut &[u8]| {
        let length = message.iter().position(|byte| byte & 0x80 == 0);
        let (number, rest) = message.split_at(length.expect("an end") + 1);
        *message = rest;
        let add = |sum: u64, byte: &u8| sum << 7 | u64::from(byte & 0x7f);
        number.iter().rev().fold(0, add)
    };
    while let Some((key, rest)) = message.split_first() {
        message = rest;
        let field = key >> 3;
        match key & 7 {
            0 => found.push((field, Field::Number(number(&mut message)))),
            1 => message = &message[8..],
            2 => {
                let length = number(&mut message) as usize;
                let (bytes, rest) = message.split_at(length);
                found.push((field, Field::Bytes(bytes)));
                message = rest;
            }
            5 => {
                let (bytes, rest) = message.split_first_chunk().expect("four bytes");
                found.push((field, Field::Float(f32::from_le_bytes(*bytes))));
                message = rest;
            }
            other => panic!("wire type {other}"),
        }
    }
    found
}

fn logger(directory: &Path) -> TensorBoard<InMemoryMetricLogger> {
    let mut logger = TensorBoard::new(InMemoryMetricLogger::default(), directory)
        .expect("the directory is writable");
    for name in ["Loss", "Learning Rate"] {
        logger.log_metric_definition(MetricDefinition {
            metric_id: id(name),
            name: name.into(),
            description: None,
            attributes: MetricAttributes::None,
        });
    }
    logger
}

fn epoch(logger: &mut impl MetricLogger, number: usize, losses: &[f64]) {
    for loss in losses {
        let metrics = [("Loss", *loss, 9.0), ("Learning Rate", 1e-3, 1e-3)];
        logger.log(update(&metrics), number, &Split::Train);
    }
    logger.log_epoch_summary(EpochSummary::new(number, Split::Train));
    for (loss, mean) in [(4.0, 4.0), (2.0, 3.0)] {
        logger.log(update(&[("Loss", loss, mean)]), number, &Split::Valid);
    }
    logger.log_epoch_summary(EpochSummary::new(number, Split::Valid));
}

#[test]
fn a_point_a_step_of_training_and_one_an_epoch_of_validation() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut first = logger(directory.path());
    epoch(&mut first, 1, &[0.5, 0.25]);
    epoch(&mut first, 2, &[0.125]);
    let inner = &mut first.into_inner();
    let read = inner.read_numeric("Loss", 1, &Split::Train);
    assert!(read.is_ok(), "the wrapped logger has the metrics too");
    let mut resumed = logger(directory.path()).with_steps(200);
    epoch(&mut resumed, 3, &[0.0625]);
    drop(resumed);

    let train = curves(&directory.path().join("train"));
    let loss = vec![(1, 0.5), (2, 0.25), (3, 0.125), (201, 0.0625)];
    let rate = [1, 2, 3, 201].map(|step| (step, 1e-3)).to_vec();
    let expected = [("Learning Rate".into(), rate), ("Loss".into(), loss)];
    assert_eq!(train, Curves::from(expected));
    let valid = curves(&directory.path().join("valid"));
    let loss = vec![(2, 3.0), (3, 3.0), (201, 3.0)];
    assert_eq!(valid, Curves::from([("Loss".into(), loss)]));
}

#[test]
fn a_directory_that_cannot_be_made_is_an_error() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let logger = TensorBoard::new(InMemoryMetricLogger::default(), file.path());
    assert!(logger.is_err());
}
