//! What can go wrong, with the values.

use std::error::Error;
use std::sync::Arc;

use burn_decorator::non_finite::name_some;
use burn_ranks::RanksError;
use thiserror::Error as ThisError;

/// Errors of an update.
///
/// [`Update::step`](crate::Update::step) and the methods that build an update return them. In
/// Burn's `Learner` a step cannot return an error, so it panics with the error's message.
#[derive(Clone, Debug, ThisError)]
#[non_exhaustive]
pub enum UpdateError {
    /// An error of a part: [`cause`](Self::cause) is what its crate says.
    #[error("{source}")]
    Part {
        /// The part's name.
        part: String,
        /// Its error.
        source: Arc<dyn Error + Send + Sync>,
    },
    /// The group of ranks is lost, cannot start, or its ranks disagree.
    #[error(transparent)]
    Ranks(#[from] RanksError),
    /// A Learner, or data, that an [`UpdateStrategy`](crate::UpdateStrategy) cannot train: why, and
    /// what to do instead.
    #[error("{0}")]
    Strategy(String),
    /// Two parts with one name, under which a record could keep only one.
    #[error("the update has a part `{name}` already: a part's name is its place in the record")]
    SameName {
        /// The name.
        name: String,
    },
    /// A part that was added before a reduction over ranks and belongs after it, or the other way
    /// round.
    #[error("the part `{part}` is at the wrong side of the reduction over ranks: {instead}")]
    Order {
        /// The part's name.
        part: String,
        /// What to do.
        instead: String,
    },
    /// A step of an update over ranks with a model that was not prepared.
    #[error(
        "the update reduces gradients over ranks, and has no model yet: call `let model = update.prepare(model)?` before the \
         first forward pass, so that all ranks start from the same weights; in a Learner the strategy does it: pass \
         `update.strategy().threads(n).into()` or `update.strategy().process(group).into()` to `with_training_strategy`"
    )]
    NotPrepared,
    /// An optimizer that is itself a scaler, an accumulation or a reduction over ranks: an update
    /// has parts for these, in their order.
    #[error(
        "`Update::new` with {optimizer}, which {what} by itself: give `Update::new` the optimizer inside of it, and the update \
         the part, such as `.scale(..)` or `.accumulate(..)`"
    )]
    WrapperInside {
        /// The type of the optimizer.
        optimizer: String,
        /// What it does.
        what: &'static str,
    },
    /// Gradients of a loss sum over counted items, and no part that divides by the items.
    #[error(
        "the gradients are of a loss sum over counted items (`Counted`), and the update has no part that divides by them: add \
         `.accumulate(AccumConfig::tokens(1))`, or differentiate the mean without `Counted`"
    )]
    ItemsWithoutAccumulation,
    /// A number that cannot work.
    #[error("{name} = {value}, but it must be {expected}")]
    InvalidValue {
        /// Which number.
        name: &'static str,
        /// Its value.
        value: f64,
        /// What it must be.
        expected: &'static str,
    },

    /// A group of parameters whose paths match none.
    #[error(
        "parameter group `{group}`: {paths} matches no parameter of the model, which has {}",
        name_some(.parameters)
    )]
    NoParameter {
        /// The group.
        group: String,
        /// What the group matches.
        paths: String,
        /// The paths of the model's parameters.
        parameters: Vec<String>,
    },
    /// A parameter that two groups match.
    #[error(
        "parameter `{parameter}` is in the groups `{first}` and `{second}`: a parameter is updated by one of them; make the \
         paths of one narrower"
    )]
    TwoGroups {
        /// The parameter's path.
        parameter: String,
        /// A group that matches it.
        first: String,
        /// Another one.
        second: String,
    },
    /// A step with a model that has other parameters than the one before.
    #[error(
        "parameter `{parameter}` was not in the model of the first step: an update belongs to one model; make another update \
         for another model"
    )]
    OtherModel {
        /// The parameter's path.
        parameter: String,
    },

    /// An average that is asked for before the first step, or without the part.
    #[error(
        "there is no average of the weights: {}",
        if *.has_part { "no update has been made yet" } else { "the update was built without `.average(..)`" }
    )]
    NoAverage {
        /// Whether the update has the part.
        has_part: bool,
    },
    /// A parameter that the average does not have, or in another shape.
    #[error(
        "the average of the weights has no `{parameter}` of shape {shape:?}: it was made of another model"
    )]
    NotAveraged {
        /// The parameter's path.
        parameter: String,
        /// Its shape.
        shape: Vec<usize>,
    },

    /// A record without the state of a part that the update has.
    #[error(
        "the record has no `{part}`, which this update has: it was saved without it; load it into an update with the parts {has:?}, \
         or add what is missing with `UpdateRecord::with_new`, which starts that part anew"
    )]
    RecordLacks {
        /// The part's name.
        part: String,
        /// The parts that the record has.
        has: Vec<String>,
    },
    /// A record with the state of a part that the update does not have.
    #[error(
        "the record has `{part}`, and this update has no such part: add it, or leave it out with `UpdateRecord::without`"
    )]
    RecordHas {
        /// The part's name.
        part: String,
    },
    /// A part's state without one of its values.
    #[error("the record's `{part}` has no `{value}` of the kind that this version saves")]
    ValueMissing {
        /// The part's name.
        part: String,
        /// The value's name.
        value: String,
    },
    /// A part's state that cannot be read, such as that of another kind of optimizer.
    #[error("the record's `{part}` cannot be loaded: {reason}")]
    Unreadable {
        /// The part's name.
        part: String,
        /// What the reader said.
        reason: String,
    },
}

impl UpdateError {
    /// An error of a part.
    pub fn of_part(part: impl Into<String>, error: impl Error + Send + Sync + 'static) -> Self {
        Self::Part {
            part: part.into(),
            source: Arc::new(error),
        }
    }

    /// The error of a part, if it is an `E`: burn-amp's `AmpError`, burn-accum's `AccumError`, or
    /// that of a part of one's own.
    pub fn cause<E: Error + 'static>(&self) -> Option<&E> {
        match self {
            Self::Part { source, .. } => source.downcast_ref(),
            _ => None,
        }
    }
}

/// Panics with the error: Burn's traits allow no other failure.
pub(crate) fn raise<T>(result: Result<T, UpdateError>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}
