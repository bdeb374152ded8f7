//! Messages to optimizers inside other optimizers.
//!
//! A `Learner` does not expose its optimizer, nor do decorators. A message takes the path of the
//! gradients: the sender calls `step` of the outermost optimizer without gradients, inside
//! [`send`]. A decorator first checks for a message in its `step`. If there is one for its kind, it
//! handles it; otherwise it calls `step` of the optimizer that it wraps, without counting, checking
//! or scaling anything. An optimizer without support for messages gets a step without gradients,
//! which changes nothing.
//!
//! ```
//! use burn_decorator::message::{self, Message};
//!
//! struct Window { open: u32, updates: u32 }
//!
//! impl Window {
//!     fn step(&mut self) {
//!         if message::received() == Some(Message::Flush) {
//!             self.updates += u32::from(self.open > 0);
//!             self.open = 0;
//!         } else if message::received().is_none() {
//!             self.open += 1;
//!         } // else: `self.inner.step(..)`
//!     }
//! }
//!
//! let mut window = Window { open: 0, updates: 0 };
//! window.step();
//! message::send(Message::Flush, || window.step());
//! assert_eq!((window.open, window.updates), (0, 1));
//! ```

use crate::carried::{carry, hide, with};

/// The request of a step without gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// A gradient accumulation applies its open window with its true weights. It does so in
    /// [`answer`], so that the update is an ordinary step of the wrapped optimizer.
    Flush,
    /// Each decorator [`report`]s its properties to the decorators around it: see [`describe`].
    Describe,
}

/// The decorators inside an optimizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inside {
    /// A loss scaler, which checks the gradients of each step.
    pub loss_scaler: bool,
    /// An accumulation, which steps once in a window of micro-batches.
    pub accumulation: bool,
    /// An optimizer that reduces gradients over ranks, and waits for the device in each step.
    pub ranks: bool,
}

/// Runs `step`, which is a call of an optimizer's `step` without gradients, as `message`.
pub fn send<R>(message: Message, step: impl FnOnce() -> R) -> R {
    carry(message, step).0
}

/// The message that this call of `step` carries; `None` if it is an ordinary step.
pub fn received() -> Option<Message> {
    with(|message: &mut Message| *message)
}

/// Runs `act`, the handling of a message. Calls of `step` in it are ordinary steps.
pub fn answer<R>(act: impl FnOnce() -> R) -> R {
    hide::<Message, _>(act)
}

/// Runs `step`, which is a call of an optimizer's `step` without gradients, and returns which
/// decorators that optimizer contains.
pub fn describe<R>(step: impl FnOnce() -> R) -> (R, Inside) {
    let (result, inside) = carry(Inside::default(), || send(Message::Describe, step));
    (result, inside.unwrap_or_default())
}

/// Answers [`Message::Describe`], if this step carries it: `tell` sets the caller's field.
pub fn report(tell: impl FnOnce(&mut Inside)) {
    if received() == Some(Message::Describe) {
        with(tell);
    }
}

/// The name of a type for a message: without the paths of modules, and without parameters below the
/// third level.
///
/// ```
/// use burn_decorator::message::short_name;
///
/// assert_eq!(short_name::<Option<Vec<(u8, Option<String>)>>>(), "Option<Vec<(u8, Option<..>)>>");
/// ```
pub fn short_name<T: ?Sized>() -> String {
    const LEVELS: i32 = 2;
    let (mut short, mut word, mut level) = (String::new(), 0, 0);
    for symbol in core::any::type_name::<T>().chars() {
        level += i32::from(symbol == '<');
        if level <= LEVELS {
            if symbol == ':' {
                short.truncate(word);
                continue;
            }
            short.push(symbol);
            if !symbol.is_alphanumeric() && symbol != '_' {
                word = short.len();
            }
        } else if symbol == '<' && level == LEVELS + 1 {
            short.push_str("<..>");
            word = short.len();
        }
        level -= i32::from(symbol == '>');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_there_until_its_step_ends_but_not_in_the_answer() {
        assert_eq!(received(), None);
        send(Message::Flush, || {
            answer(|| assert_eq!(received(), None));
            assert_eq!(received(), Some(Message::Flush));
        });
        let result = std::panic::catch_unwind(|| send(Message::Flush, || panic!("in the step")));
        assert!(result.is_err());
        assert_eq!(received(), None);
    }

    #[test]
    fn what_is_inside_is_told_to_the_innermost_who_asks() {
        let ((), all) = describe(|| {
            report(|inside| inside.ranks = true);
            let ((), innermost) = describe(|| report(|inside| inside.loss_scaler = true));
            assert!(innermost.loss_scaler && !innermost.ranks);
        });
        assert!(all.ranks && !all.loss_scaler);
        report(|_| unreachable!("this is no message"));
    }
}
