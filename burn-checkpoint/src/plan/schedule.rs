//! The optimal plan, by dynamic programming.

use std::ops::RangeInclusive;

use super::front::{Front, NOTHING, Point, best, both, merge, thin};
use super::model::{Begin, Chain};
use super::{Node, Plan, PlanError, Profile};

/// The fastest plan for a step that never holds more than `limit_bytes`.
///
/// Dynamic programming over the intervals of the chain, as rotor does (Beaumont et al., "Optimal
/// checkpointing for heterogeneous chains", RR-9302, section 4; for blocks that are all alike it is
/// Griewank and Walther's revolve). An interval begins with a block that stays on the tape, or with
/// a scope around some blocks; the rest is an interval again, and so is the inside of the scope.
/// Where rotor rounds bytes up to slots, here every interval keeps the undominated pairs of exact
/// bytes and times, so nothing is lost to rounding, and the plan that needs the least bytes is
/// always found. In long chains of blocks that all differ an interval may have very many such
/// pairs; it then keeps an even choice of them, and the plan may be a little slower than the
/// fastest.
///
/// Among equally fast plans it returns one with the least peak. The same profile and limit always
/// give the same plan.
///
/// Cost: O(n³) combinations of two intervals for `n` blocks, each linear in the number of their
/// pairs, which is bounded; O(n²) pairs of memory.
///
/// ```
/// use burn_checkpoint::plan::{BlockProfile, Plan, Profile, plan, simulate};
///
/// let block = BlockProfile {
///     output_bytes: 1 << 20,
///     tape_bytes: 8 << 20,
///     backward_peak_bytes: 9 << 20,
///     forward_ns: 3_000,
///     replay_ns: 3_000,
///     backward_ns: 6_000,
///     ..BlockProfile::default()
/// };
/// let profile = Profile { blocks: vec![block; 24], ..Profile::default() };
///
/// let plain = simulate(&profile, &Plan::plain(24))?;
/// let fits = plan(&profile, plain.peak_bytes / 2)?;
/// let half = simulate(&profile, &fits)?;
/// assert!(half.peak_bytes <= plain.peak_bytes / 2);
/// assert!(half.time_ns < simulate(&profile, &Plan::every_block(24))?.time_ns);
/// # Ok::<(), burn_checkpoint::plan::PlanError>(())
/// ```
///
/// # Errors
///
/// [`PlanError::DoesNotFit`], with the least bytes that would do.
pub fn plan(profile: &Profile, limit_bytes: u64) -> Result<Plan, PlanError> {
    let chain = Chain::new(profile);
    let within_bytes = limit_bytes.checked_sub(profile.base_bytes);
    let fastest = within_bytes.and_then(|within_bytes| {
        let table = Table::new(&chain, within_bytes, 8..=4096);
        let point = best(table.front(0, chain.tail()), within_bytes)?;
        Some(Plan::new(table.nodes(0, chain.tail(), point.need_bytes)))
    });
    fastest.ok_or_else(|| {
        // The first pair of an interval is the one with the least bytes.
        let table = Table::new(&chain, u64::MAX, 1..=1);
        let least = table.front(0, chain.tail())[0];
        PlanError::DoesNotFit {
            blocks: profile.blocks.len(),
            limit_bytes,
            least_bytes: profile.base_bytes + least.need_bytes,
        }
    })
}

/// How many pairs an interval keeps: so many that the work on all intervals of one length is about
/// the same. Those at the chain's end are few and a plan goes through very many of them, so they
/// keep more.
fn balanced(blocks: usize, length: usize, at_end: bool) -> usize {
    const WORK: usize = 16_000_000;
    let combinations = match at_end {
        true => blocks * blocks / 2,
        false => blocks * (blocks - length) * (length + 1),
    };
    WORK / combinations.max(1)
}

/// The front of every interval of the chain. Bytes are those above the ones that are live before
/// it.
struct Table<'a> {
    chain: &'a Chain,
    fronts: Vec<Front>,
}

impl<'a> Table<'a> {
    /// Of each interval so many pairs.
    fn new(chain: &'a Chain, within_bytes: u64, pairs: RangeInclusive<usize>) -> Self {
        let blocks = chain.blocks.len();
        let mut table = Self {
            chain,
            fronts: vec![Front::default(); blocks * blocks],
        };
        for length in 0..blocks {
            for first in 0..blocks - length {
                let retained_bytes = chain.least_retained_bytes(first);
                let Some(most_bytes) = within_bytes.checked_sub(retained_bytes) else {
                    continue;
                };
                let last = first + length;
                let mut front = table.interval(first, last, most_bytes);
                let kept = balanced(blocks, length, last == chain.tail());
                thin(&mut front, kept.clamp(*pairs.start(), *pairs.end()));
                table.fronts[first * blocks + last] = front;
            }
        }
        table
    }

    fn front(&self, first: usize, last: usize) -> &[Point] {
        &self.fronts[first * self.chain.blocks.len() + last]
    }

    /// The ways to process the inside of the scope that an interval begins with, if it does.
    fn inner(&self, begin: &Begin, first: usize) -> &[Point] {
        begin.scope.map_or(NOTHING, |end| self.front(first, end))
    }

    /// The ways to process the blocks `first..=last`, from a forward pass over them, the last one
    /// being brought back rather than run, to their backward passes.
    fn interval(&self, first: usize, last: usize, most_bytes: u64) -> Front {
        let fits = |point: &Point| point.need_bytes <= most_bytes;
        if first == last {
            return Front::from_iter(Some(self.chain.single(last)).filter(fits));
        }
        let mut front = Front::default();
        for begin in self.chain.begins(first, last) {
            let rest = self.front(begin.length + first, last);
            let complete = |point: Point| Point {
                need_bytes: point.need_bytes.max(begin.floor_bytes),
                time_ns: point.time_ns + begin.forward_ns,
            };
            if begin.floor_bytes <= most_bytes {
                let inner = self.inner(&begin, first);
                let ways = both(inner, rest, begin.retained_bytes);
                merge(&mut front, ways.map(complete).take_while(fits));
            }
        }
        front
    }

    /// The fastest schedule of an interval within `bytes`; at least one has to fit.
    fn nodes(&self, mut first: usize, last: usize, mut bytes: u64) -> Vec<Node> {
        let mut nodes = Vec::new();
        while first < last {
            let timed = |begin| Some((self.time_ns(&begin, first, last, bytes)?, begin));
            let begins = self.chain.begins(first, last).filter_map(timed);
            let (_, begin) = begins
                .min_by_key(|(time_ns, _)| *time_ns)
                .expect("the interval has a schedule within the bytes");
            let scope = |end| Node::Scope(self.nodes(first, end, bytes));
            nodes.push(begin.scope.map_or(Node::Block, scope));
            first += begin.length;
            bytes -= begin.retained_bytes;
        }
        if last < self.chain.tail() {
            nodes.push(Node::Block);
        }
        nodes
    }

    /// The least time for an interval that begins so, within `bytes`.
    fn time_ns(&self, begin: &Begin, first: usize, last: usize, bytes: u64) -> Option<u64> {
        if begin.floor_bytes > bytes {
            return None;
        }
        let inner = best(self.inner(begin, first), bytes)?;
        let rest_bytes = bytes.checked_sub(begin.retained_bytes)?;
        let rest = best(self.front(first + begin.length, last), rest_bytes)?;
        Some(begin.forward_ns + inner.time_ns + rest.time_ns)
    }
}
