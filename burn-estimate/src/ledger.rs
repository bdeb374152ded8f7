//! The storages that are alive on a device, and a recording of those that were.
//!
//! A *storage* is memory that one or more tensors share: views of each other. It is freed with its
//! last tensor. The clock counts allocations and frees.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use burn_backend::DType;
use burn_checkpoint::{Recorder, is_replaying, recorder};
use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};
use rustc_hash::FxHashMap;

use crate::cubecl;
use crate::device::Kernels;
use crate::rules::{self, Operand, Placement, Row, View, bytes};

/// A part of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The loss is computed.
    Forward,
    /// Gradients are computed: from the first gradient of a backward pass on, that of a loss of one
    /// element. One that is not reduced by a mean or a sum stays in [`Forward`](Self::Forward).
    Backward,
    /// The optimizer steps.
    Update,
}

/// Memory that tensors share.
#[derive(Clone, Debug)]
pub(crate) struct Storage {
    pub bytes: u64,
    /// Tensors on it.
    tensors: usize,
    /// The operation that allocated it.
    pub row: &'static Row,
    /// The module whose parameter was used last before it was allocated.
    pub owner: Option<Arc<str>>,
    /// The parameter that was used with it or next after its last use: an optimizer computes its
    /// state before it touches the parameter.
    pub next: Arc<OnceLock<Arc<str>>>,
    /// Its parameter, if the storage is one.
    pub parameter: Option<Arc<str>>,
    /// The single parameter that it is computed from, as a cast or a transposed copy is.
    pub source: Option<Source>,
    /// When operations use it, for a parameter and for what is computed from a single one.
    pub uses: Vec<Use>,
    /// When the storage was allocated that it is a cast of, if it is one.
    pub cast_from: Option<u64>,
    /// Whether its elements are booleans or random numbers.
    pub is_mask: bool,
    pub born: u64,
    /// When an operation of the phase in which it was allocated last began to use it.
    pub last_used: u64,
    /// When an operation of any phase last began to use it.
    pub last_touched: u64,
    /// `u64::MAX` while it is alive.
    pub died: u64,
}

impl Storage {
    /// The single parameter that it is computed from, or its own if it is one.
    fn source(&self) -> Option<Source> {
        let own = self.parameter.as_ref().map(|parameter| Source {
            parameter: parameter.clone(),
            bytes: self.bytes,
            cast_bytes: None,
        });
        own.or_else(|| self.source.clone())
    }
}

/// The origin of a storage that is computed from a single parameter.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    pub parameter: Arc<str>,
    /// Bytes of the parameter.
    pub bytes: u64,
    /// Bytes of the parameter in the type to which it is cast first, if it is.
    pub cast_bytes: Option<u64>,
}

/// A use of a parameter, or of what is computed from a single one.
#[derive(Clone, Debug)]
pub(crate) struct Use {
    /// From before the operation's results are allocated until after.
    pub during: Range<u64>,
    pub phase: Phase,
    /// Bytes of the result, where the operation casts it.
    pub cast_bytes: Option<u64>,
    /// Whether the operation has no other operands.
    pub is_alone: bool,
}

/// What one operation does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    /// When.
    pub at: u64,
    /// Bytes that it reads and writes.
    pub bytes: u64,
    /// Floating-point operations: those of products, and for other operations one an element of the
    /// result.
    pub flops: u64,
    /// Exponentials and the like.
    pub functions: u64,
    /// Elements that are read in another order than they lie in.
    pub reordered: u64,
    /// Whether it computes in a type of two bytes.
    pub is_half: bool,
    /// Whether a scope or a budget records the operation.
    pub recorder: Recorder,
}

/// What moves between host and device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    /// When.
    pub at: u64,
    pub uploaded_bytes: u64,
    pub downloaded_bytes: u64,
}

/// A recording.
#[derive(Debug, Default)]
pub(crate) struct Recording {
    /// When it began.
    pub start: u64,
    /// Bytes of the parameters that are trained, in whatever memory they are, if it is known.
    pub trained_bytes: Option<u64>,
    /// All storages that were alive at some time of it.
    pub storages: Vec<Storage>,
    /// When phases began.
    pub phases: Vec<(u64, Phase)>,
    pub costs: Vec<Cost>,
    pub transfers: Vec<Transfer>,
}

