//! A step with a plan, event by event: the definition of what `simulate` computes.

use burn_checkpoint::plan::{BlockProfile, Node, Plan, Profile, Simulation};

/// What the step takes.
pub fn of(profile: &Profile, plan: &Plan) -> Simulation {
    let mut gradients_before = vec![profile.tail.gradient_bytes; profile.blocks.len() + 1];
    for (block, profile) in profile.blocks.iter().enumerate().rev() {
        gradients_before[block] = gradients_before[block + 1] + profile.gradient_bytes;
    }
    let mut step = Step {
        profile,
        gradients_before,
        peak_bytes: profile.base_bytes,
        replay_ns: 0,
        replayed: 0,
    };
    let parts = locate(plan.nodes(), &mut 0);
    let end = step.forward(&parts, profile.base_bytes);
    step.reach(end + profile.tail.peak_bytes);
    step.backward(&parts.iter().collect::<Vec<_>>(), profile.base_bytes);
    Simulation {
        peak_bytes: step.peak_bytes,
        time_ns: plain_ns(profile) + step.replay_ns,
        replayed: step.replayed,
    }
}

/// A node with the numbers of its blocks.
enum Part {
    Block(usize),
    Scope {
        first: usize,
        last: usize,
        inner: Vec<Part>,
    },
}

/// Scopes around nothing are left out.
fn locate(nodes: &[Node], next: &mut usize) -> Vec<Part> {
    let part = |node: &Node| {
        let first = *next;
        match node {
            Node::Block => *next += 1,
            Node::Scope(inner) => {
                let inner = locate(inner, next);
                let last = next.checked_sub(1).filter(|last| *last >= first)?;
                return Some(Part::Scope { first, last, inner });
            }
        }
        Some(Part::Block(first))
    };
    nodes.iter().filter_map(part).collect()
}

struct Step<'a> {
    profile: &'a Profile,
    /// By block, the gradients of parameters that are live when its backward pass is over.
    gradients_before: Vec<u64>,
    peak_bytes: u64,
    replay_ns: u64,
    replayed: u64,
}

fn tape_bytes(block: &BlockProfile) -> u64 {
    block.tape_bytes.max(block.output_bytes + block.kept_bytes)
}

impl Step<'_> {
    fn reach(&mut self, live_bytes: u64) {
        self.peak_bytes = self.peak_bytes.max(live_bytes);
    }

    fn forward_peak_bytes(&self, block: usize) -> u64 {
        let block = &self.profile.blocks[block];
        block.forward_peak_bytes.max(tape_bytes(block))
    }

    fn kept_bytes(&self, first: usize, last: usize) -> u64 {
        let blocks = &self.profile.blocks[first..=last];
        blocks.iter().map(|block| block.kept_bytes).sum()
    }

    /// The first forward pass of `parts` on top of `live_bytes`; returns what is live at its end.
    fn forward(&mut self, parts: &[Part], mut live_bytes: u64) -> u64 {
        for part in parts {
            match part {
                Part::Block(block) => self.reach(live_bytes + self.forward_peak_bytes(*block)),
                Part::Scope { inner, .. } => drop(self.forward(inner, live_bytes)),
            }
            live_bytes += self.left_bytes(part);
        }
        live_bytes
    }

    /// What stays when a part's forward pass is over.
    fn left_bytes(&self, part: &Part) -> u64 {
        match part {
            Part::Block(block) => tape_bytes(&self.profile.blocks[*block]),
            Part::Scope { first, last, .. } => {
                self.profile.blocks[*last].output_bytes + self.kept_bytes(*first, *last)
            }
        }
    }

    /// The backward pass of `parts`, whose forward pass began with `before_bytes` live.
    fn backward(&mut self, parts: &[&Part], before_bytes: u64) {
        let mut ends = vec![before_bytes];
        for part in parts {
            ends.push(ends[ends.len() - 1] + self.left_bytes(part));
        }
        for (part, before_bytes) in parts.iter().zip(ends).rev() {
            match part {
                Part::Block(block) => {
                    let profile = &self.profile.blocks[*block];
                    let peak_bytes = profile.backward_peak_bytes.max(tape_bytes(profile));
                    self.reach(before_bytes + self.gradients_before[*block + 1] + peak_bytes);
                }
                Part::Scope { first, last, inner } => {
                    let parts = open_last(inner);
                    let gradient_bytes =
                        self.profile.blocks[*last].output_bytes + self.gradients_before[*last + 1];
                    let kept_bytes = self.kept_bytes(*first, *last);
                    self.replay(&parts, before_bytes + kept_bytes + gradient_bytes);
                    self.backward(&parts, before_bytes);
                }
            }
        }
    }

    /// Brings the parts of a scope back, on top of `live_bytes`, which include what the scope kept.
    fn replay(&mut self, parts: &[&Part], mut live_bytes: u64) {
        for (at, part) in parts.iter().enumerate() {
            match part {
                Part::Block(block) => {
                    let profile = &self.profile.blocks[*block];
                    let time_ns = match at + 1 == parts.len() {
                        true => profile.replay_ns,
                        false => profile.forward_ns,
                    };
                    self.run_again(*block, live_bytes, time_ns);
                    live_bytes += tape_bytes(profile) - profile.kept_bytes;
                }
                // Run for the output of its last block only.
                Part::Scope { first, last, .. } => {
                    let mut input_bytes = 0;
                    for block in *first..=*last {
                        let profile = &self.profile.blocks[block];
                        self.run_again(block, live_bytes + input_bytes, profile.forward_ns);
                        input_bytes = profile.output_bytes;
                    }
                    live_bytes += input_bytes;
                }
            }
        }
    }

    fn run_again(&mut self, block: usize, live_bytes: u64, time_ns: u64) {
        let kept_bytes = self.profile.blocks[block].kept_bytes;
        self.reach(live_bytes + self.forward_peak_bytes(block) - kept_bytes);
        self.replay_ns += time_ns;
        self.replayed += 1;
    }
}

/// The parts that a replay of a scope runs: a scope at its end is replaced by its own parts, which
/// have to come back too.
fn open_last(inner: &[Part]) -> Vec<&Part> {
    let mut parts: Vec<&Part> = inner.iter().collect();
    while let Some(Part::Scope { inner, .. }) = parts.last() {
        parts.pop();
        parts.extend(inner);
    }
    parts
}

/// Time of a step in which every block runs forward and backward once.
pub fn plain_ns(profile: &Profile) -> u64 {
    let time = |block: &BlockProfile| block.forward_ns + block.backward_ns;
    profile.blocks.iter().map(time).sum()
}
