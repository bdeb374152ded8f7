//! The optimal plan, by dynamic programming.

use super::front::{Front, NOTHING, Point, best, both};
use super::model::{Begin, Chain, Kind};
use super::{Node, Plan, PlanError, Profile};

/// The fastest plan for a step that never holds more than `limit_bytes`.
///
/// Dynamic programming over the intervals of the chain, as rotor does (Beaumont et al., "Optimal checkpointing for
/// heterogeneous chains", RR-9302, section 4; for blocks that are all alike it is Griewank and Walther's revolve). An
/// interval begins with a block that stays on the tape, or with a scope around some blocks; the rest is an interval
/// again, and so is the inside of the scope. Where rotor rounds bytes up to slots, here every interval keeps the
/// undominated pairs of exact bytes and times, so nothing is lost to rounding, and the plan that needs the least bytes
/// is always found. In long chains of blocks that all differ an interval may have very many such pairs; it then keeps an
/// even choice of them, and the plan may be a little slower than the fastest.
///
/// Among equally fast plans it returns one with the least peak. The same profile and limit always give the same plan.
///
/// Cost: O(n³) combinations of two intervals for `n` blocks, each linear in the number of their pairs, which is bounded;
/// O(n²) pairs of memory.
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
        let table = Table::new(&chain, within_bytes, Pairs::Balanced);
        let point = best(table.whole().points(), within_bytes)?;
        Some(Plan::new(table.nodes(0, chain.tail(), point.need_bytes)))
    });
    fastest.ok_or_else(|| PlanError::DoesNotFit {
        blocks: profile.blocks.len(),
        limit_bytes,
        least_bytes: least_bytes(profile, &chain),
    })
}

fn least_bytes(profile: &Profile, chain: &Chain) -> u64 {
    let table = Table::new(chain, u64::MAX, Pairs::Least);
    let least = table.whole().points().first();
    profile.base_bytes + least.expect("without a limit everything fits").need_bytes
}

/// How many pairs an interval keeps.
#[derive(Clone, Copy)]
enum Pairs {
    /// The one with the least bytes.
    Least,
    /// So many that the work on all intervals of one length is about the same. Those at the chain's end are few and a
    /// plan goes through very many of them, so they keep more.
    Balanced,
}

impl Pairs {
    fn kept(self, blocks: usize, length: usize, at_end: bool) -> usize {
        const WORK: usize = 16_000_000;
        let combinations = match (self, at_end) {
            (Self::Least, _) => return 1,
            (Self::Balanced, true) => blocks * blocks / 2,
            (Self::Balanced, false) => blocks * (blocks - length) * (length + 1),
        };
        (WORK / combinations.max(1)).clamp(8, 4096)
    }
}

/// The front of every interval of the chain. Bytes are those above the ones that are live before it.
struct Table<'a> {
    chain: &'a Chain,
    fronts: Vec<Front>,
}

impl<'a> Table<'a> {
    fn new(chain: &'a Chain, within_bytes: u64, pairs: Pairs) -> Self {
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
                front.thin(pairs.kept(blocks, length, last == chain.tail()));
                table.fronts[first * blocks + last] = front;
            }
        }
        table
    }

    fn front(&self, first: usize, last: usize) -> &Front {
        &self.fronts[first * self.chain.blocks.len() + last]
    }

    fn whole(&self) -> &Front {
        self.front(0, self.chain.tail())
    }

    /// The ways to process the inside of the scope that an interval begins with, if it does.
    fn inner(&self, begin: &Begin, first: usize) -> &[Point] {
        match begin.kind {
            Kind::Plain => NOTHING,
            Kind::Scope => self.front(first, first + begin.length - 1).points(),
        }
    }

    /// The ways to process the blocks `first..=last`, from a forward pass over them, the last one being brought back
    /// rather than run, to their backward passes.
    fn interval(&self, first: usize, last: usize, most_bytes: u64) -> Front {
        let mut front = Front::default();
        let fits = |point: &Point| point.need_bytes <= most_bytes;
        if first == last {
            front.extend(Some(self.chain.single(last)).into_iter().filter(fits));
            return front;
        }
        for begin in self.chain.begins(first, last) {
            let rest = self.front(begin.length + first, last);
            let complete = |point: Point| Point {
                need_bytes: point.need_bytes.max(begin.floor_bytes),
                time_ns: point.time_ns + begin.forward_ns,
            };
            if begin.floor_bytes <= most_bytes {
                let inner = self.inner(&begin, first);
                let ways = both(inner, rest.points(), begin.retained_bytes);
                front.extend(ways.map(complete).take_while(fits));
            }
        }
        front
    }

    /// The fastest schedule of an interval within `bytes`; at least one has to fit.
    fn nodes(&self, mut first: usize, last: usize, mut bytes: u64) -> Vec<Node> {
        let mut nodes = Vec::new();
        while first < last {
            let time = |begin: &Begin| Some((self.time_ns(begin, first, last, bytes)?, *begin));
            let begins = self
                .chain
                .begins(first, last)
                .filter_map(|begin| time(&begin));
            let (_, begin) = begins
                .min_by_key(|(time_ns, _)| *time_ns)
                .expect("the interval has a schedule within the bytes");
            nodes.push(match begin.kind {
                Kind::Plain => Node::Block,
                Kind::Scope => Node::Scope(self.nodes(first, first + begin.length - 1, bytes)),
            });
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
        let rest = best(self.front(first + begin.length, last).points(), rest_bytes)?;
        Some(begin.forward_ns + inner.time_ns + rest.time_ns)
    }
}
