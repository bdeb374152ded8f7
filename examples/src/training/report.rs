//! What reports of trainings have in common: how they are written and shown.

use std::fmt;
use std::io;
use std::path::Path;

use serde::Serialize;

/// Writes a report as JSON.
///
/// # Errors
///
/// The file cannot be written.
pub fn write(report: &impl Serialize, file: &Path) -> io::Result<()> {
    let json = serde_json::to_string_pretty(report).expect("a report is plain data");
    fs_err::write(file, json + "\n")
}

/// A peak of memory in MiB, if the system reports it.
pub fn mebibytes(peak_bytes: Option<u64>) -> String {
    peak_bytes.map_or("unknown".into(), |bytes| {
        format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20))
    })
}

/// Writes figures with their names, one in a line.
pub fn table(out: &mut fmt::Formatter<'_>, rows: &[(&str, String)]) -> fmt::Result {
    let mut rows = rows.iter();
    rows.try_for_each(|(name, value)| writeln!(out, "{name:22}{value}"))
}
