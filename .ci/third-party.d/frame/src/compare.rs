//! All runs of a project, and its row of the table.

use std::process::Command;

use crate::Project;
use crate::run::{FAILED, IMPOSSIBLE, Report, Run};

/// Two ranks add gradients in another order than one: f32 rounding, after the steps of a run,
/// relative to the loss.
const ROUNDING: f32 = 1e-4;
/// bf16 has 8 bits, f16 11, and both sum in f32: of the first loss, relative to it. Those of later
/// steps are of other weights, which a norm over four rows drives apart.
const LOW_PRECISION: f32 = 0.05;
/// The estimate knows no entries of autodiff's tape, so it is below the heap; the heap has blocks
/// of the allocator, and what the project keeps beside its tensors.
const ESTIMATED: std::ops::Range<f64> = 0.85..1.05;
/// Most of a smaller heap are those entries.
const JUDGED_HEAP_BYTES: u64 = 4 << 20;

/// A cell of the table: what holds, or what does not.
type Cell = Result<String, String>;

/// Why a run has no report.
#[derive(Clone, Debug)]
enum NoReport {
    Impossible(String),
    Failed(String),
}

/// Runs this program again. A panic is a failure, with its message.
fn run(run: Run) -> Result<Report, NoReport> {
    let program = std::env::current_exe().expect("a path");
    let output = Command::new(program)
        .arg(run.to_string())
        .output()
        .expect("this program starts");
    let said = String::from_utf8_lossy(&output.stdout);
    for line in said.lines() {
        if let Some(reason) = line.strip_prefix(IMPOSSIBLE) {
            return Err(NoReport::Impossible(reason.to_owned()));
        }
        if let Some(error) = line.strip_prefix(FAILED) {
            return Err(NoReport::Failed(error.to_owned()));
        }
        if line.starts_with("report ") {
            return Ok(line.parse().expect("numbers"));
        }
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    eprintln!("{run}: {errors}");
    let is_panic = |line: &&str| line.contains("panicked at") || line.contains("overflowed");
    let panicked = errors.lines().skip_while(|line| !is_panic(line)).take(2);
    let message: Vec<_> = panicked.map(str::trim).collect();
    Err(NoReport::Failed(message.join(" ")))
}

fn difference(found: f32, expected: f32) -> f32 {
    let difference = (found - expected).abs() / expected.abs();
    if difference.is_nan() {
        f32::INFINITY
    } else {
        difference
    }
}

/// The largest difference of a step's loss, relative to it.
fn relative_error(found: &Report, expected: &Report) -> f32 {
    let pairs = found.losses.iter().zip(&expected.losses);
    pairs.fold(0.0, |most: f32, (&found, &expected)| {
        most.max(difference(found, expected))
    })
}

/// The same losses and the same weights, bit for bit.
fn same_bits(found: &Report, expected: &Report) -> bool {
    let bits =
        |report: &Report| -> Vec<u32> { report.losses.iter().map(|loss| loss.to_bits()).collect() };
    bits(found) == bits(expected) && found.checksum == expected.checksum
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

fn budget<P: Project>(found: &Report, plain: &Report) -> Cell {
    let percent = P::BUDGET * 100.0;
    let cell = recomputed(found, plain)?;
    Ok(format!("{percent} %: {cell}"))
}

/// What runs operations again has the bits of what keeps all.
fn recomputed(found: &Report, plain: &Report) -> Cell {
    let peak = mebibytes(found.last_peak_bytes);
    let Report { replayed, .. } = found;
    if same_bits(found, plain) {
        Ok(format!("same bits, {peak}, {replayed} operations again"))
    } else {
        let error = relative_error(found, plain);
        Err(format!("other bits: losses differ by {error:.1e}"))
    }
}

/// Scopes of blocks, with the time of a step beside that of a plain one.
fn in_scopes(found: &Report, plain: &Report) -> Cell {
    let time = found.step.as_secs_f64() / plain.step.as_secs_f64();
    let cell = recomputed(found, plain)?;
    Ok(format!("{cell}, {time:.2} of the time"))
}

fn low_precision(found: &Report, plain: &Report) -> Cell {
    let first = difference(found.losses[0], plain.losses[0]);
    let all = relative_error(found, plain);
    let cell = format!("first loss within {first:.1e}, all within {all:.1e}");
    if first < LOW_PRECISION {
        Ok(cell)
    } else {
        Err(cell)
    }
}

fn ranks<P: Project>(found: &Report, whole: &Report) -> Cell {
    if let Some(reason) = P::NOT_ADDITIVE {
        return Ok(format!("trains; {reason}"));
    }
    let error = relative_error(found, whole);
    let cell = format!("loss within {error:.1e}");
    if error < ROUNDING {
        Ok(cell)
    } else {
        Err(cell)
    }
}

fn stage_3<P: Project>(
    found: &Report,
    stage_2: &Option<Result<Report, NoReport>>,
    whole: &Report,
) -> Cell {
    let cell = ranks::<P>(found, whole)?;
    match stage_2 {
        Some(Ok(stage_2)) if same_bits(found, stage_2) => {
            Ok(format!("{cell}; same bits as stage 2"))
        }
        Some(Ok(_)) => Err(format!("{cell}; other bits than stage 2")),
        Some(Err(_)) | None => Ok(cell),
    }
}

fn estimate(found: &Report, plain: &Report) -> Cell {
    let ratio = found.peak_bytes as f64 / plain.peak_bytes as f64;
    let peak = mebibytes(found.peak_bytes);
    let cell = format!("{peak}, {ratio:.3} of the heap");
    if ESTIMATED.contains(&ratio) || plain.peak_bytes < JUDGED_HEAP_BYTES {
        Ok(cell)
    } else {
        Err(cell)
    }
}

/// Prints the row. Ends with an error if something does not hold.
pub fn print_row<P: Project>() {
    let only = std::env::var("RUNS").ok();
    let wanted = |run: Run| {
        let name = run.to_string();
        only.as_ref()
            .is_none_or(|only| only.split(',').any(|it| it == name))
    };
    let plain = run(Run::Plain).unwrap_or_else(|error| panic!("{}: {error:?}", P::NAME));
    let whole = run(Run::WithoutDropout).unwrap_or_else(|error| panic!("{}: {error:?}", P::NAME));
    let stage_2 = wanted(Run::Stage2).then(|| run(Run::Stage2));
    let compared = |of: Run, compare: &dyn Fn(&Report) -> Cell| -> Cell {
        if !wanted(of) {
            return Ok("not run".to_owned());
        }
        let found = match (of, &stage_2) {
            (Run::Stage2, Some(found)) => found.clone(),
            _ => run(of),
        };
        match found {
            Ok(found) => compare(&found),
            Err(NoReport::Impossible(reason)) => Ok(format!("impossible: {reason}")),
            Err(NoReport::Failed(error)) => Err(error),
        }
    };
    let scopes = match std::env::var_os("HAND") {
        Some(_) => Run::ByHand,
        None => Run::Units,
    };
    let cells = [
        compared(Run::Budget, &|found| budget::<P>(found, &plain)),
        compared(scopes, &|found| in_scopes(found, &plain)),
        compared(Run::Bf16, &|found| low_precision(found, &plain)),
        compared(Run::F16, &|found| low_precision(found, &plain)),
        compared(Run::Stage2, &|found| ranks::<P>(found, &whole)),
        compared(Run::Stage3, &|found| stage_3::<P>(found, &stage_2, &whole)),
        compared(Run::Estimate, &|found| estimate(found, &plain)),
    ];
    let millis = plain.step.as_secs_f64() * 1e3;
    let peak = mebibytes(plain.last_peak_bytes);
    print!(
        "| {} | {} | {millis:.1} ms, {peak} |",
        P::NAME,
        plain.parameters
    );
    for cell in &cells {
        match cell {
            Ok(cell) => print!(" {cell} |"),
            Err(cell) => print!(" **no**: {cell} |"),
        }
    }
    println!();
    if cells.iter().any(Result::is_err) {
        std::process::exit(1);
    }
}
