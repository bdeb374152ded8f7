//! What a user sees of warnings, with a logger and without. Each case is a process of its own, for
//! the logger is the process's.

use std::process::Command;

use burn_decorator::warn_user;
use log::{LevelFilter, Log, Metadata, Record};

/// The logger that the program of a case installs.
const LOGGER: &str = "WARN_TEST_LOGGER";

/// Writes what it gets to standard output.
struct Lines {
    prefix: &'static str,
}

impl Log for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        println!("{} {} {}", self.prefix, record.target(), record.args());
    }

    fn flush(&self) {}
}

static LINES: Lines = Lines { prefix: "logged" };

/// The program of a case: two kinds of warnings, the first of them three times.
#[test]
fn program() {
    let Ok(logger) = std::env::var(LOGGER) else {
        return; // not run by a case
    };
    let level = match logger.as_str() {
        "none" => None,
        "off" => Some(LevelFilter::Off),
        _ => Some(LevelFilter::Warn),
    };
    if let Some(level) = level {
        log::set_logger(&LINES).unwrap();
        log::set_max_level(level);
    }
    for number in 0..3 {
        warn_user!("first kind {number}");
    }
    warn_user!("second kind");
}

/// The lines of the program's standard output and error that have to do with warnings.
fn run(logger: &str) -> [Vec<String>; 2] {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "program", "--nocapture", "--test-threads=1"])
        .env(LOGGER, logger)
        .output()
        .unwrap();
    assert!(output.status.success());
    [output.stdout, output.stderr].map(|bytes| {
        let text = String::from_utf8(bytes).unwrap();
        let lines = text.lines().filter(|line| line.contains(" kind"));
        let from_message = |line: &str| {
            let start = line.find("logged").or(line.find("warning"));
            line[start.unwrap_or(0)..].to_owned()
        };
        lines.map(from_message).collect()
    })
}

#[test]
fn without_a_logger_each_kind_is_on_standard_error_once() {
    let [out, err] = run("none");
    assert_eq!(out, [""; 0]);
    assert_eq!(err, ["warning: first kind 0", "warning: second kind"]);
}

#[test]
fn a_logger_gets_every_warning_and_standard_error_none() {
    let [out, err] = run("on");
    let logged = [
        "first kind 0",
        "first kind 1",
        "first kind 2",
        "second kind",
    ];
    assert_eq!(out, logged.map(|text| format!("logged warn {text}")));
    assert_eq!(err, [""; 0]);
}

#[test]
fn a_logger_that_is_turned_off_stays_silent() {
    assert_eq!(run("off").concat(), [""; 0]);
}
