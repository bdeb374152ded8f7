//! Continues the training of a published language model on text:
//! `cargo run --release --example finetune -- --model DIR --text FILE`, and `-- --help` for the
//! options.

use std::process::ExitCode;

use examples::finetune::options::Options;
use examples::training::error::TrainingError;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            // The same exit code as clap's for a usage error.
            ExitCode::from(if error.is_usage() { 2 } else { 1 })
        }
    }
}

fn run() -> Result<(), TrainingError> {
    let options = Options::read(std::env::args_os())?;
    if let Some(report) = examples::finetune::run(&options)? {
        println!(
            "\n{report}what was trained, and report.json: {}",
            options.output.display()
        );
    }
    Ok(())
}
