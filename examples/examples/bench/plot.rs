//! The times as a bar chart.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::error::BenchError;
use super::report::BenchReport;
use super::statistics::Quartiles;

const LEAST_WIDTH: u32 = 720;
const HEIGHT: u32 = 420;
/// Of a letter of a setting's name, at most.
const LETTER_WIDTH: u32 = 9;
const BAR: RGBColor = RGBColor(70, 110, 180);

/// Draws the median time of a step by setting, with its quartiles, as SVG.
///
/// # Errors
///
/// The file cannot be written.
pub fn write(report: &BenchReport, file: &Path) -> Result<(), BenchError> {
    let svg = draw(report).map_err(|error| BenchError::Plot {
        path: file.to_owned(),
        reason: error.to_string(),
    })?;
    std::fs::write(file, svg).map_err(BenchError::io("write", file))
}

fn draw(report: &BenchReport) -> Result<String, Box<dyn std::error::Error>> {
    let bars: Vec<(&str, Quartiles)> = report
        .measured()
        .map(|(setting, figures)| (setting, figures.milliseconds))
        .collect();
    let highest = bars
        .iter()
        .map(|(_, time)| time.upper)
        .fold(f64::MIN_POSITIVE, f64::max);
    let longest = bars.iter().map(|(name, _)| name.len()).max();
    let names = LETTER_WIDTH * (longest.unwrap_or_default() * bars.len()) as u32;
    let size = (LEAST_WIDTH.max(names), HEIGHT);
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        area.fill(&WHITE)?;
        let title = format!(
            "A training step, {} parameters, {}",
            report.parameters.unwrap_or_default(),
            report.backend
        );
        // A plain axis, with the names drawn under the bars: the key points of plotters' segmented
        // axis do not end for some numbers of bars.
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(30)
            .y_label_area_size(60)
            .build_cartesian_2d(0.0..bars.len().max(1) as f64, 0.0..1.15 * highest)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .disable_x_axis()
            .light_line_style(TRANSPARENT)
            .y_desc("ms a step, median and quartiles")
            .label_style(("sans-serif", 15))
            .draw()?;

        chart.draw_series(bars.iter().enumerate().map(|(bar, (_, time))| {
            let left = bar as f64;
            Rectangle::new([(left + 0.2, 0.0), (left + 0.8, time.median)], BAR.filled())
        }))?;
        let center = |bar: usize| bar as f64 + 0.5;
        chart.draw_series(bars.iter().enumerate().map(|(bar, (_, time))| {
            let at = |time| (center(bar), time);
            PathElement::new(vec![at(time.lower), at(time.upper)], BLACK.stroke_width(2))
        }))?;
        let text = |vertical| {
            ("sans-serif", 16)
                .into_text_style(&area)
                .pos(Pos::new(HPos::Center, vertical))
        };
        chart.draw_series(bars.iter().enumerate().map(|(bar, (_, time))| {
            let above = (center(bar), time.upper + 0.01 * highest);
            Text::new(format!("{:.1}", time.median), above, text(VPos::Bottom))
        }))?;
        let plotted = chart.plotting_area();
        for (bar, (name, _)) in bars.iter().enumerate() {
            let (x, y) = plotted.map_coordinate(&(center(bar), 0.0));
            area.draw(&Text::new(*name, (x, y + 8), text(VPos::Top)))?;
        }
        area.present()?;
    }
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn every_setting_that_was_measured_has_a_bar() {
        let svg = draw(&report()).unwrap();
        assert!(svg.starts_with("<svg"));
        for text in ["bare", "f16", "20.0", "10.0"] {
            assert!(svg.lines().any(|line| line.trim() == text), "{text}\n{svg}");
        }
        assert!(!svg.contains("bf16"), "it was refused");
        let bars = svg.lines().filter(|line| line.contains("#466EB4"));
        assert_eq!(bars.count(), 2);
    }

    #[test]
    fn any_number_of_bars_is_drawn() {
        let measured = report().results[0].clone();
        for bars in 1..8 {
            let mut report = report();
            report.results = vec![measured.clone(); bars];
            assert!(draw(&report).unwrap().starts_with("<svg"), "{bars}");
        }
    }

    #[test]
    fn nothing_measured_is_an_empty_chart() {
        let mut report = report();
        report.results.clear();
        assert!(draw(&report).unwrap().starts_with("<svg"));
    }
}
