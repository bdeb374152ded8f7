//! The settings against each other, on a tiny model.
//!
//! The precision, Burn's random numbers and the heap are the process's: the tests here take turns.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn_flex::Flex;
use clap::Parser;

use super::HEAP;
use super::fit;
use super::options::Options;
use super::report::BenchReport;
use super::rounds::race;

static TURN: Mutex<()> = Mutex::new(());

/// One test that measures the heap at a time. A panic counts as one: its backtrace takes memory.
pub fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn options(more: &str) -> Options {
    let arguments = format!(
        "bench --layers 1 --heads 2 --width 8 --context 4 --vocabulary 11 --warmup 1 --steps 4 {more}"
    );
    Options::parse_from(arguments.split_whitespace())
}

fn bench(more: &str) -> BenchReport {
    race::<Flex>(&options(&format!("--batch 2 {more}")), &Default::default())
}

#[test]
fn every_setting_takes_the_same_steps_from_the_same_start() {
    let _turn = turn();
    let report = bench("--settings bare,off,bf16,f16");
    let measured: Vec<_> = report.measured().map(|(_, figures)| figures).collect();
    assert_eq!(measured.len(), 4, "{report}");
    assert_eq!(report.reference.as_deref(), Some("bare"));
    for figures in &measured {
        assert_eq!(figures.step_milliseconds.len(), 4, "{report}");
        assert_eq!(figures.memory, None, "it would be that of all");
        assert!((figures.loss - measured[0].loss).abs() < 0.05, "{report}");
    }
    // `off` has `FusedBackward`: other operations for layer norm and attention, so other roundings.
    let [bare, off] = [measured[0], measured[1]];
    assert!((off.loss - bare.loss).abs() < 1e-5, "{report}");
    assert_eq!(measured[0].ratio.unwrap().median, 1.0);
}

#[test]
fn one_that_is_alone_has_its_memory_watched() {
    let _turn = turn();
    let report = bench("--settings off");
    let (_, figures) = report.measured().next().unwrap();
    assert_eq!(figures.memory.is_some(), cfg!(target_os = "linux"));
}

#[test]
fn there_is_no_round_after_the_last_second() {
    let _turn = turn();
    let report = bench("--settings bare --steps 500000 --max-seconds 1");
    let (_, figures) = report.measured().next().unwrap();
    assert!((3..500_000).contains(&figures.step_milliseconds.len()));
}

#[test]
fn every_way_to_hold_activations_computes_the_same_in_less() {
    let _turn = turn();
    let report = bench(
        "--layers 4 --width 32 --context 32 --batch 8 --settings off,block,keep-compute,offload,budget=60%,budget=25%,bare,balanced",
    );
    let measured: Vec<_> = report.measured().map(|(_, figures)| figures).collect();
    assert_eq!(measured.len(), 8, "{report}");
    for figures in &measured[..6] {
        assert_eq!(figures.same_bits, Some(true), "{report}");
    }
    let replayed: Vec<_> = measured.iter().map(|it| it.replayed_operations).collect();
    assert_eq!(replayed[0], Some(0), "{report}");
    assert!(replayed[1..6].iter().all(|it| *it > Some(0)), "{report}");
    assert_eq!(replayed[6..], [None, None], "{report}");
    let bytes: Vec<_> = measured.iter().map(|it| it.step_bytes.unwrap()).collect();
    let most = bytes[0];
    assert!(bytes[1] < most * 7 / 10, "{report}");
    assert!(bytes[4] < most * 8 / 10, "{report}");
    assert!(bytes[5] < bytes[4], "{report}");
    let [bare, balanced] = [measured[6], measured[7]];
    // Layer norm and attention are one operation each in the others.
    assert!(most < bytes[6] * 8 / 10, "{report}");
    assert!((bare.loss - measured[0].loss).abs() < 1e-5, "{report}");
    assert_eq!(bare.loss, balanced.loss, "{report}");
}

#[test]
fn what_is_not_the_same_is_told() {
    let _turn = turn();
    let report = bench("--settings bare,bf16+block");
    let same: Vec<_> = report.measured().map(|(_, it)| it.same_bits).collect();
    assert_eq!(same, [Some(true), Some(false)], "{report}");
}

#[test]
fn larger_batches_fit_where_less_is_held() {
    let _turn = turn();
    let options = options("--layers 4 --context 32 --settings bare,block,budget=1");
    // The symbols of a backtrace stay in memory.
    let limit_bytes = (8 << 20) + HEAP.current_usage() as u64;
    let report = fit::search::<Flex>(&options, limit_bytes, &Default::default());
    let found: Vec<_> = report
        .results
        .iter()
        .map(|it| it.found.clone().unwrap())
        .collect();
    let [bare, block, budget] = &found[..] else {
        panic!("{report}")
    };
    assert!(bare.largest_fitting < block.largest_fitting, "{report}");
    assert!(bare.largest_fitting < budget.largest_fitting, "{report}");
    for found in &found {
        assert!(found.peak_bytes < limit_bytes, "{report}");
    }
    assert_eq!(report.to_string().lines().count(), 3 + 2 + 3, "{report}");
    let nothing = fit::search::<Flex>(&options, 1 << 10, &Default::default());
    assert!(
        nothing.results.iter().all(|it| it.found.is_err()),
        "{nothing}"
    );
}
