//! A plan: scopes in scopes.

use super::PlanError;

/// Which consecutive blocks of a chain run in a `checkpoint` scope together, and which scopes are in which.
///
/// As text, `{}` and serde alike, blocks are numbers and scopes brackets: `0-2 [3 4] [5 [6] 7] 8`. `{:#}` draws it:
///
/// ```
/// use burn_checkpoint::plan::Plan;
///
/// let plan: Plan = "0-2 [3 4] [5 [6] 7] 8".parse()?;
/// assert_eq!(format!("{plan:#}"), "\
/// 0 1 2 3 4 5 6 7 8
///       ├─┤ ├───┤
///             ┴");
/// # Ok::<(), burn_checkpoint::plan::PlanError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Plan {
    nodes: Vec<Node>,
}

/// A part of a [`Plan`], in the order of the forward pass.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Node {
    /// The next block, without a scope of its own.
    Block,
    /// A scope around what is in it.
    Scope(Vec<Node>),
}

impl Node {
    /// Number of blocks.
    pub fn len(&self) -> usize {
        match self {
            Self::Block => 1,
            Self::Scope(nodes) => nodes.iter().map(Self::len).sum(),
        }
    }

    /// Whether it is a scope, or scopes, around nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Plan {
    /// The plan with these parts.
    pub fn new(nodes: Vec<Node>) -> Self {
        Self { nodes }
    }

    /// No scope at all: everything stays on the tape.
    pub fn plain(blocks: usize) -> Self {
        Self::new(vec![Node::Block; blocks])
    }

    /// A scope around every block.
    pub fn every_block(blocks: usize) -> Self {
        Self::segments(blocks, 1)
    }

    /// A scope around every `length` consecutive blocks, the last one maybe shorter (Chen et al., arXiv 1604.06174,
    /// section 4.1, for `length` the square root of `blocks`).
    ///
    /// # Panics
    ///
    /// If `length` is 0.
    pub fn segments(blocks: usize, length: usize) -> Self {
        assert_ne!(length, 0, "segments of no blocks");
        let begins = (0..blocks).step_by(length);
        Self::new(
            begins
                .map(|begin| Node::Scope(vec![Node::Block; length.min(blocks - begin)]))
                .collect(),
        )
    }

    /// The parts.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.nodes.iter().map(Node::len).sum()
    }

    /// Whether it is for no blocks.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many scopes are around the innermost block.
    pub fn depth(&self) -> usize {
        depth(&self.nodes)
    }

    /// That it is a plan for a chain of so many blocks.
    ///
    /// # Errors
    ///
    /// [`PlanError::Length`] if it is not.
    pub fn check(&self, blocks: usize) -> Result<(), PlanError> {
        match self.len() {
            planned if planned == blocks => Ok(()),
            planned => Err(PlanError::Length { planned, blocks }),
        }
    }
}

fn depth(nodes: &[Node]) -> usize {
    let of = |node: &Node| match node {
        Node::Block => 0,
        Node::Scope(inner) => 1 + depth(inner),
    };
    nodes.iter().map(of).max().unwrap_or(0)
}
