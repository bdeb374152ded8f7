//! Where the time of a step goes: by operation of the backend.
//!
//! On a backend that computes when it is called, LibTorch on a CPU or burn-flex, the time of a call
//! is the operation's. Elsewhere it is the time to launch it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::Write;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use burn::prelude::Backend;
use burn_amp::AmpError;
use burn_backend::BackendTypes;
use burn_decorator::types::*;
use burn_decorator::{kind_type, map_operand, map_result};

use super::options::Options;
use super::table::markdown;
use super::trainer::{Task, contender_here};

/// Operations that have a row of their own in the table.
const ROWS: usize = 24;

/// The time of the operations of some steps of each setting.
///
/// # Errors
///
/// The device cannot compute in a setting's precision.
pub fn table<B: Backend>(options: &Options, device: &B::Device) -> Result<String, AmpError> {
    let task = Task::<Timed<B>> {
        workload: options.workload(),
        seed: options.seed,
        device: device.clone(),
        backend: options.backend,
    };
    let mut text = String::new();
    for &setting in &options.settings {
        let mut contender = contender_here(setting, &task)?;
        contender.enter();
        for _ in 0..options.warmup() {
            contender.step()?;
        }
        TIMES.take();
        let start = Instant::now();
        for _ in 0..options.steps() {
            contender.step()?;
        }
        let steps = options.steps() as f64;
        let all = start.elapsed();
        let milliseconds = |time: Duration| 1e3 * time.as_secs_f64() / steps;
        let mut times: Vec<_> = TIMES.take().into_iter().collect();
        times.sort_by_key(|(_, (time, _))| std::cmp::Reverse(*time));
        let inside: Duration = times.iter().map(|(_, (time, _))| time).sum();
        let row = |name: &str, time: Duration, calls: String| {
            let share = 100.0 * time.as_secs_f64() / all.as_secs_f64();
            let time = format!("{:.1}", milliseconds(time));
            vec![name.to_owned(), time, format!("{share:.0} %"), calls]
        };
        let calls = |calls: usize| format!("{:.0}", calls as f64 / steps);
        let (own, rest) = times.split_at(ROWS.min(times.len()));
        let mut rows: Vec<_> = own
            .iter()
            .map(|(op, (time, count))| row(op, *time, calls(*count)))
            .collect();
        let (time, count) = rest
            .iter()
            .fold((Duration::ZERO, 0), |(time, count), (_, (own, calls))| {
                (time + *own, count + calls)
            });
        rows.push(row("other operations", time, calls(count)));
        rows.push(row(
            "between operations",
            all.saturating_sub(inside),
            String::new(),
        ));
        rows.push(row("the step", all, String::new()));
        let headers = [&*setting.to_string(), "ms a step", "of it", "calls a step"];
        writeln!(text, "{}", markdown(&headers, rows)).expect("a string grows");
    }
    Ok(text)
}

/// A backend that takes the time of its operations.
#[derive(Clone, Copy, Debug, Default)]
struct Timed<B>(PhantomData<B>);

thread_local! {
    /// By operation, on this thread: the time and the number of calls.
    static TIMES: RefCell<HashMap<&'static str, (Duration, usize)>> = RefCell::default();
}

fn timed<R>(op: &'static str, call: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = call();
    let time = start.elapsed();
    TIMES.with_borrow_mut(|times| {
        let (sum, calls) = times.entry(op).or_default();
        *sum += time;
        *calls += 1;
    });
    result
}

impl<B: Backend> BackendTypes for Timed<B> {
    burn_decorator::forward_types!(B, float tensor: B::FloatTensorPrimitive);
}

impl<B: Backend> Backend for Timed<B> {
    burn_decorator::forward_device!(B);
    burn_decorator::forward_dtypes!(B);

    fn name(device: &Self::Device) -> String {
        B::name(device)
    }
}

macro_rules! implement {
    ($trait:ident $($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<B: Backend> $trait<Self> for Timed<B> {
            $(fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
                timed(stringify!($op), || {
                    map_result!($ret B::$op($(map_operand!($kind $arg, |tensor| tensor)),*), |tensor| tensor)
                })
            })*
        }
    };
}

burn_decorator::every_ops!(implement);
