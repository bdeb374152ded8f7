//! The exchange of gradients between ranks, as this rank sees it.

use core::fmt;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::gauge::Gauge;
use super::layout::Layout;
use super::reduced::Reduced;
use super::worker::{Arrival, Orders, Worker};
use crate::group::ProcessGroup;
use crate::host::HostRead;
use crate::{Sharding, Stage, ZeroError};

/// When gradients are reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timing {
    /// Bucket by bucket, while backward goes on: stage 2.
    DuringBackward,
    /// When the optimizer gets them, once a window of micro-batches: stages 0 and 1.
    AtTheStep,
}

/// What the optimizer's next step meets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Arriving {
    /// Gradients of this rank alone.
    #[default]
    Local,
    /// What is reduced already, as far as this rank holds it.
    Reduced,
}

/// Buckets are reduced in their order, the same on every rank, whatever the order in which gradients arrive.
pub(crate) struct Exchange {
    number: u64,
    orders: Arc<Orders>,
    worker: Worker,
    pass: Mutex<Option<Pass>>,
    arriving: Mutex<Arriving>,
}

/// The gradients that have arrived since `begin`.
struct Pass {
    /// By parameter.
    submitted: Vec<bool>,
    buckets: Vec<Waiting>,
    /// So many buckets were not reduced yet: the first ones, as backward begins with the last parameters.
    remaining: usize,
}

/// A bucket before it is reduced.
struct Waiting {
    /// Parameters that it still waits for.
    missing: usize,
    arrivals: Vec<Arc<Arrival>>,
}

impl Exchange {
    pub(crate) fn new(layout: Layout, group: Arc<dyn ProcessGroup>, sharding: &Sharding) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let orders = Arc::new(Orders {
            layout,
            group,
            stage: sharding.stage,
            op: sharding.reduction,
            dtype: sharding.communication_dtype,
            gauge: Gauge::default(),
        });
        Self {
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            worker: Worker::start(orders.clone()),
            orders,
            pass: Mutex::default(),
            arriving: Mutex::default(),
        }
    }

    /// Exchanges of one thread are numbered in the order in which they were made.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.orders.layout
    }

    pub(crate) fn group(&self) -> &dyn ProcessGroup {
        &*self.orders.group
    }

    /// Counts the gradients that this rank holds.
    pub(crate) fn gauge(&self) -> &Gauge {
        &self.orders.gauge
    }

    pub(crate) fn timing(&self) -> Timing {
        match self.orders.stage {
            Stage::DataParallel | Stage::OptimizerState => Timing::AtTheStep,
            Stage::Gradients => Timing::DuringBackward,
        }
    }

    /// Notes what the next step meets.
    pub(crate) fn note(&self, arriving: Arriving) {
        *self.arriving.lock() = arriving;
    }

    /// What this step meets.
    pub(crate) fn take_arriving(&self) -> Arriving {
        core::mem::take(&mut self.arriving.lock())
    }

    /// Starts a pass over all parameters.
    pub(crate) fn begin(&self) {
        let layout = &self.orders.layout;
        let waiting = layout.buckets().iter().map(|bucket| Waiting {
            missing: bucket.segments().len(),
            arrivals: Vec::new(),
        });
        *self.pass.lock() = Some(Pass {
            submitted: vec![false; layout.parameters().len()],
            buckets: waiting.collect(),
            remaining: layout.buckets().len(),
        });
    }

    /// Whether a pass is under way that waits for this parameter.
    pub(crate) fn takes(&self, parameter: usize) -> bool {
        let pass = self.pass.lock();
        pass.as_ref().is_some_and(|pass| !pass.submitted[parameter])
    }

    /// Brings a gradient, or the word that there is none. Waits if too many buckets are under way.
    pub(crate) fn submit(&self, parameter: usize, gradient: Option<HostRead>) {
        let layout = &self.orders.layout;
        let mut pass = self.pass.lock();
        let Some(pass) = &mut *pass else { return };
        debug_assert!(!pass.submitted[parameter], "one gradient a parameter");
        pass.submitted[parameter] = true;
        let bytes = layout.parameters()[parameter].bytes();
        let arrival = Arrival::new(parameter, gradient, bytes, &self.orders.gauge);
        let arrival = Arc::new(arrival);
        for bucket in layout.buckets_of(parameter) {
            let bucket = &mut pass.buckets[bucket];
            bucket.missing -= 1;
            bucket.arrivals.push(arrival.clone());
        }
        drop(arrival);
        while let Some(next) = pass.remaining.checked_sub(1)
            && pass.buckets[next].missing == 0
        {
            let arrivals = core::mem::take(&mut pass.buckets[next].arrivals);
            self.worker.reduce(next, arrivals);
            pass.remaining = next;
        }
    }

    /// Ends the pass: the reduced gradients, by parameter.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn finish(&self) -> Result<Vec<Reduced>, ZeroError> {
        for parameter in 0..self.orders.layout.parameters().len() {
            if self.takes(parameter) {
                self.submit(parameter, None);
            }
        }
        *self.pass.lock() = None;
        self.worker.finish()
    }

    /// The parameters that any rank finds non-finite.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn agree_on_non_finite(
        &self,
        own: &BTreeSet<usize>,
    ) -> Result<BTreeSet<usize>, ZeroError> {
        let parameters = 0..self.orders.layout.parameters().len();
        let own = parameters
            .clone()
            .map(|p| own.contains(&p).into())
            .collect();
        let label = "which gradients are non-finite";
        let findings = self.orders.group.gather_bytes(label, own)?;
        let found = |&p: &usize| findings.iter().any(|rank| rank[p] != 0);
        Ok(parameters.filter(found).collect())
    }
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange")
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}
