//! Continues the training of a published language model on text:
//! `cargo run --release --example finetune -- --model DIR --text FILE`, and `-- --help` for the
//! options.

use std::process::ExitCode;

use clap::Parser;
use examples::finetune::options::Options;

fn main() -> ExitCode {
    let options = Options::parse();
    match examples::finetune::run(&options) {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(report)) => {
            println!(
                "\n{report}what was trained, and report.json: {}",
                options.output.display()
            );
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            // The same exit code as clap's for a usage error.
            ExitCode::from(if error.is_usage() { 2 } else { 1 })
        }
    }
}
