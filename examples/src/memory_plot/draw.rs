//! The picture itself.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::MemoryPlot;
use super::timeline::{Band, Pass, Point, Row, Timeline};
use super::unit::Unit;

type Picture<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

const WIDTH: u32 = 1000;
const HEAD: u32 = 62;
const CHART: u32 = 340;
const AXIS: u32 = 42;
const ROW: u32 = 37;
const MARGIN: u32 = 12;
const LEFT: u32 = 72;
/// The most pixels that all bands together may be high.
const BANDS: u32 = 176;

const INK: RGBColor = RGBColor(40, 40, 40);
const LIVE: [RGBColor; 3] = [
    RGBColor(70, 110, 180),
    RGBColor(60, 150, 110),
    RGBColor(150, 90, 170),
];
const BUDGET: RGBColor = RGBColor(200, 40, 40);
const SCOPES: [RGBColor; 6] = [
    RGBColor(141, 180, 226),
    RGBColor(244, 190, 130),
    RGBColor(160, 210, 160),
    RGBColor(226, 160, 176),
    RGBColor(196, 178, 226),
    RGBColor(214, 206, 140),
];

pub(super) fn draw(plot: &MemoryPlot<'_>, timeline: &Timeline, svg: &mut String) -> Drawn {
    // From top to bottom: title and legend, the chart with its axis, bands, rows of ticks.
    let depth = timeline.depth() as u32;
    let band_height = (BANDS / depth.max(1)).clamp(3, 20);
    let bands_top = HEAD + CHART + AXIS + 6;
    let rows_top = bands_top + depth * band_height + 8;
    let height = rows_top + timeline.rows.len() as u32 * ROW + MARGIN;

    let (peak_at, peak_bytes) = timeline.peak();
    let highest = peak_bytes.max(plot.budget_bytes.unwrap_or(0));
    let unit = Unit::for_axis(highest);
    let end = timeline.end.max(1.0);

    let area = SVGBackend::with_string(svg, (WIDTH, height)).into_drawing_area();
    area.fill(&WHITE)?;
    let title = format!("{}: peak {}", plot.title, unit.text(peak_bytes));
    let left = (LEFT + MARGIN) as i32;
    area.draw(&Text::new(title, (left, 10), font(20)))?;
    legend(&area, plot, timeline, unit)?;

    let mut chart = ChartBuilder::on(&area)
        .margin(MARGIN)
        .margin_top(HEAD)
        .margin_bottom(height - HEAD - CHART - AXIS)
        .x_label_area_size(AXIS)
        .y_label_area_size(LEFT)
        .build_cartesian_2d(
            0.0..end,
            0.0..1.12 * unit.of(highest).max(f64::MIN_POSITIVE),
        )?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(INK.mix(0.1))
        .axis_style(INK.mix(0.6))
        .x_labels(10)
        .y_labels(8)
        .x_label_formatter(&f64::to_string)
        .y_label_formatter(&f64::to_string)
        .x_desc("events, in order")
        .y_desc(unit.name)
        .axis_desc_style(font(14))
        .label_style(font(13))
        .draw()?;
    for (points, color) in timeline.curves.values().zip(LIVE.iter().cycle()) {
        let column = end / f64::from(WIDTH - LEFT);
        let points = steps(points, column).into_iter();
        let points = points.map(|(at, bytes)| (at, unit.of(bytes)));
        let curve = AreaSeries::new(points, 0.0, color.mix(0.25));
        chart.draw_series(curve.border_style(color.stroke_width(1)))?;
    }
    if let Some(budget_bytes) = plot.budget_bytes {
        let ends = [0.0, end].map(|at| (at, unit.of(budget_bytes)));
        let line = DashedLineSeries::new(ends, 8, 5, BUDGET.stroke_width(2));
        chart.draw_series(line)?;
    }
    let peak = (peak_at, unit.of(peak_bytes));
    let (x, y) = chart.plotting_area().map_coordinate(&peak);
    area.draw(&Circle::new((x, y), 3, INK.filled()))?;
    let (side, offset) = match x as u32 > WIDTH / 2 {
        true => (HPos::Right, -7),
        false => (HPos::Left, 7),
    };
    let style = font(14).pos(Pos::new(side, VPos::Bottom));
    let text = format!("peak {}", unit.text(peak_bytes));
    area.draw(&Text::new(text, (x + offset, y - 3), style))?;

    let across = |at: f64| chart.plotting_area().map_coordinate(&(at, 0.0)).0;
    for band in &timeline.bands {
        let top = bands_top + band.depth as u32 * band_height;
        let ends = [band.begin, band.end].map(across);
        draw_band(&area, band, ends, top as i32, band_height as i32)?;
    }
    for (row, top) in timeline.rows.iter().zip((rows_top..).step_by(ROW as usize)) {
        let mut columns: Vec<i32> = row.at.iter().copied().map(across).collect();
        columns.dedup();
        draw_row(&area, row, &columns, top as i32, unit)?;
    }
    area.present()?;
    Ok(())
}

