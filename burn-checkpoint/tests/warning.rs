//! What is said in the log. A process of its own, for the logger is the process's.

mod apart;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, Once};
use std::thread::{self, ThreadId};

use burn::backend::Autodiff;
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor};
use burn_checkpoint::kinds::Value;
use burn_checkpoint::{
    InstalledBudget, MemoryBudget, OpInfo, Policy, Remat, RematStats, Work, checkpoint,
    checkpoint_with,
};
use burn_flex::Flex;
use log::{Level, LevelFilter, Log, Metadata, Record};

use apart::InstallApart;

type Managed = Remat<Flex>;
type B = Autodiff<Managed>;

struct Line {
    thread: ThreadId,
    level: Level,
    text: String,
}

struct Lines(Mutex<Vec<Line>>);

static LINES: Lines = Lines(Mutex::new(Vec::new()));

impl Log for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("burn_checkpoint")
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            self.0.lock().expect("no panic").push(Line {
                thread: thread::current().id(),
                level: record.level(),
                text: record.args().to_string(),
            });
        }
    }

    fn flush(&self) {}
}

fn listen() {
    static LISTENS: Once = Once::new();
    LISTENS.call_once(|| {
        log::set_logger(&LINES).expect("no other logger");
        log::set_max_level(LevelFilter::Trace);
    });
}

/// What was said so far and is wanted; all of it are warnings.
fn take(wanted: impl Fn(&Line) -> bool) -> Vec<String> {
    let mut lines = LINES.0.lock().expect("no panic");
    let (taken, left) = lines.drain(..).partition(wanted);
    *lines = left;
    let text = |line: Line| {
        assert_eq!(line.level, Level::Warn, "{}", line.text);
        line.text
    };
    taken.into_iter().map(text).collect()
}

/// What was said of budgets on this thread since the last call.
fn said() -> Vec<String> {
    let here = thread::current().id();
    take(|line| line.thread == here && line.text.contains("budget"))
}

fn scope<B: Backend>(policy: Policy) {
    let x = Tensor::<B, 2>::ones([4, 4], &Default::default());
    let _ = checkpoint_with(policy, || x.clone().exp().sin());
}

#[test]
fn no_remat_in_the_stack_is_said_once() {
    listen();
    // By any thread.
    let said = || take(|line| line.text.contains("checkpoint scope"));

    // Nothing to be said where there is one, or where no tensor is returned.
    scope::<Managed>(Policy::Recompute);
    scope::<B>(Policy::Offload);
    checkpoint(|| checkpoint(|| scope::<B>(Policy::KeepCompute)));
    let budget = MemoryBudget::bytes(1 << 20).install_apart();
    scope::<B>(Policy::Recompute);
    drop(budget);
    checkpoint(|| 1.0f32);
    assert_eq!(said(), [""; 0]);

    scope::<Autodiff<Flex>>(Policy::Recompute);
    let once = said();
    let [line] = once.as_slice() else {
        panic!("one warning, not {once:?}");
    };
    assert!(
        line.contains("Autodiff<Remat<B>>") && line.contains("no memory"),
        "{line}"
    );

    // Once for the process: not at every block of every step, and not on every thread.
    for policy in [Policy::Recompute, Policy::KeepCompute, Policy::Offload] {
        scope::<Autodiff<Flex>>(policy.clone());
        thread::spawn(|| scope::<Flex>(policy))
            .join()
            .expect("no panic");
    }
    assert_eq!(said(), [""; 0]);
}

/// An operation for which there is never any memory.
#[test]
fn what_holds_the_memory_is_said_where_nothing_is_left_to_evict() {
    const GREEDY: &OpInfo = &OpInfo::custom("greedy", Work::Math);
    listen();
    let _budget = MemoryBudget::bytes(1 << 30).retrying().install_apart();
    let x = random::<Managed>(64);
    let y = x.clone().exp();
    let refused = catch_unwind(AssertUnwindSafe(|| {
        let operands = [Value::Float(x.clone().into_primitive().tensor())];
        Managed::operation(GREEDY, operands, |_| panic!("CUDA out of memory"))
    }));
    assert!(refused.is_err());
    drop(y);
    let here = thread::current().id();
    let mut lines = LINES.0.lock().expect("no panic");
    let (said, left) = lines
        .drain(..)
        .partition(|line| line.thread == here && line.text.contains("`greedy`"));
    *lines = left;
    let said: Vec<Line> = said;
    let texts: Vec<_> = said.iter().map(|line| &*line.text).collect();
    assert_eq!(texts[0], "no memory for `greedy`: 65536 bytes were evicted");
    let last = said.last().expect("several");
    assert_eq!(last.level, Level::Error);
    assert!(
        last.text.contains("nothing to evict: 64.0 KiB in use")
            && last.text.contains("float_random"),
        "{texts:?}"
    );
}

