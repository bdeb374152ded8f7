//! Every operation that is recorded, evicted between its run and its use, gives the same bits and
//! runs once more, not more often: generated from the rows.

mod classes;
mod make;
mod probe;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn_backend::{Backend, TensorData};
use burn_checkpoint::{
    Outputs, Policy, Remat, RematStats, Work, checkpoint, checkpoint_with, evict, op_table,
};
use burn_decorator::types::*;
use burn_flex::Flex;
use probe::{Probe, take_counts};

/// A result of any kind.
enum Held<B: Backend> {
    Float(FloatTensor<B>),
    Int(IntTensor<B>),
    Bool(BoolTensor<B>),
    Quant(QuantizedTensor<B>),
}

impl<B: Backend> Held<B> {
    fn read(self) -> TensorData {
        burn::tensor::read_sync(async {
            match self {
                Self::Float(x) => B::float_into_data(x).await,
                Self::Int(x) => B::int_into_data(x).await,
                Self::Bool(x) => B::bool_into_data(x).await,
                Self::Quant(x) => B::q_into_data(x).await,
            }
        })
        .expect("data")
    }
}

/// The results of an operation by kind.
macro_rules! hold {
    (Float $y:expr) => { vec![Held::Float($y)] };
    (Int $y:expr) => { vec![Held::Int($y)] };
    (Bool $y:expr) => { vec![Held::Bool($y)] };
    (Quant $y:expr) => { vec![Held::Quant($y)] };
    (FloatOpt $y:expr) => { $y.into_iter().map(Held::Float).collect::<Vec<_>>() };
    (Tensor $y:expr) => {
        match $y {
            TensorPrimitive::Float(y) => vec![Held::Float(y)],
            TensorPrimitive::QFloat(y) => vec![Held::Quant(y)],
        }
    };
    (($a:tt, $b:tt) $y:expr) => {{
        let (a, b) = $y;
        let mut held = hold!($a a);
        held.extend(hold!($b b));
        held
    }};
    ({$name:ident $($field:ident: $kind:tt),+} $y:expr) => {{
        let y = $y;
        let mut held = Vec::new();
        $(held.extend(hold!($kind y.$field));)+
        held
    }};
}

/// An operand by kind, named as in its row.
macro_rules! operand {
    (Float $op:ident $arg:ident) => {
        make::float::<B>(stringify!($op), stringify!($arg))
    };
    (Follow $op:ident $arg:ident) => {
        make::float::<B>(stringify!($op), stringify!($arg))
    };
    (FloatOpt $op:ident $arg:ident) => {
        Some(make::float::<B>(stringify!($op), stringify!($arg)))
    };
    (Floats $op:ident $arg:ident) => {
        vec![
            make::float::<B>(stringify!($op), "a"),
            make::float::<B>(stringify!($op), "b"),
        ]
    };
    (Int $op:ident $arg:ident) => {
        make::int::<B>(stringify!($op), stringify!($arg))
    };
    (Ints $op:ident $arg:ident) => {
        vec![
            make::int::<B>(stringify!($op), "a"),
            make::int::<B>(stringify!($op), "b"),
        ]
    };
    (Bool $op:ident $arg:ident) => {
        make::bool::<B>(stringify!($op), stringify!($arg))
    };
    (BoolOpt $op:ident $arg:ident) => {
        Some(make::bool::<B>(stringify!($op), stringify!($arg)))
    };
    (Bools $op:ident $arg:ident) => {
        vec![
            make::bool::<B>(stringify!($op), "a"),
            make::bool::<B>(stringify!($op), "b"),
        ]
    };
    (Quant $op:ident $arg:ident) => {
        make::quant::<B>(stringify!($op), stringify!($arg))
    };
    (Quants $op:ident $arg:ident) => {
        vec![
            make::quant::<B>(stringify!($op), "a"),
            make::quant::<B>(stringify!($op), "b"),
        ]
    };
    (Tensor $op:ident $arg:ident) => {
        TensorPrimitive::QFloat(make::quant::<B>(stringify!($op), stringify!($arg)))
    };
    (QuantParams $op:ident $arg:ident) => {
        QuantizationParametersPrimitive {
            scales: make::float::<B>(stringify!($op), "scales"),
        }
    };
    (Fill $op:ident $arg:ident) => {
        Scalar::Float(0.25)
    };
    (DeviceRef $op:ident $arg:ident) => {
        &Default::default()
    };
    ([&QuantScheme] $op:ident $arg:ident) => {
        &make::scheme()
    };
    ([$plain:ty] $op:ident $arg:ident) => {
        <$plain as make::Plain>::make(stringify!($op), stringify!($arg))
    };
    ({$element:ty} $op:ident $arg:ident) => {
        &<$element as make::Element>::make(stringify!($op), stringify!($arg))
    };
}

type Cases<B> = BTreeMap<&'static str, fn() -> Vec<Held<B>>>;

