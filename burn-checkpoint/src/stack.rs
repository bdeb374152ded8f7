//! What guards put in force on a thread: the newest one counts, in whichever order they are dropped.
//!
//! `guard = install();` makes the new one before it drops the old one, so a guard must not restore what it found.

/// Entries of guards, oldest first: the newest is in force.
pub(crate) struct Stack<T> {
    entries: Vec<(Ticket, T)>,
    next: u64,
}

/// Identifies the entry of a guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket(u64);

impl<T> Stack<T> {
    pub const fn new() -> Self {
        Self {
            entries: Vec::new(),
            next: 0,
        }
    }

    /// Puts something in force.
    pub fn push(&mut self, entry: T) -> Ticket {
        let ticket = Ticket(self.next);
        self.next += 1;
        self.entries.push((ticket, entry));
        ticket
    }

    /// Takes an entry out, wherever it is. Returns whether it was in force.
    pub fn remove(&mut self, ticket: Ticket) -> bool {
        let newest = self.entries.last().is_some_and(|(own, _)| *own == ticket);
        self.entries.retain(|(own, _)| *own != ticket);
        newest
    }

    /// What is in force.
    pub fn top(&self) -> Option<&T> {
        self.entries.last().map(|(_, entry)| entry)
    }
}
