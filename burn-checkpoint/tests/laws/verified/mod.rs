//! What comes back is what was there, seen from below `Remat`: every operation that runs again has
//! operands that it had in the run without recomputation, and gives what it gave then.
//!
//! [`Verified`] notes what runs. [`RecordedRun::verify`] compares a run with one that recomputes
//! nothing, and names the first operation that differs.

mod backend;
mod tests;

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::fmt::{Debug, Write};
use std::hash::{DefaultHasher, Hash, Hasher};

use burn_backend::TensorData;

pub use backend::Verified;

thread_local! {
    /// What ran on this thread, while it is recorded.
    static CALLS: RefCell<Option<Vec<NotedOperation>>> = const { RefCell::new(None) };
}

/// A tensor, by its bits, type and shape.
type TensorHash = u64;

fn hash(data: &TensorData) -> TensorHash {
    let mut hasher = DefaultHasher::new();
    (
        data.as_bytes(),
        &data.shape[..],
        format!("{:?}", data.dtype),
    )
        .hash(&mut hasher);
    hasher.finish()
}

/// An operation that ran.
#[derive(Debug)]
struct NotedOperation {
    op: &'static str,
    /// As in its row.
    work: &'static str,
    operands: Vec<TensorHash>,
    /// Types and shapes of the operands.
    shapes: Vec<String>,
    /// All other arguments.
    others: String,
    results: Vec<TensorHash>,
}

impl NotedOperation {
    /// An operation that is about to run, if it is to be noted.
    fn begin(op: &'static str, work: &'static str) -> Option<Self> {
        let call = || Self {
            op,
            work,
            operands: Vec::new(),
            shapes: Vec::new(),
            others: String::new(),
            results: Vec::new(),
        };
        CALLS.with_borrow(Option::is_some).then(call)
    }

    fn operand(&mut self, data: &TensorData) {
        self.operands.push(hash(data));
        self.shapes
            .push(format!("{:?} {:?}", data.dtype, data.shape));
    }

    fn plain(&mut self, argument: &impl Debug) {
        write!(self.others, "{argument:?} ").expect("a string");
    }

    /// Notes elements that come from the host.
    fn elements(&mut self, data: &TensorData) {
        self.plain(&hash(data));
    }

    fn result(&mut self, data: &TensorData) {
        self.results.push(hash(data));
    }

    fn end(self) {
        CALLS.with_borrow_mut(|calls| calls.as_mut().expect("a recording").push(self));
    }

    /// What decides about its results.
    fn arguments(&self) -> (&str, &[TensorHash], &str) {
        (self.op, &self.operands, &self.others)
    }

    /// Whether its results are those of its arguments.
    fn is_function(&self) -> bool {
        !self.op.ends_with("_random") && !self.op.ends_with("_empty")
    }

    fn draws_bits(&self) -> bool {
        self.op == "float_random" && self.others.contains("Bernoulli")
    }

    fn is_view(&self) -> bool {
        self.work == "view"
    }
}

/// What a tensor is made of that `Remat` may compute with by itself.
///
/// It packs the zeros and ones that a dropout draws into bits, and unpacks them for backward: the
/// run without it has none of these operations. It uploads what it had moved to the host, as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MadeOf {
    /// Of no tensor: uploads, ranges.
    Nothing,
    /// Of zeros and ones that were drawn, and of nothing else but tensors made of nothing.
    Draws,
}

/// What ran.
#[derive(Debug)]
pub struct RecordedRun(Vec<NotedOperation>);

/// Runs a function, and notes the operations that run below `Remat` on this thread.
pub fn recorded<R>(run: impl FnOnce() -> R) -> (R, RecordedRun) {
    /// Goes on with the recording around this one.
    struct Around(Option<Vec<NotedOperation>>);
    impl Drop for Around {
        fn drop(&mut self) {
            CALLS.set(self.0.take());
        }
    }
    let _around = Around(CALLS.replace(Some(Vec::new())));
    let result = run();
    (result, RecordedRun(CALLS.take().expect("a recording")))
}