/// A tensor of so many KiB, of a random number each.
fn random<B: Backend>(kibibytes: usize) -> Tensor<B, 2> {
    Tensor::random([kibibytes, 256], Distribution::Default, &Default::default())
}

fn kib(kibibytes: u64) -> MemoryBudget {
    MemoryBudget::bytes(kibibytes << 10)
}

/// The last operation needs 13 KiB: 3 of random numbers, 2 of what a policy keeps, 4 of its operand
/// and 4 of its own.
fn needs_13_kib(x: &Tensor<Managed, 2>) -> [Tensor<Managed, 2>; 4] {
    let random = random(3);
    let keep = Policy::Keep;
    let kept = checkpoint_with(keep, || random.clone().narrow(0, 0, 2).exp());
    let operand = x.clone().narrow(0, 0, 4).sin();
    let result = operand.clone().cos();
    [random, kept, operand, result]
}

const NEEDS_13_KIB: &str = "a step needs at least 13.0 KiB: gradients 0 B, random numbers and data 3.0 KiB, results that are kept 2.0 KiB, \
     largest operation 8.0 KiB (`float_cos`: operands and what its replay holds 4.0 KiB, result 4.0 KiB); parameters and optimizer \
     state are not counted";

#[test]
fn what_does_not_fit_is_said_by_kind() {
    listen();
    let x = random::<Managed>(8);
    let budget = kib(13).install_apart();
    let held = needs_13_kib(&x);
    assert_eq!(budget.peak_bytes(), 13 << 10);
    drop((held, budget));
    assert_eq!(said(), [""; 0]);

    let budget = kib(12).install_apart();
    let held = needs_13_kib(&x);
    // At once.
    let expected =
        format!("the memory budget of 12.0 KiB cannot be kept: {NEEDS_13_KIB}; going on above it");
    assert_eq!(said(), [expected]);
    drop(held);
    // Not again, unless much more is needed; then at the end of the step.
    let held = needs_13_kib(&x);
    budget.step();
    assert_eq!(said(), [""; 0]);
    drop(held);
    let large = x.clone().exp();
    drop((large.clone().cos(), large.clone().sin()));
    assert_eq!(said(), [""; 0]);
    budget.step();
    let more = said();
    assert_eq!(more.len(), 1, "{more:?}");
    assert!(more[0].contains("needs at least 16.0 KiB"), "{more:?}");
    drop(budget);
    assert_eq!(said(), [""; 0]);
}

/// The largest need of the last step is said when the budget ends, if not before.
#[test]
fn a_larger_need_is_said_in_the_end() {
    listen();
    let x = random::<Managed>(32);
    let budget = kib(12).install_apart();
    let held = needs_13_kib(&x);
    let large = x.clone().cos();
    assert_eq!(said().len(), 1);
    drop(budget);
    let more = said();
    assert!(
        more.len() == 1 && more[0].contains("`float_cos`"),
        "{more:?}"
    );
    drop((held, large));
}

#[test]
fn a_strict_budget_refuses_again_and_again() {
    listen();
    let x = random::<Managed>(8);
    let _budget = kib(12).strict().install_apart();
    for _ in 0..3 {
        let caught = catch_unwind(AssertUnwindSafe(|| needs_13_kib(&x)));
        let Err(message) = caught else {
            panic!("it went on above the limit");
        };
        let message = message.downcast::<String>().expect("a message");
        assert!(message.contains(NEEDS_13_KIB), "{message}");
    }
    // What fits is not refused after that.
    let y = x.clone().narrow(0, 0, 4).sin().cos();
    assert_eq!(y.into_data(), x.narrow(0, 0, 4).sin().cos().into_data());
    assert_eq!(said(), [""; 0]);
}

/// A step of a chain of products: its weights, 1 KiB each, are a parameter's.
fn step(weights: &[Tensor<B, 2>]) {
    let device = Default::default();
    let x = Tensor::<B, 2>::ones([16, 16], &device);
    let mut y = x.clone();
    for weight in weights {
        y = y.matmul(weight.clone()).tanh();
    }
    let grads = y.mean().backward();
    let grads: Vec<_> = weights.iter().map(|weight| weight.grad(&grads)).collect();
    assert!(grads.iter().all(Option::is_some));
}

fn weights() -> Vec<Tensor<B, 2>> {
    let weight = |index: u8| {
        Tensor::<B, 2>::full([16, 16], 0.01 * f32::from(index), &Default::default()).require_grad()
    };
    (0..12).map(weight).collect()
}

