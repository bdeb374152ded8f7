//! A plan carried out with integers instead of tensors.

use super::{Node, Plan, PlanError, Profile};

/// What a training step with a plan takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Simulation {
    /// The most bytes live at any time, with [`Profile::base_bytes`].
    pub peak_bytes: u64,
    /// Time of the step, the tail's left out.
    pub time_ns: u64,
    /// Forward passes of blocks beyond one each, whole or in part.
    pub replayed: u64,
}

/// What a training step with `plan` takes, by the [model](super#what-a-plan-does).
///
/// # Cost
///
/// Time proportional to the number of blocks that the step runs, replays included; no tensor is made.
///
/// # Errors
///
/// [`PlanError::Length`] if the plan is for another number of blocks, [`PlanError::Overflow`] if the profile's sums
/// overflow.
pub fn simulate(profile: &Profile, plan: &Plan) -> Result<Simulation, PlanError> {
    plan.check(profile.len())?;
    profile.check()?;
    let parts = locate(plan.nodes(), &mut 0);
    let mut step = Step {
        profile,
        gradients_before: profile.gradients_before_bytes(),
        peak_bytes: profile.base_bytes,
        replay_ns: 0,
        replayed: 0,
    };
    let end = step.forward(&parts, profile.base_bytes);
    step.reach(end + profile.tail.peak_bytes);
    step.backward(&parts.iter().collect::<Vec<_>>(), profile.base_bytes);
    Ok(Simulation {
        peak_bytes: step.peak_bytes,
        time_ns: profile.plain_ns() + step.replay_ns,
        replayed: step.replayed,
    })
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

fn locate(nodes: &[Node], next: &mut usize) -> Vec<Part> {
    let mut parts = Vec::new();
    for node in nodes {
        match node {
            Node::Block => {
                parts.push(Part::Block(*next));
                *next += 1;
            }
            Node::Scope(inner) => {
                let first = *next;
                let inner = locate(inner, next);
                if !inner.is_empty() {
                    let last = *next - 1;
                    parts.push(Part::Scope { first, last, inner });
                }
            }
        }
    }
    parts
}

struct Step<'a> {
    profile: &'a Profile,
    gradients_before: Vec<u64>,
    peak_bytes: u64,
    replay_ns: u64,
    replayed: u64,
}

impl Step<'_> {
    fn reach(&mut self, live_bytes: u64) {
        self.peak_bytes = self.peak_bytes.max(live_bytes);
    }

    /// The first forward pass of `parts` on top of `live_bytes`; returns what is live at its end.
    fn forward(&mut self, parts: &[Part], mut live_bytes: u64) -> u64 {
        for part in parts {
            match part {
                Part::Block(block) => {
                    self.reach(live_bytes + self.profile.blocks[*block].forward_peak_bytes());
                }
                Part::Scope { inner, .. } => {
                    self.forward(inner, live_bytes);
                }
            }
            live_bytes += self.left_bytes(part);
        }
        live_bytes
    }

    /// What stays when a part's forward pass is over.
    fn left_bytes(&self, part: &Part) -> u64 {
        match part {
            Part::Block(block) => self.profile.blocks[*block].tape_bytes(),
            Part::Scope { first, last, .. } => {
                self.profile.blocks[*last].output_bytes + self.kept_bytes(*first, *last)
            }
        }
    }

    fn kept_bytes(&self, first: usize, last: usize) -> u64 {
        let blocks = &self.profile.blocks[first..=last];
        blocks.iter().map(|block| block.kept_bytes).sum()
    }

    /// The backward pass of `parts`, whose forward pass began with `before_bytes` live.
    fn backward(&mut self, parts: &[&Part], before_bytes: u64) {
        let mut ends = vec![before_bytes];
        for part in parts {
            ends.push(ends[ends.len() - 1] + self.left_bytes(part));
        }
        for (part, before_bytes) in parts.iter().zip(ends).rev() {
            match part {
                Part::Block(block) => self.reach(
                    before_bytes
                        + self.gradients_before[*block]
                        + self.profile.blocks[*block].backward_peak_bytes(),
                ),
                Part::Scope { first, last, inner } => {
                    let parts = open_last(inner);
                    let live_bytes = before_bytes + self.kept_bytes(*first, *last);
                    self.replay(&parts, live_bytes + self.gradient_bytes(*last));
                    self.backward(&parts, before_bytes);
                }
            }
        }
    }

    /// The gradients that are live before the backward pass of a block: the one of its output and those of the
    /// parameters of later blocks.
    fn gradient_bytes(&self, block: usize) -> u64 {
        self.profile.blocks[block].output_bytes + self.gradients_before[block]
    }

    /// Brings the parts of a scope back, on top of `live_bytes`, which include what the scope kept.
    fn replay(&mut self, parts: &[&Part], mut live_bytes: u64) {
        for (at, part) in parts.iter().enumerate() {
            match part {
                Part::Block(block) if at + 1 == parts.len() => {
                    self.run_again(*block, live_bytes, self.profile.blocks[*block].replay_ns);
                }
                Part::Block(block) => {
                    self.run_again(*block, live_bytes, self.profile.blocks[*block].forward_ns);
                }
                Part::Scope { first, last, .. } => self.pass_through(*first, *last, live_bytes),
            }
            live_bytes += match part {
                Part::Block(block) => {
                    self.left_bytes(part) - self.profile.blocks[*block].kept_bytes
                }
                Part::Scope { last, .. } => self.profile.blocks[*last].output_bytes,
            };
        }
    }

    /// Runs blocks for the output of the last one only.
    fn pass_through(&mut self, first: usize, last: usize, live_bytes: u64) {
        let mut input_bytes = 0;
        for block in first..=last {
            let profile = &self.profile.blocks[block];
            self.run_again(block, live_bytes + input_bytes, profile.forward_ns);
            input_bytes = profile.output_bytes;
        }
    }

    fn run_again(&mut self, block: usize, live_bytes: u64, time_ns: u64) {
        let profile = &self.profile.blocks[block];
        self.reach(live_bytes + profile.forward_peak_bytes() - profile.kept_bytes);
        self.replay_ns += time_ns;
        self.replayed += 1;
    }
}

/// The parts that a replay of a scope runs: a scope at its end is replaced by its own parts, which have to come back too.
fn open_last(inner: &[Part]) -> Vec<&Part> {
    let mut parts: Vec<&Part> = inner.iter().collect();
    while let Some(Part::Scope { inner, .. }) = parts.last() {
        parts.pop();
        parts.extend(inner);
    }
    parts
}
