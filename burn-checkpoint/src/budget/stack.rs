//! What guards put in force: the newest one counts, in whichever order they are dropped.
//!
//! `guard = install();` makes the new one before it drops the old one, so a guard must not restore
//! what it found.

use std::collections::BTreeMap;

/// Entries of guards, by their tickets, of which no two are the same at one time: the newest is in
/// force.
pub(crate) struct Stack<T>(BTreeMap<u64, T>);

impl<T> Stack<T> {
    pub const fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Puts something in force. Returns its ticket.
    pub fn push(&mut self, entry: T) -> u64 {
        let ticket = self.0.keys().next_back().map_or(0, |last| last + 1);
        self.0.insert(ticket, entry);
        ticket
    }

    /// Takes an entry out, wherever it is.
    pub fn remove(&mut self, ticket: u64) -> Option<T> {
        self.0.remove(&ticket)
    }

    /// What is in force.
    pub fn top(&self) -> Option<&T> {
        self.0.values().next_back()
    }
}