fn end(budget: InstalledBudget) -> u64 {
    let peak_bytes = budget.peak_bytes();
    drop(budget);
    peak_bytes
}

/// The number after some words of a message.
fn kib_after(message: &str, words: &str) -> f64 {
    let rest = message.split(words).nth(1).expect("the words");
    let (number, unit) = rest.trim_start().split_once(' ').expect("a number");
    assert!(unit.starts_with("KiB"), "{message}");
    number.parse().expect("a number")
}

/// A fraction that is too small is known as soon as the step is over that measures it.
#[test]
fn a_fraction_that_is_too_small_is_said_before_it_is_in_force() {
    listen();
    let weights = weights();
    let budget = MemoryBudget::fraction(0.01)
        .expect("a fraction")
        .install_apart();
    step(&weights);
    let evicted = RematStats::of_thread().evicted_operations;
    assert_eq!(said(), [""; 0]);
    budget.step();
    let early = said();
    assert_eq!(early.len(), 1, "{early:?}");
    assert_eq!(RematStats::of_thread().evicted_operations, evicted);
    // The gradients of twelve weights are alive in the end.
    assert!(kib_after(&early[0], "gradients") >= 11.0, "{early:?}");
    let needed = kib_after(&early[0], "needs at least");
    println!("{early:?}");
    step(&weights);
    drop(budget);
    said();
    // It was right: no less is reached with all that can be evicted.
    let budget = kib(1).install_apart();
    step(&weights);
    let least = end(budget) as f64 / 1024.0;
    assert!(
        needed <= least && least < needed + 1.0,
        "{needed} of {least} KiB"
    );
    said();
    // And so many are enough: the loss and its mean beside.
    let budget = MemoryBudget::bytes((needed * 1024.0) as u64 + 64).strict();
    let budget = budget.install_apart();
    for _ in 0..3 {
        step(&weights);
        budget.step();
    }
    drop(budget);
    let budget = MemoryBudget::bytes((needed * 1024.0) as u64 - 1024).strict();
    let _budget = budget.install_apart();
    assert!(catch_unwind(AssertUnwindSafe(|| step(&weights))).is_err());
    said();
}

#[test]
fn a_strict_fraction_that_is_too_small_is_refused() {
    let weights = weights();
    let budget = MemoryBudget::fraction(0.01)
        .expect("a fraction")
        .strict()
        .install_apart();
    step(&weights);
    let caught = catch_unwind(AssertUnwindSafe(|| budget.step()));
    let message = caught.expect_err("a panic").downcast::<String>();
    assert!(message.expect("a message").contains("needs at least"));
}

/// Reads 64 tensors of 1 KiB from the last to the first.
fn read_backwards() {
    let mut held = vec![random::<Managed>(1)];
    for _ in 0..64 {
        held.push(held[held.len() - 1].clone().sin());
    }
    while let Some(x) = held.pop() {
        drop(x.into_data());
    }
}

#[test]
fn thrashing_is_counted_when_the_step_is_over() {
    listen();
    RematStats::reset_thread();
    let thrashing = || RematStats::of_thread().thrashing_steps;

    let budget = kib(80).install_apart();
    read_backwards();
    drop(budget);
    assert_eq!((thrashing(), said()), (0, vec![]));

    // The last step, or the only one: said as soon as it is certain.
    let budget = kib(3).install_apart();
    read_backwards();
    assert_eq!(thrashing(), 0);
    let once = said();
    drop(budget);
    assert_eq!((thrashing(), said()), (1, vec![]));
    assert!(
        once.len() == 1 && once[0].contains("makes a step replay"),
        "{once:?}"
    );
    assert!(once[0].contains("3.0 KiB"), "{once:?}");

    // Steps in a row, which are said once.
    let budget = kib(3).install_apart();
    read_backwards();
    budget.step();
    assert_eq!(thrashing(), 2);
    read_backwards();
    drop(budget);
    assert_eq!(thrashing(), 3);
    assert_eq!(said().len(), 1);

    RematStats::reset_thread();
    assert_eq!(thrashing(), 0);
}

/// One budget in another one: the outer one's counters go on where they were.
#[test]
fn nothing_is_counted_twice_after_an_inner_budget() {
    listen();
    RematStats::reset_thread();
    let outer = kib(3).install_apart();
    read_backwards();
    outer.step();
    let before = RematStats::of_thread();
    assert_eq!(before.thrashing_steps, 1);
    let inner = kib(80).install_apart();
    read_backwards();
    drop(inner);
    let x = random::<Managed>(1).sin();
    let after = RematStats::of_thread();
    assert_eq!(after.thrashing_steps, 1);
    assert_eq!(after.replayed_operations, before.replayed_operations);
    drop((x, outer));
    said();
}
