//! A plan: scopes in scopes.

use serde::{Deserialize, Serialize};

use super::PlanError;

/// Which consecutive blocks of a chain run in a `checkpoint` scope together, and which scopes are
/// in which.
///
/// By serde a plan is the list of its blocks' numbers, in which a list is a scope:
///
/// ```
/// use burn_checkpoint::plan::Plan;
///
/// let plan: Plan = serde_json::from_str("[0, 1, 2, [3, 4], [5, [6], 7], 8]")?;
/// assert_eq!(plan.blocks(), 9);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "Vec<Item>", into = "Vec<Item>")]
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
    pub fn blocks(&self) -> usize {
        match self {
            Self::Block => 1,
            Self::Scope(nodes) => nodes.iter().map(Self::blocks).sum(),
        }
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
        Self::segments(blocks, blocks.max(1))
    }

    /// Scopes around so many segments of nearly equal length (Chen et al., arXiv 1604.06174,
    /// section 4.1, for `segments` the square root of `blocks`). Segments of no blocks are left
    /// out.
    ///
    /// # Panics
    ///
    /// If `segments` is 0.
    pub fn segments(blocks: usize, segments: usize) -> Self {
        assert_ne!(segments, 0, "blocks in no segments");
        let before = |segment| segment * blocks / segments;
        let lengths = (0..segments).map(|segment| before(segment + 1) - before(segment));
        let scope = |length| Node::Scope(vec![Node::Block; length]);
        Self::new(lengths.filter(|length| *length > 0).map(scope).collect())
    }

    /// The parts.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.nodes.iter().map(Node::blocks).sum()
    }

    /// Checks that the plan is for a chain of so many blocks.
    pub(crate) fn check(&self, blocks: usize) -> Result<(), PlanError> {
        match self.blocks() {
            planned if planned == blocks => Ok(()),
            planned => Err(PlanError::Length { planned, blocks }),
        }
    }
}

/// A part of a plan as serde writes it.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Item {
    Block(usize),
    Scope(Vec<Item>),
}

impl From<Plan> for Vec<Item> {
    fn from(plan: Plan) -> Self {
        fn items(nodes: Vec<Node>, next: &mut usize) -> Vec<Item> {
            let item = |node| match node {
                Node::Block => {
                    *next += 1;
                    Item::Block(*next - 1)
                }
                Node::Scope(inner) => Item::Scope(items(inner, next)),
            };
            nodes.into_iter().map(item).collect()
        }
        items(plan.nodes, &mut 0)
    }
}

impl TryFrom<Vec<Item>> for Plan {
    type Error = PlanError;

    fn try_from(items: Vec<Item>) -> Result<Self, PlanError> {
        fn nodes(items: Vec<Item>, next: &mut usize) -> Result<Vec<Node>, PlanError> {
            let node = |item| match (item, *next) {
                (Item::Scope(inner), _) => nodes(inner, next).map(Node::Scope),
                (Item::Block(found), expected) if found == expected => {
                    *next += 1;
                    Ok(Node::Block)
                }
                (Item::Block(found), expected) => Err(PlanError::Order { expected, found }),
            };
            items.into_iter().map(node).collect()
        }
        nodes(items, &mut 0).map(Self::new)
    }
}
