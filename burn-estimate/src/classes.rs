//! The kind of each storage, from the phases of the step.

use std::cell::OnceCell;

use crate::departures::Departures;
use crate::ledger::{Phase, Recording, Storage};
use crate::uses::Brought;

/// What memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Parameters, and running statistics: the tensors of the module.
    Parameter,
    /// What backward leaves behind.
    Gradient,
    /// What outlives the step and is no parameter: the optimizer's state.
    OptimizerState,
    /// What forward leaves behind for backward.
    Activation,
    /// Booleans and random numbers that forward leaves behind for backward: masks of attention and
    /// dropout.
    Mask,
    /// Data of the host: the batch.
    Input,
    /// What is freed before its phase of the step ends, the workspace of kernels included.
    Temporary,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::Parameter,
        Self::Gradient,
        Self::OptimizerState,
        Self::Activation,
        Self::Mask,
        Self::Input,
        Self::Temporary,
    ];
}

/// Where a step's phases begin, and so what its storages are for.
pub(crate) struct Classes<'a> {
    pub recording: &'a Recording,
    /// When the optimizer begins: when the first storage that outlives the step is allocated.
    pub update: u64,
    /// The uses before the update that bring a parameter to the device, once they were asked for.
    pub(crate) brought: OnceCell<Vec<Brought<'a>>>,
    /// How gradients leave the device, once it was asked for.
    pub(crate) departures: OnceCell<Departures>,
}

impl<'a> Classes<'a> {
    pub fn new(recording: &'a Recording) -> Self {
        let backward = recording
            .phases
            .iter()
            .rfind(|(_, phase)| *phase == Phase::Backward);
        let backward = backward.map_or(recording.start, |(at, _)| *at);
        let outlives = |storage: &&Storage| storage.died == u64::MAX && storage.born > backward;
        let survivors = recording.storages.iter().filter(outlives);
        let update = survivors.map(|storage| storage.born).min();
        Self {
            recording,
            update: update.unwrap_or(u64::MAX),
            brought: OnceCell::new(),
            departures: OnceCell::new(),
        }
    }

    /// Bytes of the parameters that are trained, old and new ones once.
    pub fn trained_bytes(&self) -> u64 {
        let known = self.recording.trained_bytes;
        known.unwrap_or_else(|| self.parameter_bytes())
    }

    /// Bytes of the parameters that are on the device when the step begins.
    pub fn parameter_bytes(&self) -> u64 {
        let storages = self.recording.storages.iter();
        let old = storages.filter(|it| it.parameter.is_some() && it.born <= self.recording.start);
        old.map(|storage| storage.bytes).sum()
    }

    /// Whether the parameters were in host memory in the run already.
    pub fn has_parameters_on_host(&self) -> bool {
        self.parameter_bytes() < self.trained_bytes()
    }

    /// Whether the backward pass has ended by then: sums and norms of gradients are computed, and
    /// the optimizer steps.
    pub fn is_of_update(&self, at: u64) -> bool {
        self.phase(at) == Phase::Update
    }

    pub fn backwards(&self) -> u64 {
        let phases = self.recording.phases.iter();
        let backward = phases.filter(|(_, phase)| *phase == Phase::Backward);
        backward.count() as u64
    }

    /// When the last micro-batch began.
    pub fn last_forward(&self) -> u64 {
        let mut phases = self.recording.phases.iter();
        let last = phases.rfind(|(_, phase)| *phase == Phase::Forward);
        last.map_or(self.recording.start, |(at, _)| *at)
    }

    pub fn phase(&self, at: u64) -> Phase {
        if at >= self.update {
            return Phase::Update;
        }
        let before = self
            .recording
            .phases
            .iter()
            .rfind(|(begun, _)| *begun <= at);
        before.map_or(Phase::Forward, |(_, phase)| *phase)
    }

    /// The end of the phase in which a storage is born.
    pub fn end(&self, born: u64) -> u64 {
        let mut later = self.recording.phases.iter().map(|(begun, _)| *begun);
        let next = later.find(|begun| *begun >= born).unwrap_or(u64::MAX);
        next.min(self.update)
    }

    pub fn kind(&self, storage: &Storage) -> Kind {
        if storage.parameter.is_some() {
            return Kind::Parameter;
        }
        if storage.row.name.ends_with("_from_data") {
            return Kind::Input;
        }
        if storage.born <= self.recording.start || storage.died == u64::MAX {
            return Kind::OptimizerState;
        }
        let stays = storage.died > self.end(storage.born);
        match self.phase(storage.born) {
            Phase::Forward if stays && storage.is_mask => Kind::Mask,
            Phase::Forward if stays => Kind::Activation,
            // Sums of micro-batches too.
            Phase::Backward | Phase::Update if stays => Kind::Gradient,
            _ => Kind::Temporary,
        }
    }
}