fn font(size: i32) -> TextStyle<'static> {
    TextStyle::from(("sans-serif", size)).color(&INK)
}

fn legend(area: &Picture<'_>, plot: &MemoryPlot<'_>, timeline: &Timeline, unit: Unit) -> Drawn {
    let mut at = (LEFT + MARGIN) as i32;
    let mut entry = |text: String, style: ShapeStyle, thick: i32| -> Drawn {
        let swatch = [(at, 46 - thick / 2), (at + 22, 46 + thick / 2)];
        area.draw(&Rectangle::new(swatch, style))?;
        let anchor = font(13).pos(Pos::new(HPos::Left, VPos::Center));
        at += 28;
        let width = width_of(&text, 13);
        area.draw(&Text::new(text, (at, 46), anchor))?;
        at += width + 22;
        Ok(())
    };
    for (device, color) in timeline.curves.keys().zip(LIVE.iter().cycle()) {
        let text = match timeline.curves.len() {
            1 => "live".to_owned(),
            _ => format!("live, device {device}"),
        };
        entry(text, color.filled(), 4)?;
    }
    if let Some(budget_bytes) = plot.budget_bytes {
        let text = format!("budget {}", unit.text(budget_bytes));
        entry(text, BUDGET.filled(), 2)?;
    }
    for (pass, text) in [(Pass::Forward, "scope"), (Pass::Replay, "scope replayed")] {
        if timeline.bands.iter().any(|band| band.pass == pass) {
            entry(text.to_owned(), band_style(pass, SCOPES[0]), 12)?;
        }
    }
    Ok(())
}

/// About how wide a text is: no fonts are read.
fn width_of(text: &str, size: i32) -> i32 {
    text.chars().count() as i32 * size * 56 / 100
}

/// The corners of a curve that holds every value until the next event; of the events within one
/// `column` only the first, lowest, highest and last.
fn steps(points: &[Point], column: f64) -> Vec<Point> {
    let mut corners = Vec::new();
    let mut held = None;
    for within in points.chunk_by(|(a, _), (b, _)| (a / column) as u64 == (b / column) as u64) {
        let (first, last) = (within[0], within[within.len() - 1]);
        let bytes = within.iter().map(|(_, bytes)| *bytes);
        let extremes = bytes.clone().min().into_iter().chain(bytes.max());
        corners.extend(held.map(|bytes| (first.0, bytes)));
        corners.push(first);
        corners.extend(extremes.map(|bytes| (last.0, bytes)));
        corners.push(last);
        held = Some(last.1);
    }
    corners.dedup();
    corners
}

fn band_style(pass: Pass, color: RGBColor) -> ShapeStyle {
    match pass {
        Pass::Forward => color.filled(),
        Pass::Replay => color.stroke_width(2),
    }
}

fn draw_band(area: &Picture<'_>, band: &Band, ends: [i32; 2], top: i32, height: i32) -> Drawn {
    let [left, right] = [ends[0], ends[1].max(ends[0] + 2)];
    let color = SCOPES[band.scope % SCOPES.len()];
    let corners = [(left, top + 1), (right - 1, top + height - 2)];
    area.draw(&Rectangle::new(corners, band_style(band.pass, color)))?;

    let fits = |text: &&str| height >= 12 && width_of(text, 12) <= right - left;
    let number = band.label.rsplit(' ').next().unwrap_or_default();
    if let Some(text) = [&*band.label, number].into_iter().find(fits) {
        let style = font(12).pos(Pos::new(HPos::Center, VPos::Center));
        let center = ((left + right) / 2, top + height / 2);
        area.draw(&Text::new(text, center, style))?;
    }
    Ok(())
}

fn draw_row(area: &Picture<'_>, row: &Row, columns: &[i32], top: i32, unit: Unit) -> Drawn {
    let (name, color, count) = (row.name, row.color, row.at.len());
    let text = format!("{name}: {count} tensors, {}", unit.text(row.bytes));
    let left = (LEFT + MARGIN) as i32;
    area.draw(&Text::new(text, (left, top), font(12).color(&color)))?;

    for &x in columns {
        let tick = vec![(x, top + 16), (x, top + 29)];
        area.draw(&PathElement::new(tick, color.stroke_width(1)))?;
    }
    Ok(())
}
