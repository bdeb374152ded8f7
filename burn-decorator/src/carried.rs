//! Values that a call carries to code inside of it: arguments for which Burn's traits have no
//! parameter.
//!
//! A decorator of a backend or of an optimizer sees only what Burn's traits pass on. Where two of
//! them must know something of each other, whoever calls [`carry`]s a value of a type that both
//! know, and whoever is reached inside of the call reads it ([`with`]), changes it, or [`take`]s it:
//!
//! - a value for the decorator inside, such as the weight of a loss for a backend;
//! - a question, whose answer is written into the value, such as which tape a tensor is on.
//!
//! It ends with the call, also by a panic, and is on the caller's thread only. The type is the
//! name: a type of its own for each purpose.
//!
//! ```
//! use burn_decorator::carried::{carry, with};
//!
//! struct Depth(usize);
//! fn decorator() {
//!     with(|depth: &mut Depth| depth.0 += 1);
//! }
//!
//! let ((), depth) = carry(Depth(0), || { decorator(); decorator() });
//! assert_eq!(depth.map(|depth| depth.0), Some(2));
//! decorator(); // nobody asks
//! ```

use core::any::{Any, TypeId};
use core::cell::{Cell, RefCell};
use core::marker::PhantomData;

thread_local! {
    /// How many calls carry a value: whoever asks on a path that every operation takes need not
    /// look further where there is none.
    static CALLS: Cell<usize> = const { Cell::new(0) };
    /// The innermost last.
    static SLOTS: RefCell<Vec<Slot>> = const { RefCell::new(Vec::new()) };
}

/// The place of a carried value.
struct Slot {
    /// The value's type.
    of: TypeId,
    /// An `Option` of it; `None` once it is taken.
    value: Box<dyn Any>,
}

impl Slot {
    fn new<V: 'static>(value: Option<V>) -> Self {
        Self {
            of: TypeId::of::<V>(),
            value: Box::new(value),
        }
    }

    /// The value, if it is of this type.
    fn value<V: 'static>(&mut self) -> Option<&mut Option<V>> {
        (self.of == TypeId::of::<V>())
            .then(|| self.value.downcast_mut())
            .flatten()
    }
}

/// Runs `call`, in which `value` is the innermost of its type, and returns what is left of it:
/// `None` if it was [taken](take).
pub fn carry<V: 'static, R>(value: V, call: impl FnOnce() -> R) -> (R, Option<V>) {
    let mut carried = Carried::begin(Some(value));
    let result = call();
    (result, carried.end())
}

/// Runs `call`, in which no value of this type is carried.
pub fn hide<V: 'static, R>(call: impl FnOnce() -> R) -> R {
    let _hidden = Carried::begin(None::<V>);
    call()
}

/// Reads or changes the innermost carried value of this type; `None` if there is none. In `act` it
/// counts as taken.
#[inline]
pub fn with<V: 'static, R>(act: impl FnOnce(&mut V) -> R) -> Option<R> {
    if CALLS.get() == 0 {
        return None;
    }
    let (index, value) = find::<V>()?;
    let mut lent = Lent {
        index,
        value: Some(value),
    };
    lent.value.as_mut().map(act)
}

/// Takes the innermost carried value of this type out of its call, if it is there.
#[inline]
pub fn take<V: 'static>() -> Option<V> {
    if CALLS.get() == 0 {
        return None;
    }
    find::<V>().map(|(_, value)| value)
}

/// Whether a value of this type is carried.
#[inline]
pub fn is_carried<V: 'static>() -> bool {
    CALLS.get() > 0 && with(|_: &mut V| ()).is_some()
}

/// Takes the innermost value of this type, and says where it was.
fn find<V: 'static>() -> Option<(usize, V)> {
    SLOTS.with_borrow_mut(|slots| {
        let mut innermost_first = slots.iter_mut().enumerate().rev();
        let (index, value) =
            innermost_first.find_map(|(index, slot)| Some((index, slot.value::<V>()?)))?;
        Some((index, value.take()?))
    })
}

/// A value that is read or changed. It goes back to its place, also after a panic.
struct Lent<V: 'static> {
    index: usize,
    value: Option<V>,
}

impl<V: 'static> Drop for Lent<V> {
    fn drop(&mut self) {
        SLOTS.with_borrow_mut(|slots| {
            if let Some(place) = slots[self.index].value() {
                *place = self.value.take();
            }
        });
    }
}

/// A value on its way, until it is dropped.
struct Carried<V: 'static> {
    index: usize,
    value: PhantomData<V>,
}

impl<V: 'static> Carried<V> {
    fn begin(value: Option<V>) -> Self {
        CALLS.set(CALLS.get() + 1);
        let index = SLOTS.with_borrow_mut(|slots| {
            slots.push(Slot::new(value));
            slots.len() - 1
        });
        Self {
            index,
            value: PhantomData,
        }
    }

    /// What is left of it.
    fn end(&mut self) -> Option<V> {
        SLOTS.with_borrow_mut(|slots| slots[self.index].value::<V>()?.take())
    }
}

impl<V: 'static> Drop for Carried<V> {
    fn drop(&mut self) {
        CALLS.set(CALLS.get() - 1);
        // Dropped outside of the borrow: a value may carry others when it is dropped.
        let slot = SLOTS.with_borrow_mut(Vec::pop);
        drop(slot);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    #[derive(Debug, PartialEq)]
    struct Number(u32);
    struct Other;

    fn number() -> Option<u32> {
        with(|number: &mut Number| number.0)
    }

    #[test]
    fn the_innermost_of_its_type_is_read_changed_and_taken_once() {
        let (inner, outer) = carry(Number(1), || {
            carry(Other, || {
                let (seen, inner) = carry(Number(2), || {
                    with(|number: &mut Number| number.0 += 1);
                    number()
                });
                assert_eq!((seen, number()), (Some(3), Some(1)));
                inner
            })
            .0
        });
        assert_eq!((inner, outer), (Some(Number(3)), Some(Number(1))));

        let ((), left) = carry(Number(1), || {
            assert_eq!(take::<Number>(), Some(Number(1)));
            assert_eq!((take::<Number>(), number()), (None, None));
        });
        assert_eq!((left, number()), (None, None));
    }

    #[test]
    fn one_that_is_hidden_or_read_is_not_there_for_others() {
        carry(Number(1), || {
            hide::<Number, _>(|| assert!(!is_carried::<Number>()));
            with(|_: &mut Number| assert!(!is_carried::<Number>()));
            // What is carried while another is read comes and goes above it.
            with(|_: &mut Number| carry(Number(2), || assert_eq!(number(), Some(2))));
            assert_eq!(number(), Some(1));
        });
    }

    #[test]
    fn a_panic_ends_what_it_leaves_and_loses_nothing_else() {
        let result = catch_unwind(|| carry(Number(1), || panic!("in the call")));
        assert!(result.is_err() && !is_carried::<Number>());
        carry(Number(1), || {
            let result = catch_unwind(|| with(|_: &mut Number| panic!("while it is read")));
            assert!(result.is_err() && is_carried::<Number>());
        });
    }
}
