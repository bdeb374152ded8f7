//! Gradients that stay on the host as they are, until the step.

use std::collections::VecDeque;

use burn_backend::TensorData;

use super::layout::Layout;
use super::memory_tracker::TrackedBytes;
use crate::host::HostRead;

/// The gradients of a backward pass, being copied to the host. The device holds at most two buckets of them and one gradient.
pub(super) struct Landing {
    /// By parameter.
    gradients: Vec<Option<Gradient>>,
    arrived: Vec<bool>,
    /// Parameters whose copies were started and not waited for, the oldest first.
    underway: VecDeque<usize>,
    underway_elements: usize,
}

struct Gradient {
    copy: Copy,
    _held: TrackedBytes,
}

enum Copy {
    Underway(HostRead),
    Landed(TensorData),
}

impl Copy {
    fn data(self) -> TensorData {
        match self {
            Self::Underway(read) => read.data(),
            Self::Landed(data) => data,
        }
    }
}

impl Landing {
    pub(super) fn new(layout: &Layout) -> Self {
        let parameters = layout.parameters().len();
        Self {
            gradients: (0..parameters).map(|_| None).collect(),
            arrived: vec![false; parameters],
            underway: VecDeque::new(),
            underway_elements: 0,
        }
    }

    pub(super) fn has(&self, parameter: usize) -> bool {
        self.arrived[parameter]
    }

    /// Keeps a started copy, and waits for the oldest copies while more than two buckets of elements are in transfer.
    pub(super) fn submit(
        &mut self,
        layout: &Layout,
        parameter: usize,
        gradient: Option<(HostRead, TrackedBytes)>,
    ) {
        self.arrived[parameter] = true;
        let Some((read, held)) = gradient else { return };
        let copy = Copy::Underway(read);
        self.gradients[parameter] = Some(Gradient { copy, _held: held });
        self.underway.push_back(parameter);
        let elements = |parameter: usize| layout.parameters()[parameter].elements();
        self.underway_elements += elements(parameter);
        let most = layout.map().bucket_elements().saturating_mul(2);
        while self.underway_elements > most
            && self.underway.len() > 1
            && let Some(oldest) = self.underway.pop_front()
        {
            self.underway_elements -= elements(oldest);
            if let Some(Gradient { copy, _held }) = self.gradients[oldest].take() {
                let copy = Copy::Landed(copy.data());
                self.gradients[oldest] = Some(Gradient { copy, _held });
            }
        }
    }

    /// By parameter, in their own types.
    pub(super) fn finish(self) -> Vec<Option<TensorData>> {
        let gradients = self.gradients.into_iter();
        let data = gradients.map(|gradient| gradient.map(|gradient| gradient.copy.data()));
        data.collect()
    }
}
