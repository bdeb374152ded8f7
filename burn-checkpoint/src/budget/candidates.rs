//! The tensors that may be evicted, in parts: how long a search takes does not depend on how many there are.

use std::sync::{Arc, Weak};

use crate::node::{AnyEntry, Facts, Origin};

/// All are looked through at the latest when there are so many: what a tensor took itself, beside its storage, is freed only then.
const LEAST: usize = 256;

/// So many tensors are looked at as a whole.
const WHOLE: usize = 4096;

/// Of more, parts of about so many.
const PART: usize = 256;

/// Resident tensors that can come back. Some are no longer, or gone: that is found out when they are looked at.
pub(super) struct Candidates {
    /// A power of two of them. Tensors with one storage are in one part; all parts are alike.
    parts: Vec<Vec<Candidate>>,
    /// The part to be looked at next.
    next: usize,
    count: usize,
    /// How many there may be before all are looked through.
    tidy_at: usize,
}

struct Candidate {
    storage: u64,
    node: Weak<dyn AnyEntry>,
}

impl Default for Candidates {
    fn default() -> Self {
        Self {
            parts: vec![Vec::new()],
            next: 0,
            count: 0,
            tidy_at: LEAST,
        }
    }
}

impl Candidates {
    /// Adds a tensor with the storage of this number.
    pub fn add(&mut self, storage: u64, node: Weak<dyn AnyEntry>) {
        let part = part(storage, self.parts.len());
        self.parts[part].push(Candidate { storage, node });
        self.count += 1;
        if self.count > self.tidy_at {
            self.tidy();
        }
    }

    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// The tensors of the next part; forgets those that cannot be evicted any more.
    pub fn next_part(&mut self) -> Vec<(Facts, Arc<dyn AnyEntry>)> {
        let part = &mut self.parts[self.next];
        let mut found = Vec::with_capacity(part.len());
        let before = part.len();
        part.retain(|candidate| {
            let node = candidate.node();
            let is_left = node.is_some();
            found.extend(node);
            is_left
        });
        self.count -= before - part.len();
        self.next = (self.next + 1) % self.parts.len();
        found
    }

    /// Forgets what cannot be evicted any more, and adapts the number of parts.
    fn tidy(&mut self) {
        for part in &mut self.parts {
            part.retain(|candidate| candidate.node().is_some());
        }
        self.count = self.parts.iter().map(Vec::len).sum();
        self.tidy_at = LEAST.max(2 * self.count);
        let parts = match self.count {
            0..=WHOLE => 1,
            count => (count / PART).next_power_of_two(),
        };
        self.next = 0;
        if parts == self.parts.len() {
            return;
        }
        let fresh = (0..parts).map(|_| Vec::new()).collect();
        let before = std::mem::replace(&mut self.parts, fresh);
        for candidate in before.into_iter().flatten() {
            self.parts[part(candidate.storage, parts)].push(candidate);
        }
    }
}

impl Candidate {
    /// The tensor, if it may be evicted now or later.
    #[inline]
    fn node(&self) -> Option<(Facts, Arc<dyn AnyEntry>)> {
        let node = self.node.upgrade()?;
        let facts = node.facts();
        if facts.resident && matches!(facts.origin, Origin::Recorded | Origin::Hosted) {
            Some((facts, node))
        } else {
            node.unlist();
            None
        }
    }
}

/// The part of a storage. Numbers are mixed: every n-th operation of a model is alike.
fn part(storage: u64, parts: usize) -> usize {
    let mixed = storage.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32; // Fibonacci hashing
    mixed as usize & (parts - 1)
}
