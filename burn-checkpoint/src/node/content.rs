//! The tensor of a node, and how it comes back.

use std::mem;
use std::sync::Arc;

use burn_backend::Backend;

use crate::host::host_copy::HostCopy;
use crate::node::entry::Origin;
use crate::node::kind::Value;
use crate::node::recipe::Recipe;
use crate::scope::region::Region;
use crate::scope::units::Unit;

/// The part of a node that changes.
pub(crate) struct State<B: Backend> {
    pub content: Content<B>,
    /// Replays under way that need the storage.
    pub locks: u32,
    pub home: Home,
    /// Whether a scope inside of its own has used it: the inner scope is replayed from it, so a
    /// replay keeps it even without users.
    pub feeds_inner_scope: bool,
}

/// What a tensor belongs to.
#[derive(Clone)]
pub(crate) enum Home {
    /// Nothing.
    None,
    /// The scope that evicts it: replays for tensors of other scopes do not keep it resident.
    Scope {
        region: Arc<Region>,
        /// In the scope of a unit: the number of the operation that made it, as
        /// [`HandedOver`](crate::scope::units) numbers them.
        operation: u32,
    },
    /// As a parameter, a unit of a model whose units have scopes.
    Unit(Arc<Unit>),
}

impl Home {
    /// Of the result of an operation with this number in its scope, if it is in one.
    #[inline]
    pub fn of_result(region: Option<Arc<Region>>, operation: u32) -> Self {
        region.map_or(Self::None, |region| Self::Scope { region, operation })
    }

    /// Of a parameter, if its model's units have scopes.
    pub fn of_parameter(unit: Option<Arc<Unit>>) -> Self {
        unit.map_or(Self::None, Self::Unit)
    }

    /// The scope.
    #[inline]
    pub fn region(&self) -> Option<&Arc<Region>> {
        match self {
            Self::Scope { region, .. } => Some(region),
            Self::None | Self::Unit(_) => None,
        }
    }

    /// The unit of a parameter.
    pub fn unit(&self) -> Option<&Arc<Unit>> {
        match self {
            Self::Unit(unit) => Some(unit),
            Self::None | Self::Scope { .. } => None,
        }
    }

    /// The number of the operation that made it among those of its unit; 0 if there is none.
    pub fn operation(&self) -> u32 {
        match self {
            Self::Scope { operation, .. } => *operation,
            Self::None | Self::Unit(_) => 0,
        }
    }
}

/// The tensor of a node, and how it comes back. Recipes and copies are dropped outside of the
/// node's lock, for their inputs may be dropped with them.
pub(crate) enum Content<B: Backend> {
    /// It cannot come back: it stays as long as the node.
    Kept(Value<B>),
    /// It comes back by its recipe.
    Recorded(Recorded<B>),
    /// It comes back from host memory.
    Hosted {
        /// `None` while it is in host memory alone.
        value: Option<Value<B>>,
        /// Kept beside a resident value that a budget may evict again. Boxed, for it is larger than
        /// a tensor.
        copy: Box<HostCopy<B>>,
    },
    /// It comes back by its recipe for each use, and is there during uses only.
    Delivered {
        value: Option<Value<B>>,
        recipe: Arc<dyn Recipe<B>>,
    },
    /// It is gone for good: its last user took it, or only its views refer to the node.
    Gone,
}

/// A tensor that comes back by its recipe.
pub(crate) struct Recorded<B: Backend> {
    /// `None` while it is evicted.
    pub value: Option<Value<B>>,
    pub recipe: Arc<dyn Recipe<B>>,
    /// Of a resident view in a scope that may offload: the storage of the tensor that it is a view
    /// of, which may have been dropped with that tensor's last handle.
    pub viewed: Option<Box<Value<B>>>,
    /// The next load is the last one of a replay and may take the value itself.
    pub hand_over: bool,
}

impl<B: Backend> State<B> {
    #[inline]
    pub fn new(content: Content<B>, home: Home) -> Self {
        Self {
            content,
            locks: 0,
            home,
            feeds_inner_scope: false,
        }
    }
}

impl<B: Backend> Content<B> {
    /// A tensor with its recipe.
    #[inline]
    pub fn recorded(value: Option<Value<B>>, recipe: Arc<dyn Recipe<B>>) -> Self {
        Self::Recorded(Recorded {
            value,
            recipe,
            viewed: None,
            hand_over: false,
        })
    }

    /// The value, if it is resident.
    #[inline]
    pub fn value(&self) -> Option<&Value<B>> {
        match self {
            Self::Kept(value) => Some(value),
            Self::Recorded(recorded) => recorded.value.as_ref(),
            Self::Hosted { value, .. } | Self::Delivered { value, .. } => value.as_ref(),
            Self::Gone => None,
        }
    }

