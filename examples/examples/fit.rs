//! Will it fit? `cargo run --release --example fit -- --params 7B --memory 24G`, and `-- --help` for the options.

use std::process::ExitCode;

use clap::Parser;
use examples::fit::Fit;

fn main() -> ExitCode {
    match Fit::parse().run() {
        Ok(report) => {
            println!("{report}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
