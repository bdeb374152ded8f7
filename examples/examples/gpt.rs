//! Trains a GPT on text: `cargo run --release --example gpt`, and `-- --help` for the options.

use std::process::ExitCode;

use clap::Parser;
use examples::gpt::options::Options;
use peak_alloc::PeakAlloc;

/// Counts the heap, for `--effective-batch` on the CPU.
#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

fn main() -> ExitCode {
    let options = Options::parse();
    match examples::gpt::run(&options) {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(report)) => {
            println!(
                "\n{report}\n--- sample ---\n{}\n--------------",
                report.sample
            );
            println!("report: {}", options.output.join("report.json").display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            // The same exit code as clap's for a usage error.
            ExitCode::from(if error.is_usage() { 2 } else { 1 })
        }
    }
}
