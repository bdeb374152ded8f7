//! Memory over one step as a picture.
//!
//! [`svg`] draws a [`trace`](crate::trace): live bytes as a curve with its peak, a row of ticks for what was evicted,
//! replayed, offloaded and uploaded, and every scope as a band below, inner scopes under outer ones. A scope that is
//! replayed has a band of the same colour, hollow, where that happens. With the feature `plot`.

mod draw;
#[cfg(test)]
mod tests;
mod timeline;
mod unit;

use crate::trace::Event;
use timeline::Timeline;

/// Draws the events of one device step, with all defaults: see [`MemoryPlot`].
pub fn svg(events: &[Event]) -> String {
    MemoryPlot::new(events).svg()
}

/// A picture of a trace, to be drawn with [`svg`](Self::svg).
#[derive(Clone, Debug)]
pub struct MemoryPlot<'a> {
    events: &'a [Event],
    title: String,
    budget_bytes: Option<u64>,
    axis: Axis,
}

/// What the horizontal axis counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Axis {
    /// Events, one after the other: the same picture in every run. The default.
    #[default]
    Events,
    /// Milliseconds since the recording began.
    Milliseconds,
}

impl<'a> MemoryPlot<'a> {
    /// A picture of these events, over their number.
    pub fn new(events: &'a [Event]) -> Self {
        Self {
            events,
            title: "Memory over one step".into(),
            budget_bytes: None,
            axis: Axis::default(),
        }
    }

    /// Another title. The peak is added to it.
    pub fn title(mut self, title: impl Into<String>) -> Self {
        self.title = title.into();
        self
    }

    /// Draws a line at so many bytes.
    pub fn budget_bytes(mut self, budget_bytes: u64) -> Self {
        self.budget_bytes = Some(budget_bytes);
        self
    }

    /// Another horizontal axis.
    pub fn axis(mut self, axis: Axis) -> Self {
        self.axis = axis;
        self
    }

    /// Draws the picture, in time proportional to the number of events. Beyond some thousand events its size grows only with the number of
    /// scopes.
    pub fn svg(&self) -> String {
        let timeline = Timeline::new(self.events, self.axis);
        let mut svg = String::new();
        draw::draw(self, &timeline, &mut svg).expect("drawing into a string does not fail");
        svg
    }
}
