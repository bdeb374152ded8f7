//! Memory over one step as a picture.
//!
//! [`MemoryPlot`] draws a [`trace`](burn_checkpoint::trace): live bytes as a curve with its peak, a row of
//! ticks for what was evicted, replayed, offloaded and uploaded, and every scope as a band below,
//! inner scopes under outer ones. A scope that is replayed has a band of the same colour, hollow,
//! where that happens.

mod draw;
#[cfg(test)]
mod tests;
mod timeline;
mod unit;

use burn_checkpoint::trace::Event;

use timeline::Timeline;

/// A picture of a trace, to be drawn with [`svg`](Self::svg).
#[derive(Clone, Debug)]
pub struct MemoryPlot<'a> {
    events: &'a [Event],
    title: String,
    budget_bytes: Option<u64>,
}

impl<'a> MemoryPlot<'a> {
    /// A picture of these events, one after the other: the same in every run.
    pub fn new(events: &'a [Event]) -> Self {
        Self {
            events,
            title: "Memory over one step".into(),
            budget_bytes: None,
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

    /// Draws the picture, in time proportional to the number of events. Beyond some thousand events
    /// its size grows only with the number of scopes.
    pub fn svg(&self) -> String {
        let timeline = Timeline::new(self.events);
        let mut svg = String::new();
        draw::draw(self, &timeline, &mut svg).expect("drawing into a string does not fail");
        svg
    }
}