/// An operation with what its thread was doing.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub op: OperationIr,
    row: &'static Row,
    recorder: Recorder,
    is_replaying: bool,
}

impl Call {
    /// An operation of this thread.
    pub fn new(op: OperationIr, row: &'static Row) -> Self {
        let is_replaying = is_replaying();
        Self {
            op,
            row,
            // A replay takes the host about as long as recording in a scope.
            recorder: match recorder() {
                Recorder::None if is_replaying => Recorder::Scope,
                recorder => recorder,
            },
            is_replaying,
        }
    }

    fn is_half(&self) -> bool {
        let mut tensors = self.op.inputs().chain(self.op.outputs());
        tensors.any(|tensor| tensor.dtype.size() == 2)
    }
}

/// The tensors and storages of a device.
#[derive(Debug)]
pub(crate) struct Ledger {
    kernels: Kernels,
    tensors: FxHashMap<TensorId, View>,
    storages: FxHashMap<u64, Storage>,
    next: u64,
    clock: u64,
    phase: Phase,
    phase_began: u64,
    owner: Option<Arc<str>>,
    /// The parameter that is used next; set when it is used.
    upcoming: Arc<OnceLock<Arc<str>>>,
    recording: Option<Recording>,
}

impl Ledger {
    pub fn new(kernels: Kernels) -> Self {
        Self {
            kernels,
            tensors: FxHashMap::default(),
            storages: FxHashMap::default(),
            next: 0,
            clock: 0,
            phase: Phase::Forward,
            phase_began: 0,
            owner: None,
            upcoming: Arc::default(),
            recording: None,
        }
    }

    pub fn bytes_in_use(&self) -> u64 {
        self.storages.values().map(|storage| storage.bytes).sum()
    }

    /// Ends a backward pass.
    pub fn backward_ended(&mut self) {
        if self.phase == Phase::Backward {
            self.enter(Phase::Update);
        }
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        if let Some(recording) = &mut self.recording {
            // After all allocations of the last phase.
            self.clock += 1;
            self.phase_began = self.clock;
            recording.phases.push((self.clock, phase));
        }
    }

    /// Begins a recording.
    pub fn start(&mut self) {
        self.phase = Phase::Forward;
        self.owner = None;
        self.recording = Some(Recording {
            start: self.clock,
            phases: vec![(self.clock, Phase::Forward)],
            ..Recording::default()
        });
    }

    /// Ends the recording.
    pub fn stop(&mut self) -> Recording {
        let mut recording = self.recording.take().unwrap_or_default();
        recording.storages.extend(self.storages.values().cloned());
        recording
    }

    /// Follows an operation, or the end of a tensor.
    pub fn register(&mut self, call: &Call) {
        let (op, row) = (&call.op, call.row);
        match op {
            OperationIr::Drop(tensor) => return self.forget(tensor.id),
            // `write` has registered it.
            OperationIr::Init(_) => return,
            _ => {}
        }
        let inputs: Vec<_> = op.inputs().collect();
        self.follow(call);
        let plan = {
            let operands: Vec<_> = inputs.iter().map(|input| self.operand(input)).collect();
            match self.kernels {
                Kernels::Flex => rules::plan(op, row, &operands),
                kernels => cubecl::plan(op, &operands, kernels),
            }
        };
        let workspace = plan.workspace_bytes;
        let begun = self.clock;
        self.clock += 1;
        for (output, placement) in op.outputs().zip(plan.placements) {
            self.place(output, placement, row);
        }
        self.shrink(workspace, row);
        if plan.moves && self.recording.is_some() {
            let outputs: Vec<_> = op.outputs().collect();
            self.follow_sources(&[call], &inputs, &outputs, begun);
        }
        self.forget_used(&inputs);
        if let Some(recording) = &mut self.recording {
            let read: usize = rules::reads(op, row).map(|(_, bytes)| bytes).sum();
            let moved = read + op.outputs().map(bytes).sum::<usize>();
            recording.costs.push(Cost {
                at: self.clock,
                bytes: if plan.moves { moved as u64 } else { 0 },
                flops: plan.flops,
                functions: rules::functions(op, row),
                reordered: plan.reordered,
                is_half: call.is_half(),
                recorder: call.recorder,
            });
        }
    }

