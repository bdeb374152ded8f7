//! The time of one operation on operands of some shapes.

use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::tensor::{BasicOps, Shape, Tensor};
use burn_checkpoint::{OpInfo, Work, op_table};
use burn_flex::Flex;

/// The least time of a sample, so that reading the clock is next to nothing of it.
const SAMPLE: Duration = Duration::from_micros(20);

/// The most calls in a sample: their results are kept until it is over.
const CALLS: usize = 32;

/// How long a row samples in one turn; at least once.
const TURN: Duration = Duration::from_millis(2);

/// Takes so many calls, and gives their time.
type Sample = Box<dyn Fn(usize) -> Duration>;

/// An operation on operands of some shapes, and what it took.
pub struct Row {
    pub op: &'static OpInfo,
    operands: Vec<Shape>,
    result: Shape,
    /// Elements of the largest tensor; of products multiplications.
    units: f64,
    sample: Sample,
    calls: usize,
    fastest: Duration,
}

impl Row {
    /// Another turn.
    pub fn turn(&mut self) {
        let start = Instant::now();
        while {
            let time = (self.sample)(self.calls) / self.calls as u32;
            self.fastest = self.fastest.min(time);
            start.elapsed() < TURN
        } {}
        let calls = SAMPLE.as_nanos() / self.fastest.as_nanos().max(1);
        self.calls = (calls as usize).clamp(1, CALLS);
    }

    pub fn ns(&self) -> f64 {
        self.fastest.as_nanos() as f64
    }

    pub fn ns_a_unit(&self) -> f64 {
        self.ns() / self.units
    }

    /// Predicted over measured.
    pub fn predicted(&self) -> f64 {
        f64::from(self.op.estimated_ns(&self.operands, &self.result)) / self.ns()
    }

    /// Whether the two differ by more than two.
    pub fn is_off(&self) -> bool {
        !(0.5..=2.0).contains(&self.predicted())
    }

    pub fn operands(&self) -> String {
        let shapes: Vec<_> = self
            .operands
            .iter()
            .map(|shape| format!("{:?}", shape.as_slice()))
            .collect();
        shapes.join(" ")
    }
}

/// A tensor of any rank and kind, as an operand or a result.
pub trait Operand: Clone + 'static {
    fn dims(&self) -> Shape;
}

impl<const D: usize, K: BasicOps<Flex> + 'static> Operand for Tensor<Flex, D, K>
where
    Self: Clone,
{
    fn dims(&self) -> Shape {
        self.shape()
    }
}

/// The rows to be measured.
#[derive(Default)]
pub struct Rows(pub Vec<Row>);

impl Rows {
    /// An operation of one operand; `op` is its name in the table.
    pub fn one<A: Operand, R: Operand>(&mut self, op: &str, a: &A, run: impl Fn(A) -> R + 'static) {
        let a = a.clone();
        self.add(op, vec![a.dims()], None, move || run(a.clone()));
    }

    /// Of two.
    pub fn two<A: Operand, B: Operand, R: Operand>(
        &mut self,
        op: &str,
        (a, b): (&A, &B),
        run: impl Fn(A, B) -> R + 'static,
    ) {
        let (a, b) = (a.clone(), b.clone());
        self.add(op, vec![a.dims(), b.dims()], None, move || {
            run(a.clone(), b.clone())
        });
    }

    /// Of three.
    pub fn three<A: Operand, B: Operand, C: Operand, R: Operand>(
        &mut self,
        op: &str,
        (a, b, c): (&A, &B, &C),
        run: impl Fn(A, B, C) -> R + 'static,
    ) {
        let (a, b, c) = (a.clone(), b.clone(), c.clone());
        self.add(op, vec![a.dims(), b.dims(), c.dims()], None, move || {
            run(a.clone(), b.clone(), c.clone())
        });
    }

    /// A product, with so many multiplications, of two operands.
    pub fn product<A: Operand, B: Operand, R: Operand>(
        &mut self,
        op: &str,
        multiplications: usize,
        (a, b): (&A, &B),
        run: impl Fn(A, B) -> R + 'static,
    ) {
        let (a, b) = (a.clone(), b.clone());
        let units = Some(multiplications as f64);
        self.add(op, vec![a.dims(), b.dims()], units, move || {
            run(a.clone(), b.clone())
        });
    }

    fn add<R: Operand>(
        &mut self,
        op: &str,
        operands: Vec<Shape>,
        units: Option<f64>,
        run: impl Fn() -> R + 'static,
    ) {
        let result = run().dims();
        let elements = operands.iter().chain([&result]).map(Shape::num_elements);
        let largest = elements.max().unwrap_or(1) as f64;
        self.0.push(Row {
            op: op_table()
                .find(|row| row.name == op)
                .unwrap_or_else(|| panic!("{op} is no row of the table")),
            operands,
            result,
            units: units.unwrap_or(largest),
            sample: Box::new(move |calls| {
                let mut results = Vec::with_capacity(calls);
                let start = Instant::now();
                for _ in 0..calls {
                    results.push(black_box(run()));
                }
                start.elapsed()
            }),
            calls: 1,
            fastest: Duration::MAX,
        });
    }
}

/// The class of a row.
pub fn class(work: Work) -> String {
    format!("{work:?}").to_lowercase()
}
