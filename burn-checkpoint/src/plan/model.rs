//! What the parts of a schedule take: the model that the planner and [`simulate`](super::simulate()) share.

use super::Profile;
use super::front::Point;

/// The profile as recursions over its intervals read it: the tail is one more block, which no scope can be around because it is the
/// last one.
pub(super) struct Chain {
    pub blocks: Vec<Block>,
}

#[derive(Clone, Copy, Default)]
pub(super) struct Block {
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
    pub fn new(profile: &Profile) -> Self {
        let mut blocks = vec![Block {
            forward_peak_bytes: profile.tail.peak_bytes,
            ..Block::default()
        }];
        let mut later_gradients_bytes = profile.tail.gradient_bytes;
        for block in profile.blocks.iter().rev() {
            let tape_bytes = block.tape_bytes.max(block.output_bytes + block.kept_bytes);
            blocks.push(Block {
                output_bytes: block.output_bytes,
                tape_bytes,
                kept_bytes: block.kept_bytes,
                kept_so_far_bytes: 0,
                forward_peak_bytes: block.forward_peak_bytes.max(tape_bytes),
                backward_need_bytes: block.backward_peak_bytes.max(tape_bytes)
                    + later_gradients_bytes,
                gradient_bytes: block.output_bytes + later_gradients_bytes,
                forward_ns: block.forward_ns,
                replay_ns: block.replay_ns,
            });
            later_gradients_bytes += block.gradient_bytes;
        }
        blocks.reverse();
        let mut kept_so_far_bytes = 0;
        for block in &mut blocks {
            kept_so_far_bytes += block.kept_bytes;
            block.kept_so_far_bytes = kept_so_far_bytes;
        }
        Self { blocks }
    }

    pub fn tail(&self) -> usize {
        self.blocks.len() - 1
    }

    /// What stays of the blocks before `first` under any schedule.
    pub fn least_retained_bytes(&self, first: usize) -> u64 {
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
    pub fn single(&self, block: usize) -> Point {
        let forward_bytes = self.live_bytes(block, block) + self.running_bytes(block, block);
        Point {
            need_bytes: forward_bytes.max(self.blocks[block].backward_need_bytes),
            time_ns: self.blocks[block].replay_ns,
        }
    }

    /// How a schedule of the blocks `first..=last` may begin, if they are several: with one plain block, or with a scope around one block, two
    /// and so on.
    pub fn begins(&self, first: usize, last: usize) -> impl Iterator<Item = Begin> {
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
pub(super) struct Begin {
    pub kind: Kind,
    /// Number of blocks.
    pub length: usize,
    /// What of them stays until their own backward pass.
    pub retained_bytes: u64,
    /// The least bytes for any schedule of the rest and of the inside of the scope.
    pub floor_bytes: u64,
    /// Time to run them forward once.
    pub forward_ns: u64,
}

#[derive(Clone, Copy)]
pub(super) enum Kind {
    /// One block, which stays on the tape.
    Plain,
    /// A scope, whose inside is scheduled as an interval of its own.
    Scope,
}