macro_rules! case {
    (pass $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt, $cases:ident) => {};
    (fixed $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt, $cases:ident) => {};
    ($work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt, $cases:ident) => {
        $cases.insert(stringify!($op), || hold!($ret B::$op($(operand!($kind $op $arg)),*)));
    };
}

macro_rules! cases {
    ($name:ident $($cast:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        #[allow(non_snake_case, reason = "named as the trait")]
        fn $name<B: Backend>(cases: &mut Cases<B>) {
            $(case!($work $op($($arg: $kind),*) -> $ret, cases);)*
        }
    };
}

burn_decorator::float_ops!(cases);
burn_decorator::int_ops!(cases);
burn_decorator::bool_ops!(cases);
burn_decorator::quantized_ops!(cases);
burn_decorator::module_ops!(cases);
burn_decorator::activation_ops!(cases);

fn all<B: Backend>() -> Cases<B> {
    let mut cases = Cases::new();
    FloatTensorOps::<B>(&mut cases);
    IntTensorOps::<B>(&mut cases);
    BoolTensorOps::<B>(&mut cases);
    QTensorOps::<B>(&mut cases);
    ModuleOps::<B>(&mut cases);
    ActivationOps::<B>(&mut cases);
    cases
}

#[test]
fn every_recorded_operation_comes_back() {
    let recorded = op_table().filter(|op| !matches!(op.work, Work::Fixed | Work::Pass));
    let plain = all::<Probe<Flex>>();
    let managed = all::<Remat<Probe<Flex>>>();
    assert_eq!(plain.len(), recorded.count());
    let mut failures = Vec::new();
    for (name, run) in plain {
        let expected = catch_unwind(|| run().into_iter().map(Held::read).collect::<Vec<_>>());
        let Ok(expected) = expected else {
            failures.push(format!("{name}: the inner backend refused"));
            continue;
        };
        let found = catch_unwind(AssertUnwindSafe(|| {
            RematStats::reset_thread();
            take_counts();
            // The scope's end evicts the results, and the operands with them.
            let mut held = Vec::new();
            let mut ran = 0;
            checkpoint(|| {
                held = managed[name]();
                ran = take_counts()[name];
            });
            assert_eq!(take_counts().get(name), None, "it ran as it went");
            let stats = RematStats::of_thread();
            assert!(
                stats.evicted_operations > 0,
                "nothing was evicted: {stats:?}"
            );
            let found: Vec<_> = held.into_iter().map(Held::read).collect();
            let stats = RematStats::of_thread();
            assert!(
                stats.replayed_operations > 0,
                "nothing was replayed: {stats:?}"
            );
            assert_eq!(take_counts().get(name), Some(&ran), "times it ran again");
            make::release();
            assert_eq!(RematStats::of_thread().live_bytes, 0);
            found
        }));
        match found {
            Err(panic) => failures.push(format!("{name}: {:?}", panic.downcast_ref::<String>())),
            Ok(found) if found != expected => failures.push(format!("{name}: other values")),
            Ok(_) => {}
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// The same where what may be is moved to the host, and the rest computed once more.
#[test]
fn every_recorded_operation_comes_back_by_way_of_the_host() {
    let managed = all::<Remat<Probe<Flex>>>();
    let (mut failures, mut moved) = (Vec::new(), 0);
    for (name, run) in all::<Probe<Flex>>() {
        let expected: Vec<_> = run().into_iter().map(Held::read).collect();
        let found = catch_unwind(AssertUnwindSafe(|| {
            RematStats::reset_thread();
            take_counts();
            let mut held = Vec::new();
            let mut ran = 0;
            checkpoint_with(Policy::Offload, || {
                held = managed[name]();
                ran = take_counts()[name];
            });
            // What goes is read through a view.
            let ran_again = take_counts().contains_key(name);
            assert!(
                !ran_again || name.ends_with("_reshape"),
                "it ran as it went"
            );
            let gone = RematStats::of_thread();
            assert!(
                gone.evicted_operations + gone.offloaded_bytes > 0,
                "{gone:?}"
            );
            let found: Vec<_> = held.into_iter().map(Held::read).collect();
            let stats = RematStats::of_thread();
            assert!(
                stats.replayed_operations + stats.uploaded_bytes > 0,
                "{stats:?}"
            );
            let again = take_counts().remove(name).unwrap_or(0);
            assert!(again <= ran, "it ran {again} times again");
            make::release();
            assert_eq!(RematStats::of_thread().live_bytes, 0);
            (found, again)
        }));
        match found {
            Err(panic) => failures.push(format!("{name}: {:?}", panic.downcast_ref::<String>())),
            Ok((found, _)) if found != expected => failures.push(format!("{name}: other values")),
            Ok((_, again)) => moved += usize::from(again == 0),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(moved > 0, "no result went to the host");
    println!("{moved} operations were not run again");
}

/// The rest of the interface that this file would not use otherwise.
#[test]
fn nothing_to_evict() {
    fn accepts(_: &impl Outputs) {}
    accepts(&());
    evict(&());
}
