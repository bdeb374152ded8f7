//! What it costs to bring tensors back, including the evicted inputs that have to come back first.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::entry::AnyEntry;

/// The costs of so many evicted operations are added up, so that the time does not grow with the number of evicted tensors. With 64
/// `ctc_loss` under 37 % of its bytes evicts every state of its chain, and replays half of its operations twice.
const FEW: usize = 1024;

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
    evicted.clear();
    cost_ns
}