impl RecordedRun {
    /// Runs a function that computes the same as this run, with recomputation.
    ///
    /// # Panics
    ///
    /// With the first operation that differs.
    pub fn verify<R>(&self, run: impl FnOnce() -> R) -> R {
        assert!(self.operations() > 0, "what ran has no `Verified`");
        let (result, found) = recorded(run);
        assert!(found.operations() > 0, "what ran has no `Verified`");
        if let Err(difference) = self.compare(&found) {
            panic!("{difference}");
        }
        result
    }

    /// Runs a function that computes the same as this run, but for rounding: what it uploads is
    /// bit for bit what this run uploaded, or what an operation gave before.
    ///
    /// # Panics
    ///
    /// With the first upload of something else.
    pub fn verify_uploads<R>(&self, run: impl FnOnce() -> R) -> R {
        let (result, found) = recorded(run);
        assert!(found.operations() > 0, "what ran has no `Verified`");
        let mut known: HashSet<TensorHash> = self.values().collect();
        for call in &found.0 {
            let NotedOperation { op, others, .. } = call;
            let is_new = call.results.iter().any(|result| !known.contains(result));
            assert!(
                !op.ends_with("_from_data") || !is_new,
                "`{op}` uploads what was nowhere: {others}"
            );
            known.extend(&call.results);
        }
        result
    }

    /// The tensors of this run.
    fn values(&self) -> impl Iterator<Item = TensorHash> {
        let of_call = |call: &NotedOperation| [&call.operands[..], &call.results].concat();
        self.0.iter().flat_map(of_call)
    }

    /// The number of operations that ran.
    pub fn operations(&self) -> usize {
        self.0.len()
    }

    /// An error that names the first operation of another run that had other operands than in this
    /// one, or gave something else.
    pub fn compare(&self, found: &Self) -> Result<(), String> {
        // The same values may lie in memory in several orders, and be summed in each.
        let mut results: HashMap<_, Vec<&[TensorHash]>> = HashMap::new();
        let known: HashSet<TensorHash> = self.values().collect();
        for call in &self.0 {
            results
                .entry(call.arguments())
                .or_default()
                .push(&call.results);
        }
        let mut makers = HashMap::new();
        let mut made_of = HashMap::new();
        for call in &found.0 {
            let own = of_operands(call, &made_of);
            match results.get(&call.arguments()) {
                Some(results) if call.is_function() && !results.contains(&&call.results[..]) => {
                    return Err(drifts(call));
                }
                None if own.is_none() && !call.is_view() => {
                    return Err(unexpected(call, &known, &makers));
                }
                _ => {}
            }
            for result in &call.results {
                makers.insert(*result, call.op);
                made_of.extend(own.map(|own| (*result, own)));
            }
        }
        Ok(())
    }
}

/// Says that an operation is no function of its operands.
fn drifts(call: &NotedOperation) -> String {
    let NotedOperation { op, shapes, .. } = call;
    format!("`{op}` gave other values than before on the same operands, {shapes:?}")
}

/// What the results of an operation are made of, as far as `Remat` may compute with it.
fn of_operands(call: &NotedOperation, made_of: &HashMap<TensorHash, MadeOf>) -> Option<MadeOf> {
    if call.draws_bits() {
        return Some(MadeOf::Draws);
    }
    let operands = call.operands.iter().map(|operand| made_of.get(operand));
    let operands: Vec<_> = operands.collect::<Option<_>>()?;
    if operands.contains(&&MadeOf::Draws) {
        return Some(MadeOf::Draws);
    }
    (operands.is_empty() || call.is_view()).then_some(MadeOf::Nothing)
}

/// Says which operand is new.
fn unexpected(
    call: &NotedOperation,
    known: &HashSet<TensorHash>,
    makers: &HashMap<TensorHash, &str>,
) -> String {
    let NotedOperation { op, others, .. } = call;
    let mut message = format!("`{op}` ran on what it did not run on without recomputation:");
    for (operand, shape) in call.operands.iter().zip(&call.shapes) {
        let maker = makers.get(operand).unwrap_or(&"no operation of this run");
        write!(message, " {shape} of `{maker}`").expect("a string");
        message += if known.contains(operand) {
            ";"
        } else {
            ", which is new;"
        };
    }
    message + " " + others
}
