//! A decorator from the same table that calls a function after every operation.

use std::cell::RefCell;
use std::marker::PhantomData;

use burn_backend::{Backend, BackendTypes, DType, DTypeUsageSet};
use burn_decorator::kind_type;
use burn_decorator::types::*;

/// A backend that calls the function of [`after_each`] after every operation of the thread.
#[derive(Clone, Copy, Debug, Default)]
pub struct After<B>(PhantomData<B>);

type Then = Box<dyn FnMut(&'static str)>;

thread_local! {
    static THEN: RefCell<Option<Then>> = const { RefCell::new(None) };
}

/// Calls `then` with its name after every operation of the task, on this thread.
pub fn after_each<R>(then: impl FnMut(&'static str) + 'static, task: impl FnOnce() -> R) -> R {
    THEN.set(Some(Box::new(then)));
    let done = task();
    THEN.set(None);
    done
}

fn done(op: &'static str) {
    THEN.with_borrow_mut(|then| then.iter_mut().for_each(|then| then(op)));
}

impl<B: Backend> BackendTypes for After<B> {
    burn_decorator::forward_types!(B, float tensor: B::FloatTensorPrimitive);
}

impl<B: Backend> Backend for After<B> {
    burn_decorator::forward_device!(B);

    fn name(device: &Self::Device) -> String {
        format!("after<{}>", B::name(device))
    }

    fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet {
        B::dtype_usage(device, dtype)
    }
}

macro_rules! implement {
    ($trait:ident $($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<B: Backend> $trait<Self> for After<B> {
            $(fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
                let result = retype!($ret B, Self, B::$op($(retype!($kind Self, B, $arg)),*));
                done(stringify!($op));
                result
            })*
        }
    };
}

burn_decorator::every_ops!(implement);