    #[inline]
    pub fn is_resident(&self) -> bool {
        self.value().is_some()
    }

    /// Whether it occupies device memory: resident, or uploaded before its use.
    pub fn occupies_device(&self) -> bool {
        match self {
            Self::Hosted { value: None, copy } => copy.ahead.is_some(),
            _ => self.is_resident(),
        }
    }

    /// Whether it is in host memory alone.
    #[inline]
    pub fn is_on_host(&self) -> bool {
        matches!(self, Self::Hosted { value: None, .. })
    }

    /// Whether it is not resident and comes back by a recipe.
    #[inline]
    pub fn is_evicted(&self) -> bool {
        match self {
            Self::Recorded(recorded) => recorded.value.is_none(),
            Self::Delivered { value, .. } => value.is_none(),
            Self::Kept(_) | Self::Hosted { .. } | Self::Gone => false,
        }
    }

    /// Whether an eviction makes sense: the storage can come back, and does not exist during its
    /// uses only.
    #[inline]
    pub fn comes_back(&self) -> bool {
        matches!(self, Self::Recorded(_) | Self::Hosted { .. })
    }

    #[inline]
    pub fn is_recorded(&self) -> bool {
        matches!(self, Self::Recorded(_))
    }

    /// Whether it never comes back.
    #[inline]
    pub fn is_kept(&self) -> bool {
        matches!(self, Self::Kept(_) | Self::Gone)
    }

    /// How it comes back.
    pub fn origin(&self) -> Origin {
        match self {
            Self::Kept(_) | Self::Gone => Origin::Kept,
            Self::Recorded(_) => Origin::Recorded,
            Self::Hosted { .. } => Origin::Hosted,
            Self::Delivered { .. } => Origin::Delivered,
        }
    }

    pub fn recipe(&self) -> Option<&Arc<dyn Recipe<B>>> {
        match self {
            Self::Recorded(Recorded { recipe, .. }) | Self::Delivered { recipe, .. } => {
                Some(recipe)
            }
            Self::Kept(_) | Self::Hosted { .. } | Self::Gone => None,
        }
    }

    /// Takes the value, if it is resident.
    #[inline]
    pub fn take(&mut self) -> Option<Value<B>> {
        match self {
            Self::Kept(_) => match mem::replace(self, Self::Gone) {
                Self::Kept(value) => Some(value),
                _ => None,
            },
            Self::Recorded(recorded) => {
                let value = recorded.value.take()?;
                recorded.viewed = None;
                recorded.hand_over = false;
                Some(value)
            }
            Self::Hosted { value, .. } | Self::Delivered { value, .. } => value.take(),
            Self::Gone => None,
        }
    }

    /// Stores the value that a recipe computed.
    pub fn came_back(&mut self, computed: Value<B>) {
        match self {
            Self::Recorded(Recorded { value, .. }) | Self::Delivered { value, .. } => {
                *value = Some(computed);
            }
            Self::Kept(_) | Self::Hosted { .. } | Self::Gone => {
                unreachable!("only what has a recipe is replayed")
            }
        }
    }

    /// Of a resident tensor that can come back: it stays from now on. Returns what it needed to
    /// come back, to be dropped; `None` if nothing changes.
    pub fn keep(&mut self) -> Option<Self> {
        let value = match self {
            Self::Recorded(Recorded { value, .. }) | Self::Hosted { value, .. } => value.take()?,
            Self::Kept(_) | Self::Delivered { .. } | Self::Gone => return None,
        };
        Some(mem::replace(self, Self::Kept(value)))
    }

    /// Starts a copy of a resident tensor to the host, unless there is one, and takes the value.
    /// Returns it with what is no longer needed; `None` if it is not resident or cannot move.
    pub fn move_to_host(&mut self) -> Option<Moved<B>> {
        let value = match self {
            Self::Kept(value)
            | Self::Recorded(Recorded {
                value: Some(value), ..
            }) => value,
            Self::Hosted { value, .. } => {
                let value = value.take()?;
                return Some(Moved {
                    value,
                    recipe: None,
                });
            }
            Self::Recorded(_) | Self::Delivered { .. } | Self::Gone => return None,
        };
        let copy = Box::new(HostCopy::start(value)?);
        match mem::replace(self, Self::Hosted { value: None, copy }) {
            Self::Recorded(Recorded {
                value: Some(value),
                recipe,
                ..
            }) => Some(Moved {
                value,
                recipe: Some(recipe),
            }),
            Self::Kept(value) => Some(Moved {
                value,
                recipe: None,
            }),
            _ => None,
        }
    }
}

/// What a tensor leaves behind that moved to host memory.
pub(crate) struct Moved<B: Backend> {
    pub value: Value<B>,
    pub recipe: Option<Arc<dyn Recipe<B>>>,
}
