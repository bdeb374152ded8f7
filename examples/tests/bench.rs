//! The settings against each other, on a tiny model.
//!
//! The precision and Burn's random numbers are the process's: the tests here take turns.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn_flex::Flex;
use clap::Parser;
use examples::bench::options::Options;
use examples::bench::report::BenchReport;
use examples::bench::rounds::race;

static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn bench(more: &str) -> BenchReport {
    let arguments = format!(
        "bench --layers 1 --heads 2 --width 8 --context 4 --batch 2 --vocabulary 11 --warmup 1 --steps 4 {more}"
    );
    let options = Options::parse_from(arguments.split_whitespace());
    race::<Flex>(&options, &Default::default())
}

#[test]
fn every_setting_takes_the_same_steps_from_the_same_start() {
    let _turn = turn();
    let report = bench("--settings bare,off,bf16,f16-sync,f16-deferred");
    let measured: Vec<_> = report.measured().map(|(_, figures)| figures).collect();
    assert_eq!(measured.len(), 5, "{report}");
    assert_eq!(report.reference.as_deref(), Some("bare"));
    for figures in &measured {
        assert_eq!(figures.step_milliseconds.len(), 4, "{report}");
        assert_eq!(figures.memory, None, "it would be that of all");
        assert!((figures.loss - measured[0].loss).abs() < 0.05, "{report}");
    }
    assert_eq!(
        measured[0].loss, measured[1].loss,
        "off is the bare backend"
    );
    assert_eq!(measured[3].loss, measured[4].loss, "deferred is sync");
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
