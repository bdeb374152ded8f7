//! What the parts of a schedule take: the model that the planner and
//! [`simulate`](super::simulate()) share.

use super::front::Point;
use super::{BlockProfile, Profile};

/// The profile as recursions over its intervals read it: the tail is one more block, which no scope
/// can be around because it is the last one.
pub(super) struct Chain {
    pub blocks: Vec<Block>,
}

pub(super) struct Block {
    /// Its profile, in which the tape is no less than its parts, and the peaks are no less than the
    /// tape.
    profile: BlockProfile,
    /// The kept bytes of all blocks before.
    kept_before_bytes: u64,
    /// The gradients of the parameters of later blocks, which are live before its backward pass.
    later_gradients_bytes: u64,
}

impl Chain {
    pub fn new(profile: &Profile) -> Self {
        let tail = BlockProfile {
            forward_peak_bytes: profile.tail.peak_bytes,
            gradient_bytes: profile.tail.gradient_bytes,
            ..BlockProfile::default()
        };
        let blocks = profile.blocks.iter().chain([&tail]);
        let mut later_gradients_bytes: u64 = blocks.clone().map(|block| block.gradient_bytes).sum();
        let mut before_bytes = 0;
        let block = |block: &BlockProfile| {
            let kept_before_bytes = before_bytes;
            before_bytes += block.kept_bytes;
            later_gradients_bytes -= block.gradient_bytes;
            let tape_bytes = block.tape_bytes.max(block.output_bytes + block.kept_bytes);
            let profile = BlockProfile {
                tape_bytes,
                forward_peak_bytes: block.forward_peak_bytes.max(tape_bytes),
                backward_peak_bytes: block.backward_peak_bytes.max(tape_bytes),
                ..*block
            };
            Block {
                profile,
                kept_before_bytes,
                later_gradients_bytes,
            }
        };
        let blocks = blocks.map(block).collect();
        Self { blocks }
    }

    pub fn tail(&self) -> usize {
        self.blocks.len() - 1
    }

    /// What stays of the blocks before `first` under any schedule.
    pub fn least_retained_bytes(&self, first: usize) -> u64 {
        let input = first.checked_sub(1).map(|before| &self.blocks[before]);
        input.map_or(0, |block| block.profile.output_bytes) + self.blocks[first].kept_before_bytes
    }

    /// What is live besides the blocks' own when the blocks `first..=last` begin to run forward. In
    /// a replay of a scope that is the gradients and what the scope kept; if the last block is the
    /// tail, nothing: the step begins.
    fn live_bytes(&self, first: usize, last: usize) -> u64 {
        if last == self.tail() {
            return 0;
        }
        let block = &self.blocks[last];
        let gradient_bytes = block.profile.output_bytes + block.later_gradients_bytes;
        gradient_bytes + self.kept_bytes(first, last)
    }

    fn kept_bytes(&self, first: usize, last: usize) -> u64 {
        self.blocks[last + 1].kept_before_bytes - self.blocks[first].kept_before_bytes
    }

    /// The most bytes of a block's forward pass, on top of `live_bytes`.
    fn running_bytes(&self, block: usize, last: usize) -> u64 {
        let block = &self.blocks[block].profile;
        match last == self.tail() {
            true => block.forward_peak_bytes,
            false => block.forward_peak_bytes - block.kept_bytes,
        }
    }

    /// The least bytes for the first of the blocks `first..=last` that runs forward, and then
    /// backward.
    fn passes_bytes(&self, first: usize, last: usize) -> u64 {
        let forward_bytes = self.live_bytes(first, last) + self.running_bytes(first, last);
        let block = &self.blocks[first];
        forward_bytes.max(block.profile.backward_peak_bytes + block.later_gradients_bytes)
    }

    /// The only way to process one block: bring it back, run it backward.
    pub fn single(&self, block: usize) -> Point {
        Point {
            need_bytes: self.passes_bytes(block, block),
            time_ns: self.blocks[block].profile.replay_ns,
        }
    }

    /// How a schedule of the blocks `first..=last` may begin, if they are several: with one plain
    /// block, or with a scope around one block, two and so on.
    pub fn begins(&self, first: usize, last: usize) -> impl Iterator<Item = Begin> {
        let live_bytes = self.live_bytes(first, last);
        let block = &self.blocks[first].profile;
        let plain = Begin {
            scope: None,
            length: 1,
            retained_bytes: block.tape_bytes,
            floor_bytes: self.passes_bytes(first, last),
            forward_ns: block.forward_ns,
        };
        let (mut input_bytes, mut floor_bytes, mut forward_ns) = (0, 0_u64, 0);
        // A scope one block longer: when it is passed through, only one block's input and own bytes
        // are live at a time.
        let longer = move |end: usize| {
            let block = &self.blocks[end].profile;
            floor_bytes = floor_bytes.max(live_bytes + input_bytes + self.running_bytes(end, last));
            input_bytes = block.output_bytes;
            forward_ns += block.forward_ns;
            Begin {
                scope: Some(end),
                length: end + 1 - first,
                retained_bytes: block.output_bytes + self.kept_bytes(first, end),
                floor_bytes,
                forward_ns,
            }
        };
        std::iter::once(plain).chain((first..last).map(longer))
    }
}

/// How a schedule of an interval begins.
#[derive(Clone, Copy)]
pub(super) struct Begin {
    /// The last block of the scope, whose inside is an interval of its own; `None` for one block,
    /// which stays on the tape.
    pub scope: Option<usize>,
    /// Number of blocks.
    pub length: usize,
    /// What of them stays until their own backward pass.
    pub retained_bytes: u64,
    /// The least bytes for any schedule of the rest and of the inside of the scope.
    pub floor_bytes: u64,
    /// Time to run them forward once.
    pub forward_ns: u64,
}
