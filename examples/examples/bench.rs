//! Times whole training steps side by side: `cargo run --release --example bench`, and `-- --help` for the options.

use std::process::ExitCode;

use clap::Parser;
use examples::bench::error::BenchError;
use examples::bench::options::Options;
use peak_alloc::PeakAlloc;

/// Counts the heap of a step on the CPU.
#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

fn main() -> ExitCode {
    match examples::bench::run(&Options::parse()) {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            // The same exit code as clap's for a usage error.
            ExitCode::from(if matches!(error, BenchError::Options(_)) {
                2
            } else {
                1
            })
        }
    }
}
