//! Memory over an update, as SVG.

use std::path::Path;

use burn_estimate::Estimate;
use plotters::prelude::*;

/// Draws bytes in use over the changes of an update, and the device's memory as a line.
pub fn memory(
    file: &Path,
    estimate: &Estimate,
    memory_bytes: u64,
    title: &str,
) -> Result<(), Box<dyn std::error::Error>> {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let changes = estimate.bytes_in_use.len();
    let highest = 1.1 * gib(estimate.peak_bytes.max(memory_bytes));
    let root = SVGBackend::new(file, (900, 420)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 16))
        .margin(12)
        .x_label_area_size(32)
        .y_label_area_size(56)
        .build_cartesian_2d(0..changes, 0.0..highest)?;
    let axes = &mut chart.configure_mesh();
    axes.x_desc("allocations and frees of an update")
        .y_desc("GiB in use")
        .draw()?;
    // One point per pixel is enough: the highest of its changes.
    let behind = changes.div_ceil(800).max(1);
    let highest_of = |(number, part): (usize, &[u64])| {
        (
            number * behind,
            gib(part.iter().copied().max().unwrap_or(0)),
        )
    };
    let points = estimate
        .bytes_in_use
        .chunks(behind)
        .enumerate()
        .map(highest_of);
    chart.draw_series(AreaSeries::new(points, 0.0, BLUE.mix(0.4)).border_style(BLUE))?;
    let limit = gib(memory_bytes);
    chart.draw_series(LineSeries::new([(0, limit), (changes, limit)], RED))?;
    root.present()?;
    Ok(())
}
