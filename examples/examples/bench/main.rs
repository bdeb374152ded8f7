//! Times whole training steps side by side: `cargo run --release --example bench`, and `-- --help`
//! for the options.
//!
//! The time and memory of whole training steps of the GPT: the bare backend, every kind of mixed
//! precision, and every way to hold activations, side by side.
//!
//! In every round each setting takes one step: forward, backward, optimizer, and a read of the
//! loss. A disturbance of the machine that is longer than a step slows all settings alike, so the
//! ratios of a round vary less than its times.
//!
//! - [`options`]: the command line; [`setting`]: what is compared; [`error`]: what can go wrong;
//! - [`trainer`]: one step of one setting; [`apart`]: on a thread of its own; [`torch`]: in
//!   PyTorch; [`rounds`]: the steps of all, in turn;
//! - [`memory`]: what steps hold; [`alone`]: each setting in a process of its own, for all of its
//!   memory to be its own;
//! - [`operations`]: where the time of a step goes;
//! - [`fit`]: instead of times, the largest batch that fits into so much memory;
//! - [`statistics`], [`report`], [`table`], [`plot`]: what is left at the end; [`compare`]: with
//!   PyTorch.

mod alone;
mod compare;
mod error;
mod fit;
mod memory;
mod operations;
mod options;
mod own_thread;
mod plot;
mod report;
mod rounds;
mod setting;
mod statistics;
mod table;
#[cfg(test)]
mod tests;
mod torch;
mod trainer;

use std::process::ExitCode;

use burn::prelude::Backend;
use burn_amp::AmpError;
use clap::Parser;
use examples::backend::OnBackend;
use peak_alloc::PeakAlloc;

use error::BenchError;
use fit::FitReport;
use options::Options;
use report::BenchReport;

/// Counts the heap of a step on the CPU.
#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            // The same exit code as clap's for a usage error.
            ExitCode::from(match error {
                BenchError::Options(_) => 2,
                _ => 1,
            })
        }
    }
}

/// Does what the options say; returns what to print.
///
/// # Errors
///
/// The options contradict each other, the backend is not compiled in, a file cannot be read or
/// written, or no setting could be measured.
fn run(options: &Options) -> Result<String, BenchError> {
    options.validate()?;
    if !options.compare.is_empty() {
        return compare::table(&options.compare);
    }
    if let Some(limit) = options.fit {
        let report = options.backend.run("bench", Fit(options, limit << 20))?;
        if let Some(file) = &options.output {
            report.write(file)?;
        }
        return Ok(report.to_string());
    }
    if options.operations {
        return Ok(options.backend.run("bench", Operations(options))??);
    }
    let report = if options.memory {
        // Here, not in each process anew.
        options.backend.check("bench")?;
        alone::each(options)?
    } else {
        options.backend.run("bench", Race(options))?
    };
    if let Some(file) = &options.output {
        report.write(file)?;
    }
    if let Some(file) = &options.plot {
        plot::write(&report, file)?;
    }
    if report.measured().next().is_none() {
        return Err(BenchError::NothingMeasured(report.to_string()));
    }
    Ok(report.to_string())
}

struct Fit<'a>(&'a Options, u64);

impl OnBackend for Fit<'_> {
    type Output = FitReport;

    fn run<B: Backend>(self, device: B::Device) -> FitReport {
        fit::search::<B>(self.0, self.1, &device)
    }
}

struct Operations<'a>(&'a Options);

impl OnBackend for Operations<'_> {
    type Output = Result<String, AmpError>;

    fn run<B: Backend>(self, device: B::Device) -> Self::Output {
        operations::table::<B>(self.0, &device)
    }
}

struct Race<'a>(&'a Options);

impl OnBackend for Race<'_> {
    type Output = BenchReport;

    fn run<B: Backend>(self, device: B::Device) -> BenchReport {
        rounds::race::<B>(self.0, &device)
    }
}
