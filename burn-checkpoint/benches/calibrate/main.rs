//! What operations take, beside what `src/record/work.rs` takes them to cost.
//!
//!     cargo bench --workspace --bench calibrate
//!
//! prints for every row of `rows/`, whose tensors are small, fit a core's cache, or do not:
//! nanoseconds on Flex, nanoseconds an element (of products: a multiplication), and predicted over
//! measured; then the last for each work class. A `!` is where the two differ by more than two.
//!
//! Each time is the fastest of many. The rows take turns in rounds, so that what else the machine
//! does meets all of them alike and none of them always; and they run on one thread, which waits
//! for no other. Only ratios of times matter to evictions. `RAYON_NUM_THREADS` set by hand is
//! respected.

mod rows;
mod samples;

use std::process::{Command, ExitCode};

use samples::{Row, class};

/// Rounds in which every row has a turn.
const ROUNDS: usize = 20;

/// Rayon's number of threads, which it reads once.
const THREADS: &str = "RAYON_NUM_THREADS";

fn main() -> ExitCode {
    if std::env::var_os(THREADS).is_none() {
        return on_one_thread();
    }
    let mut rows = rows::all().0;
    for _ in 0..ROUNDS {
        rows.iter_mut().for_each(Row::turn);
    }
    rows.sort_by_key(|row| class(row.op.work));
    for row in &rows {
        println!(
            "{:8} {:24} {:12.0} ns {:9.4} ns a unit {:6.2}{} {}",
            class(row.op.work),
            row.op.name,
            row.ns(),
            row.ns_a_unit(),
            row.predicted(),
            if row.is_off() { '!' } else { ' ' },
            row.operands(),
        );
    }
    println!();
    summary(&rows);
    ExitCode::SUCCESS
}

/// Starts this program once more, with one thread.
fn on_one_thread() -> ExitCode {
    let program = std::env::current_exe().expect("a program has a path");
    let mut command = Command::new(program);
    let status = command.env(THREADS, "1").status();
    if status.expect("this program starts").success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Of each class: predicted over measured, the least, the median and the most.
fn summary(rows: &[Row]) {
    for own in rows.chunk_by(|row, next| row.op.work == next.op.work) {
        let mut ratios: Vec<f64> = own.iter().map(Row::predicted).collect();
        ratios.sort_by(f64::total_cmp);
        println!(
            "{:8} predicted over measured {:.2} .. {:.2} .. {:.2}; {} of {} off by more than two",
            class(own[0].op.work),
            ratios[0],
            ratios[ratios.len() / 2],
            ratios[ratios.len() - 1],
            own.iter().filter(|row| row.is_off()).count(),
            own.len(),
        );
    }
}