    #[cfg(feature = "fusion")]
    /// Follows operations that run as one kernel: it makes only those of their results that are
    /// used later.
    pub fn register_kernel(&mut self, calls: &[&Call]) {
        calls.iter().for_each(|call| self.follow(call));
        let row = calls[0].row;
        let mut made: Vec<&TensorIr> = Vec::new();
        let mut inputs: Vec<&TensorIr> = Vec::new();
        let mut last: FxHashMap<TensorId, &TensorIr> = FxHashMap::default();
        for input in calls.iter().flat_map(|call| call.op.inputs()) {
            last.insert(input.id, input);
        }
        let ends = |id: &TensorId| {
            let used = last.get(id);
            used.is_some_and(|used| used.status == TensorStatus::ReadWrite)
        };
        for call in calls {
            for input in call.op.inputs() {
                let is_known = inputs.iter().any(|known| known.id == input.id);
                if !is_known && self.tensors.contains_key(&input.id) {
                    inputs.push(last[&input.id]);
                }
            }
            made.extend(call.op.outputs().filter(|output| !ends(&output.id)));
        }
        let mut placements = Vec::new();
        let mut in_place = Vec::new();
        {
            let operands: Vec<_> = inputs.iter().map(|input| self.operand(input)).collect();
            let mut free = cubecl::in_place_of_kernel(calls.iter().map(|call| &call.op), &operands);
            for output in &made {
                let mut ops = calls.iter().map(|call| &call.op);
                let op = ops.find(|op| op.outputs().any(|made| made.id == output.id));
                let view = op.and_then(|op| {
                    let input = op.inputs().next()?;
                    let operand = operands.iter().position(|it| it.tensor.id == input.id)?;
                    cubecl::view(op, &operands[operand..=operand], self.kernels)
                });
                placements.push(view.unwrap_or_else(|| {
                    let fits = |operand: &&Operand| {
                        (operand.tensor.dtype, &operand.tensor.shape)
                            == (output.dtype, &output.shape)
                    };
                    match free.iter().position(fits) {
                        Some(operand) => {
                            let operand = free.remove(operand);
                            in_place.push((operand.view.storage, output.dtype));
                            operand.as_it_is()
                        }
                        None => Placement::New(None),
                    }
                }));
            }
        }
        let begun = self.clock;
        self.clock += 1;
        for (output, placement) in made.iter().zip(placements) {
            match placement {
                // Its rows follow each other without gaps.
                Placement::New(_) => {
                    let strides = rules::row_major(&output.shape);
                    let view = self.allocate_as(output, row, strides, bytes(output) as u64);
                    self.insert(output.id, view);
                }
                shared => self.place(output, shared, row),
            }
        }
        if self.recording.is_some() {
            self.follow_sources(calls, &inputs, &made, begun);
        }
        for (storage, dtype) in in_place {
            self.renew(storage, row, dtype);
        }
        self.forget_used(&inputs);
        if let Some(recording) = &mut self.recording {
            let mut read: FxHashMap<TensorId, usize> = FxHashMap::default();
            for call in calls {
                for (input, bytes) in rules::reads(&call.op, call.row) {
                    *read.entry(input.id).or_default() += bytes;
                }
            }
            // An operand that several operations use is read once.
            let read = inputs.iter().map(|input| bytes(input).min(read[&input.id]));
            let made = made.iter().map(|result| bytes(result));
            let moved = read.chain(made).sum::<usize>();
            for (nth, call) in calls.iter().enumerate() {
                let is_first = nth == 0;
                let sum = |of: fn(&OperationIr, &'static Row) -> u64| -> u64 {
                    let all = calls.iter().map(|call| of(&call.op, call.row));
                    if is_first { all.sum() } else { 0 }
                };
                recording.costs.push(Cost {
                    at: self.clock,
                    bytes: if is_first { moved as u64 } else { 0 },
                    flops: sum(|op, _| rules::flops(op)),
                    functions: sum(rules::functions),
                    reordered: 0,
                    is_half: call.is_half(),
                    recorder: call.recorder,
                });
            }
        }
    }

    fn place(&mut self, output: &TensorIr, placement: Placement, row: &'static Row) {
        let view = match placement {
            Placement::Shared(view) => view,
            Placement::New(None) => self.allocate(output, row),
            Placement::New(Some(strides)) => View {
                strides,
                ..self.allocate(output, row)
            },
        };
        self.insert(output.id, view);
    }

