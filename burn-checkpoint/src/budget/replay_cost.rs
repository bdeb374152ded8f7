//! What it costs to bring tensors back, including the evicted inputs that have to come back first.
//!
//! The costs of the first `FEW` evicted operations are added up. The others are estimated by their longest chain of evicted inputs, which
//! every evicted node remembers, so that the time does not grow with the number of evicted tensors.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::entry::AnyEntry;

/// The costs of so many evicted operations are added up.
const FEW: usize = 32;

/// Nanoseconds to bring these tensors back; if that is more than `enough_ns`, any number above `enough_ns`. `evicted` is a
/// buffer, empty before and after.
pub(super) fn cost_ns(
    nodes: &[Arc<dyn AnyEntry>],
    enough_ns: f64,
    evicted: &mut Vec<Arc<dyn AnyEntry>>,
) -> f64 {
    static SEARCHES: AtomicU64 = AtomicU64::new(0);
    let search = SEARCHES.fetch_add(1, Ordering::Relaxed) + 1;
    let mut cost_ns = 0.0;
    let mut next = 0;
    while next < nodes.len() + evicted.len().min(FEW) && cost_ns <= enough_ns {
        let node = match nodes.get(next) {
            Some(node) => node.clone(),
            None => evicted[next - nodes.len()].clone(),
        };
        cost_ns += f64::from(node.cost_ns());
        node.sources(&mut |source, own| {
            if source.is_new_to(search) {
                evicted.push(own());
            }
        });
        next += 1;
    }
    if cost_ns <= enough_ns {
        cost_ns += evicted.iter().skip(FEW).map(chain_ns).fold(0.0, f64::max);
    }
    evicted.clear();
    cost_ns
}

/// Nanoseconds of the longest chain of evicted inputs that ends with this evicted node.
fn chain_ns(node: &Arc<dyn AnyEntry>) -> f64 {
    if let Some(ns) = node.chain_ns() {
        return f64::from(ns);
    }
    let mut stack = vec![node.clone()];
    while let Some(node) = stack.last().cloned() {
        if node.chain_ns().is_some() {
            stack.pop();
            continue;
        }
        let mut longest_ns = 0.0f32;
        let before = stack.len();
        node.sources(&mut |source, own| match source.chain_ns() {
            Some(ns) => longest_ns = longest_ns.max(ns),
            None => stack.push(own()),
        });
        if stack.len() == before {
            node.remember_chain(node.cost_ns() + longest_ns);
            stack.pop();
        }
    }
    f64::from(node.chain_ns().unwrap_or(0.0))
}
