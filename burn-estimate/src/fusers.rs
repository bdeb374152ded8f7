//! Which operations CubeCL runs as one kernel: chains of elementwise operations, products and
//! reductions with what is computed from them and, for reductions, with what they are computed
//! from. Seen in the source of burn-cubecl-fusion 0.21.0 (`engine` and `optim`).
//!
//! burn-fusion asks each fuser which operations it takes, and runs the kernel that saves most.

use burn_fusion::{FuserProperties, FuserStatus, NumOperations, OperationFuser};
use burn_ir::{
    FloatOperationIr as Float, NumericOperationIr as Numeric, OperationIr, ReduceDimOpIr,
};
use burn_std::Shape;

use crate::device::Kernels;
use crate::trace::{BROADCAST, Shapes, Trace};

/// Operations that run as one kernel.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    pub operations: usize,
}

impl NumOperations for Kernel {
    fn len(&self) -> usize {
        self.operations
    }

    fn name(&self) -> &'static str {
        "kernel"
    }
}

/// The fusers of a stream.
pub(crate) fn fusers(kernels: Kernels) -> Vec<Box<dyn OperationFuser<Kernel>>> {
    let most_tensors = match kernels {
        Kernels::Cuda => 1024,
        // Of software Vulkan, less one.
        _ => 31,
    };
    vec![
        Box::new(Trace::new(BROADCAST, most_tensors)),
        Box::new(Product::new(most_tensors)),
        Box::new(Reduction::new(most_tensors)),
        Box::new(Reductions::new(most_tensors)),
    ]
}

/// The reduction of a dimension.
fn reduction(op: &OperationIr) -> Option<&ReduceDimOpIr> {
    let (OperationIr::NumericFloat(_, op) | OperationIr::NumericInt(_, op)) = op else {
        return None;
    };
    match op {
        Numeric::SumDim(op)
        | Numeric::MeanDim(op)
        | Numeric::ProdDim(op)
        | Numeric::ArgMax(op)
        | Numeric::ArgMin(op)
        | Numeric::MinDim(op)
        | Numeric::MaxDim(op)
        | Numeric::MaxAbsDim(op) => Some(op),
        _ => None,
    }
}

/// Methods of [`OperationFuser`] that are the same for all.
macro_rules! common {
    ($it:ident => $new:expr) => {
        fn finish(&mut self) -> Kernel {
            Kernel {
                operations: self.len(),
            }
        }

        fn reset(&mut self) {
            let $it = &*self;
            *self = $new;
        }

        fn clone_dyn(&self) -> Box<dyn OperationFuser<Kernel>> {
            Box::new(self.clone())
        }
    };
}

impl OperationFuser<Kernel> for Trace {
    common!(trace => Self::new(BROADCAST, trace.most_tensors));

    fn fuse(&mut self, op: &OperationIr) {
        self.add(op);
    }

    fn status(&self) -> FuserStatus {
        self.status()
    }

    fn properties(&self) -> FuserProperties {
        self.properties()
    }

    fn len(&self) -> usize {
        self.registered
    }
}

/// A matrix product, and elementwise operations on its result.
#[derive(Clone)]
struct Product {
    trace: Trace,
    /// The same operations in a kernel of their own.
    alone: Trace,
    has_product: bool,
}

impl Product {
    fn new(most_tensors: usize) -> Self {
        let fixed = Shapes {
            grow: false,
            ..BROADCAST
        };
        Self {
            trace: Trace::new(fixed, most_tensors),
            alone: Trace::new(BROADCAST, most_tensors),
            has_product: false,
        }
    }
}

impl OperationFuser<Kernel> for Product {
    common!(it => Self::new(it.trace.most_tensors));

    fn fuse(&mut self, op: &OperationIr) {
        if self.trace.is_closed {
            return;
        }
        match op {
            OperationIr::Float(_, Float::Matmul(op)) if !self.has_product => {
                self.trace.read_whole(&op.lhs);
                self.trace.read_whole(&op.rhs);
                self.trace.write_whole(&op.out);
                self.has_product = true;
            }
            _ if self.has_product && self.trace.takes(op) && self.alone.takes(op) => {
                self.trace.push(op);
                self.alone.push(op);
            }
            _ => self.trace.is_closed = true,
        }
    }

    fn status(&self) -> FuserStatus {
        self.trace.status()
    }

    fn properties(&self) -> FuserProperties {
        self.trace.properties()
    }

    fn len(&self) -> usize {
        self.trace.registered + 1
    }
}

/// A reduction, and elementwise operations before and after it.
#[derive(Clone)]
struct Reduction {
    trace: Trace,
    /// The operations before it in a kernel of their own.
    before: Trace,
    after: Trace,
    reduced: Option<ReduceDimOpIr>,
}