    /// Forgets the inputs whose last use this was.
    fn forget_used(&mut self, inputs: &[&TensorIr]) {
        for input in inputs {
            if input.status == TensorStatus::ReadWrite {
                self.forget(input.id);
            }
        }
    }

    /// Follows data that is written from the host.
    pub fn write(&mut self, tensor: &TensorIr, row: &'static Row) {
        let view = self.allocate(tensor, row);
        self.insert(tensor.id, view);
        self.transfer(bytes(tensor) as u64, 0);
    }

    /// Follows data that is read to the host.
    pub fn read(&mut self, tensor: &TensorIr) {
        self.transfer(0, bytes(tensor) as u64);
        if tensor.status == TensorStatus::ReadWrite {
            self.forget(tensor.id);
        }
    }

    fn transfer(&mut self, uploaded_bytes: u64, downloaded_bytes: u64) {
        let transfer = Transfer {
            at: self.clock,
            uploaded_bytes,
            downloaded_bytes,
        };
        let recording = self.recording.iter_mut();
        recording.for_each(|recording| recording.transfers.push(transfer));
    }

    /// Marks the operand of an operation that is not run as the parameter of this name.
    pub fn touch(&mut self, op: &OperationIr, label: Arc<str>) {
        if let OperationIr::Drop(tensor) = op {
            return self.forget(tensor.id);
        }
        let inputs: Vec<_> = op.inputs().collect();
        let Some(first) = inputs.first() else {
            return;
        };
        let view = self.tensors[&first.id].clone();
        if let Some(storage) = self.storages.get_mut(&view.storage) {
            storage.parameter = Some(label);
        }
        for output in op.outputs() {
            self.insert(output.id, view.clone());
        }
        self.forget_used(&inputs);
    }

    /// Updates the phase, and the owner: the parameter that was used last.
    fn follow(&mut self, call: &Call) {
        let (op, row) = (&call.op, call.row);
        let mut parameter = None;
        for input in op.inputs() {
            let view = self.tensors.get(&input.id);
            if let Some(storage) = view.and_then(|view| self.storages.get_mut(&view.storage)) {
                storage.next = self.upcoming.clone();
                storage.last_touched = self.clock;
                if storage.born >= self.phase_began {
                    storage.last_used = self.clock;
                }
                parameter = parameter.or_else(|| storage.parameter.clone());
            }
        }
        if let Some(parameter) = parameter {
            let _ = std::mem::take(&mut self.upcoming).set(parameter.clone());
            self.owner = Some(parameter);
        }
        let phase = match self.phase {
            _ if rules::begins_backward(op, row) => Phase::Backward,
            // A replay of what a scope or a budget evicted runs operations of the forward pass.
            Phase::Backward | Phase::Update if rules::is_forward(row) && !call.is_replaying => {
                Phase::Forward
            }
            phase => phase,
        };
        if phase != self.phase {
            self.enter(phase);
        }
    }

    /// Notes what a kernel that began at `begun` computes from a single parameter, and its uses of
    /// such storages.
    fn follow_sources(
        &mut self,
        calls: &[&Call],
        inputs: &[&TensorIr],
        outputs: &[&TensorIr],
        begun: u64,
    ) {
        let storage = |tensor: &&TensorIr| self.tensors.get(&tensor.id).map(|view| view.storage);
        let inputs: Vec<_> = inputs.iter().filter_map(storage).collect();
        let outputs: Vec<_> = outputs.iter().filter_map(storage).collect();
        let cast = calls.iter().find(|call| call.row.name == "float_cast");
        let cast_bytes = cast.and_then(|call| call.op.outputs().next());
        let cast_bytes = cast_bytes.map(|output| bytes(output) as u64);
        let cast_from = cast.and_then(|call| storage(&call.op.inputs().next()?));
        let cast_from = cast_from.map(|storage| self.storages[&storage].born);
        let sources = inputs.iter().map(|input| self.storages[input].source());
        let sources: Option<Vec<_>> = sources.collect();
        let source = sources.and_then(|sources| sources.into_iter().next());
        let source = source.map(|source| Source {
            cast_bytes: source.cast_bytes.or(cast_bytes),
            ..source
        });
        let is_alone = source.is_some();
        let new = outputs.iter().filter(|output| !inputs.contains(output));
        for output in new {
            if let Some(output) = self.storages.get_mut(output) {
                output.source.clone_from(&source);
                output.cast_from = cast_from;
            }
        }
        let used = Use {
            during: begun..self.clock + 1,
            phase: self.phase,
            cast_bytes,
            is_alone,
        };
        for input in inputs.iter().collect::<BTreeSet<_>>() {
            let input = self.storages.get_mut(input);
            let input = input.filter(|input| input.source().is_some());
            input
                .into_iter()
                .for_each(|input| input.uses.push(used.clone()));
        }
    }

