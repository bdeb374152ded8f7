//! A plan carried out with integers instead of tensors.

use super::model::Chain;
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
/// Time proportional to the number of blocks that the step runs, replays included; no tensor is
/// made.
///
/// # Errors
///
/// [`PlanError::Length`] if the plan is for another number of blocks.
pub fn simulate(profile: &Profile, plan: &Plan) -> Result<Simulation, PlanError> {
    plan.check(profile.blocks.len())?;
    let chain = Chain::new(profile);
    let mut step = Simulation {
        peak_bytes: 0,
        time_ns: profile.blocks.iter().map(|block| block.backward_ns).sum(),
        replayed: 0,
    };
    let nodes = plan.nodes().iter().chain([&Node::Block]).collect();
    step.run(&chain, nodes, 0, profile.base_bytes);
    // The first forward pass of each block, the tail's included, is no replay.
    step.replayed -= chain.blocks.len() as u64;
    Ok(step)
}

impl Simulation {
    /// Runs nodes, of which the first begins with block `first` and the last is a block, from a
    /// forward pass over them, the last one being brought back rather than run, to their backward
    /// passes. So many bytes are live before.
    fn run(&mut self, chain: &Chain, nodes: Vec<&Node>, mut first: usize, mut live_bytes: u64) {
        let blocks: usize = nodes.iter().map(|node| node.blocks()).sum();
        let last = first + blocks - 1;
        for node in &nodes[..nodes.len() - 1] {
            let mut begins = chain.begins(first, last);
            let begin = match (node, node.blocks()) {
                (_, 0) => continue,
                (Node::Block, _) => begins.next(),
                (Node::Scope(_), blocks) => begins.nth(blocks),
            };
            let begin = begin.expect("a block comes after it");
            if let Node::Scope(inner) = node {
                self.run(chain, open_last(inner), first, live_bytes);
            }
            let need_bytes = live_bytes + begin.floor_bytes;
            self.count(need_bytes, begin.forward_ns, begin.length);
            first += begin.length;
            live_bytes += begin.retained_bytes;
        }
        let end = chain.single(last);
        self.count(live_bytes + end.need_bytes, end.time_ns, 1);
    }

    fn count(&mut self, need_bytes: u64, forward_ns: u64, forwards: usize) {
        self.peak_bytes = self.peak_bytes.max(need_bytes);
        self.time_ns += forward_ns;
        self.replayed += forwards as u64;
    }
}

/// The nodes that a replay of a scope runs: a scope at its end is replaced by its own nodes, which
/// have to come back too.
fn open_last(inner: &[Node]) -> Vec<&Node> {
    let mut nodes: Vec<_> = inner.iter().collect();
    while let Some(Node::Scope(inner)) = nodes.last() {
        nodes.pop();
        nodes.extend(inner);
    }
    nodes
}
