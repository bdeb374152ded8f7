//! The optimal plan, by dynamic programming.

use super::front::{Front, NOTHING, Point, best, both};
use super::{BlockProfile, Node, Plan, PlanError, Profile};

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
/// let block = BlockProfile::new(1 << 20, 8 << 20, 3_000, 6_000);
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
/// [`PlanError::DoesNotFit`], with the least bytes that would do; [`PlanError::Overflow`] if the profile's sums
/// overflow.
pub fn plan(profile: &Profile, limit_bytes: u64) -> Result<Plan, PlanError> {
    profile.check()?;
    let chain = Chain::new(profile);
    let within_bytes = limit_bytes.checked_sub(profile.base_bytes);
    let fastest = within_bytes.and_then(|within_bytes| {
        let table = Table::new(&chain, within_bytes, Pairs::Balanced);
        let point = best(table.whole().points(), within_bytes)?;
        Some(Plan::new(table.nodes(0, chain.tail(), point.need_bytes)))
    });
    fastest.ok_or_else(|| PlanError::DoesNotFit {
        blocks: profile.len(),
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
        const WORK_AT_END: usize = 16_000_000;
        const WORK_INSIDE: usize = 16_000_000;
        let most = match (self, at_end) {
            (Self::Least, _) => return 1,
            (_, true) => WORK_AT_END / (blocks * blocks / 2).max(1),
            (_, false) => WORK_INSIDE / (blocks * (blocks - length) * (length + 1)).max(1),
        };
        most.clamp(8, 4096)
    }
}

/// The profile as the recursion reads it: the tail is one more block, which no scope can be around because it is the
/// last one.
struct Chain {
    blocks: Vec<Block>,
}

#[derive(Clone, Copy, Default)]
struct Block {
    output_bytes: u64,
    tape_bytes: u64,
    kept_bytes: u64,
    /// The kept bytes of this block and all blocks before.
    kept_so_far_bytes: u64,
    forward_peak_bytes: u64,
    /// The peak of the backward pass, with the parameter gradients that are live before it.
    backward_need_bytes: u64,
    /// The gradient of the output, and those of the parameters of later blocks.
    gradient_bytes: u64,
    forward_ns: u64,
    replay_ns: u64,
}

impl Chain {
    fn new(profile: &Profile) -> Self {
        let gradients_before = profile.gradients_before_bytes();
        let mut kept_so_far_bytes = 0;
        let of = |(block, before): (&BlockProfile, &u64)| {
            kept_so_far_bytes += block.kept_bytes;
            Block {
                output_bytes: block.output_bytes,
                tape_bytes: block.tape_bytes(),
                kept_bytes: block.kept_bytes,
                kept_so_far_bytes,
                forward_peak_bytes: block.forward_peak_bytes(),
                backward_need_bytes: block.backward_peak_bytes() + before,
                gradient_bytes: block.output_bytes + before,
                forward_ns: block.forward_ns,
                replay_ns: block.replay_ns,
            }
        };
        let blocks = profile.blocks.iter().zip(&gradients_before);
        let mut blocks: Vec<_> = blocks.map(of).collect();
        blocks.push(Block {
            kept_so_far_bytes,
            forward_peak_bytes: profile.tail.peak_bytes,
            ..Block::default()
        });
        Self { blocks }
    }

    fn tail(&self) -> usize {
        self.blocks.len() - 1
    }

    /// What stays of the blocks before `first` under any schedule.
    fn least_retained_bytes(&self, first: usize) -> u64 {
        match first.checked_sub(1).map(|before| &self.blocks[before]) {
            None => 0,
            Some(before) => before.output_bytes + before.kept_so_far_bytes,
        }
    }

    /// What is live besides the blocks' own when the blocks `first..=last` begin to run forward. In a replay of a scope
    /// that is the gradients and what the scope kept; if the last block is the tail, nothing: the step begins.
    fn live_bytes(&self, first: usize, last: usize) -> u64 {
        match last == self.tail() {
            true => 0,
            false => self.blocks[last].gradient_bytes + self.kept_bytes(first, last),
        }
    }

    fn kept_bytes(&self, first: usize, last: usize) -> u64 {
        let until = |block: &Block| block.kept_so_far_bytes - block.kept_bytes;
        self.blocks[last].kept_so_far_bytes - until(&self.blocks[first])
    }

    /// The most bytes of a block's forward pass, on top of `live_bytes`.
    fn running_bytes(&self, block: usize, last: usize) -> u64 {
        let block = &self.blocks[block];
        match last == self.tail() {
            true => block.forward_peak_bytes,
            false => block.forward_peak_bytes - block.kept_bytes,
        }
    }

    /// The only way to process one block: bring it back, run it backward.
    fn single(&self, block: usize) -> Point {
        let forward_bytes = self.live_bytes(block, block) + self.running_bytes(block, block);
        Point {
            need_bytes: forward_bytes.max(self.blocks[block].backward_need_bytes),
            time_ns: self.blocks[block].replay_ns,
        }
    }

    /// How a schedule of the blocks `first..=last` may begin, if they are several.
    fn begins(&self, first: usize, last: usize) -> impl Iterator<Item = Begin> {
        let live_bytes = self.live_bytes(first, last);
        let block = &self.blocks[first];
        let forward_bytes = live_bytes + self.running_bytes(first, last);
        let plain = Begin {
            kind: Kind::Plain,
            length: 1,
            retained_bytes: block.tape_bytes,
            floor_bytes: block.backward_need_bytes.max(forward_bytes),
            forward_ns: block.forward_ns,
        };
        let mut scope = Begin {
            kind: Kind::Scope,
            length: 0,
            retained_bytes: 0,
            floor_bytes: 0,
            forward_ns: 0,
        };
        let mut input_bytes = 0;
        // A scope one block longer: when it is passed through, only one block's input and own bytes are live at a time.
        let longer = move |end: usize| {
            let block = &self.blocks[end];
            let passing_bytes = live_bytes + input_bytes + self.running_bytes(end, last);
            input_bytes = block.output_bytes;
            scope.length += 1;
            scope.floor_bytes = scope.floor_bytes.max(passing_bytes);
            scope.retained_bytes = block.output_bytes + self.kept_bytes(first, end);
            scope.forward_ns += block.forward_ns;
            scope
        };
        std::iter::once(plain).chain((first..last).map(longer))
    }
}

/// How a schedule of an interval begins.
#[derive(Clone, Copy)]
struct Begin {
    kind: Kind,
    /// Number of blocks.
    length: usize,
    /// What of them stays until their own backward pass.
    retained_bytes: u64,
    /// The least bytes for any schedule of the rest and of the inside of the scope.
    floor_bytes: u64,
    /// Time to run them forward once.
    forward_ns: u64,
}

#[derive(Clone, Copy)]
enum Kind {
    /// One block, which stays on the tape.
    Plain,
    /// A scope, whose inside is scheduled as an interval of its own.
    Scope,
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