impl Reduction {
    const SAME_SHAPE: Shapes = Shapes {
        broadcast: false,
        grow: true,
    };

    fn new(most_tensors: usize) -> Self {
        Self {
            trace: Trace::new(Self::SAME_SHAPE, most_tensors),
            before: Trace::new(BROADCAST, most_tensors),
            after: Trace::new(BROADCAST, most_tensors),
            reduced: None,
        }
    }

    fn takes(&self, op: &OperationIr) -> bool {
        match (reduction(op), &self.reduced) {
            (Some(op), None) => !self.trace.is_closed && self.trace.shape == op.input.shape,
            (_, None) => self.trace.takes(op) && self.before.takes(op),
            (_, Some(_)) => self.trace.takes(op) && self.after.takes(op),
        }
    }

    fn add(&mut self, op: &OperationIr) {
        match (reduction(op), &self.reduced) {
            _ if !self.takes(op) => self.trace.is_closed = true,
            (Some(op), None) => {
                self.trace.begin_part(Shapes {
                    broadcast: false,
                    grow: false,
                });
                self.trace.hand_over(&op.input, 0);
                self.trace.write_whole(&op.out);
                self.reduced = Some(op.clone());
            }
            (_, reduced) => {
                let alone = match reduced {
                    None => &mut self.before,
                    Some(_) => &mut self.after,
                };
                alone.push(op);
                self.trace.push(op);
            }
        }
    }

    fn operations(&self) -> usize {
        self.trace.registered + usize::from(self.reduced.is_some())
    }
}

impl OperationFuser<Kernel> for Reduction {
    common!(it => Self::new(it.trace.most_tensors));

    fn fuse(&mut self, op: &OperationIr) {
        self.add(op);
    }

    fn status(&self) -> FuserStatus {
        self.trace.status()
    }

    fn properties(&self) -> FuserProperties {
        FuserProperties {
            ready: self.reduced.is_some(),
            ..self.trace.properties()
        }
    }

    fn len(&self) -> usize {
        self.operations()
    }
}

/// Reductions of the last dimension one after the other, such as those of a softmax.
#[derive(Clone)]
struct Reductions {
    blocks: Vec<Reduction>,
    operations: usize,
    state: State,
}

#[derive(Clone)]
enum State {
    Starting,
    /// The shape that is reduced.
    Reducing(Shape),
    Closed,
    Aborted,
}

impl Reductions {
    fn new(most_tensors: usize) -> Self {
        Self {
            blocks: vec![Reduction::new(most_tensors)],
            operations: 0,
            state: State::Starting,
        }
    }

    fn last(&self) -> &Reduction {
        self.blocks.last().expect("there is a block")
    }

    /// The block that the operation begins.
    fn next_block(&self, op: &OperationIr) -> Option<Reduction> {
        let last = self.last();
        let part = last.trace.parts.last();
        let hands_over = part.is_some_and(|part| !part.handed_over.is_empty());
        let has_views = last.trace.parts.iter().any(|part| part.views > 0);
        let State::Reducing(shape) = &self.state else {
            return None;
        };
        if last.reduced.is_none() || (has_views && hands_over) {
            return None;
        }
        let mut block = Reduction::new(last.trace.most_tensors);
        block.add(op);
        (block.operations() > 0 && block.before.shape == *shape).then_some(block)
    }
}

impl OperationFuser<Kernel> for Reductions {
    common!(it => Self::new(it.last().trace.most_tensors));

    fn fuse(&mut self, op: &OperationIr) {
        if matches!(self.state, State::Closed | State::Aborted) {
            return;
        }
        let last = self.blocks.last_mut().expect("there is a block");
        if last.takes(op) {
            last.add(op);
        } else if let Some(block) = self.next_block(op) {
            self.blocks.push(block);
        } else {
            self.state = State::Closed;
            return;
        }
        self.operations += 1;
        let reduced = self.blocks.iter().rev().find_map(|it| it.reduced.as_ref());
        if let Some(reduced) = reduced {
            self.state = match reduced.axis + 1 == reduced.input.shape.rank() {
                true => State::Reducing(reduced.input.shape.clone()),
                false => State::Aborted,
            };
        }
    }

    fn status(&self) -> FuserStatus {
        match self.state {
            State::Closed | State::Aborted => FuserStatus::Closed,
            _ => self.last().trace.status(),
        }
    }

    fn properties(&self) -> FuserProperties {
        let properties = self.blocks.iter().map(|block| block.trace.properties());
        let has_reduction = self.blocks[0].reduced.is_some();
        FuserProperties {
            score: properties.map(|properties| properties.score).sum(),
            ready: match self.state {
                State::Starting | State::Aborted => false,
                State::Closed if self.blocks.len() == 1 => has_reduction,
                _ => true,
            },
        }
    }

    fn len(&self) -> usize {
        self.operations
    }
}