    fn operand<'a>(&'a self, tensor: &'a TensorIr) -> Operand<'a> {
        let view = &self.tensors[&tensor.id];
        let storage = &self.storages[&view.storage];
        Operand {
            tensor,
            view,
            storage_bytes: storage.bytes,
            is_unique: tensor.status == TensorStatus::ReadWrite && storage.tensors == 1,
        }
    }

    fn insert(&mut self, id: TensorId, view: View) {
        if let Some(storage) = self.storages.get_mut(&view.storage) {
            storage.tensors += 1;
        }
        self.tensors.insert(id, view);
    }

    fn forget(&mut self, id: TensorId) {
        // An operand that is listed twice is forgotten once.
        let Some(view) = self.tensors.remove(&id) else {
            return;
        };
        let Some(storage) = self.storages.get_mut(&view.storage) else {
            return;
        };
        storage.tensors -= 1;
        if storage.tensors > 0 {
            return;
        }
        if let Some(mut storage) = self.storages.remove(&view.storage) {
            self.clock += 1;
            storage.died = self.clock;
            if let Some(recording) = &mut self.recording {
                recording.storages.push(storage);
            }
        }
    }

    fn storage(&self, bytes: u64, row: &'static Row, dtype: DType) -> Storage {
        Storage {
            bytes,
            tensors: 0,
            row,
            owner: self.owner.clone(),
            next: self.upcoming.clone(),
            parameter: None,
            source: None,
            uses: Vec::new(),
            cast_from: None,
            is_mask: dtype.is_bool() || row.name.ends_with("_random"),
            born: self.clock,
            last_used: self.clock,
            last_touched: self.clock,
            died: u64::MAX,
        }
    }

    /// Ends a storage whose memory becomes another one's: a kernel may write a new parameter into
    /// the memory of its gradient.
    #[cfg(feature = "fusion")]
    fn renew(&mut self, storage: u64, row: &'static Row, dtype: DType) {
        let Some(ended) = self.storages.get(&storage) else {
            return;
        };
        let new = Storage {
            tensors: ended.tensors,
            next: ended.next.clone(),
            source: ended.source.clone(),
            ..self.storage(ended.bytes, row, dtype)
        };
        let ended = self.storages.insert(storage, new);
        if let Some(recording) = &mut self.recording {
            recording.storages.extend(ended.map(|ended| Storage {
                died: self.clock,
                ..ended
            }));
        }
    }

    fn allocate(&mut self, tensor: &TensorIr, row: &'static Row) -> View {
        let (strides, bytes) = cubecl::layout(tensor, self.kernels);
        self.allocate_as(tensor, row, strides, bytes)
    }

    fn allocate_as(
        &mut self,
        tensor: &TensorIr,
        row: &'static Row,
        strides: Vec<isize>,
        bytes: u64,
    ) -> View {
        self.clock += 1;
        let storage = self.storage(bytes, row, tensor.dtype);
        self.next += 1;
        self.storages.insert(self.next, storage);
        View {
            storage: self.next,
            strides,
            offset: 0,
        }
    }

    /// Frees a kernel's workspace, which was allocated before the result.
    fn shrink(&mut self, bytes: u64, row: &'static Row) {
        if bytes == 0 {
            return;
        }
        self.clock += 1;
        let mut workspace = self.storage(bytes, row, DType::U8);
        workspace.died = self.clock;
        if let Some(recording) = &mut self.recording {
            // Alive with every result of the operation.
            workspace.born -= 1;
            recording.storages.push(workspace);
        }
    }
}
