//! This rank's elements of a parameter, in host memory or on the device.

use core::any::Any;
use core::ops::Range;
use std::sync::Arc;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Element, Shape, TensorData, TensorMetadata};
use burn_backend::Slice;
use burn_backend::tensor::{Device, FloatTensor};
use burn_checkpoint::unrecorded;
use burn_decorator::{HostRead, shared, upload};
use half::{bf16, f16};
use parking_lot::Mutex;

use super::NewValue;
use crate::host::read;
use crate::settings::Memory;

/// This rank's elements of a parameter: never written, as each update makes new ones, so that
/// versions of the model share those of parameters that do not change.
///
/// Whatever is done with them is [`unrecorded`]: a rank without elements of a parameter does
/// nothing, and scopes and budgets must evict the same tensors on all ranks.
pub(crate) struct Shard {
    /// In the parameter's type.
    own: Elements,
    /// The same, rounded to a lower type last.
    low: Mutex<Option<Elements>>,
    round: Box<Round>,
}

/// Rounds elements to a lower type, by the backend's own cast.
type Round = dyn Fn(&Elements, DType) -> Elements + Send + Sync;

impl Shard {
    /// Of these elements, in the parameter's type, in this memory.
    pub(crate) fn new<I: Backend>(own: NewValue<I>, memory: Memory, device: &Device<I>) -> Self {
        let own = unrecorded(|| match (own, memory) {
            (NewValue::Device(own), Memory::Device) => Elements::on_device::<I>(own),
            (NewValue::Device(own), Memory::Host) => Elements::on_host(read::<I>(own)),
            // No backend has to have tensors without elements.
            (NewValue::Host(own), Memory::Device) if own.num_elements() > 0 => {
                Elements::on_device::<I>(upload::<I>(own, device))
            }
            (NewValue::Host(own), _) => Elements::on_host(own),
        });
        let device = device.clone();
        Self {
            own,
            low: Mutex::default(),
            round: Box::new(move |own, low| own.cast::<I>(low, &device)),
        }
    }

    /// The elements for an optimizer, flat.
    ///
    /// # Panics
    ///
    /// If they are on a device of another backend.
    pub(crate) fn value<I: Backend>(&self) -> NewValue<I> {
        match &self.own {
            Elements::Host(own) => NewValue::Host(own.clone()),
            Elements::Device(own) => NewValue::Device(of_backend::<I>(own).clone()),
        }
    }

    /// Starts to read some of the elements.
    pub(crate) fn read(&self, range: Range<usize>) -> HostRead {
        match &self.own {
            Elements::Host(own) => HostRead::from_host(cut(own, &[range])),
            Elements::Device(own) => unrecorded(|| own.read(range)),
        }
    }

    /// The elements.
    pub(super) fn own(&self) -> &Elements {
        &self.own
    }

    /// The elements rounded to a lower type by the backend's own cast, in the memory where they
    /// are. They stay until another type is asked for, or
    /// [`forget_rounded`](Self::forget_rounded), so that a shard that does not change is rounded
    /// once.
    pub(super) fn rounded(&self, low: DType) -> Elements {
        let mut known = self.low.lock();
        if let Some(rounded) = known.as_ref().filter(|known| known.dtype() == low) {
            return rounded.clone();
        }
        let rounded = unrecorded(|| (self.round)(&self.own, low));
        known.insert(rounded).clone()
    }

    /// Rounds the elements before they are used, if they are in host memory: that waits for the
    /// device, which has nothing else to do after an update.
    pub(super) fn round_on_host(&self, low: DType) {
        if matches!(self.own, Elements::Host(_)) {
            self.rounded(low);
        }
    }

    /// Frees what [`rounded`](Self::rounded) keeps, for a parameter that is gathered in its own
    /// type from now on.
    pub(super) fn forget_rounded(&self) {
        *self.low.lock() = None;
    }
}

/// Elements of a parameter, flat: `[elements]`.
#[derive(Clone)]
pub(super) enum Elements {
    Host(TensorData),
    /// At least one.
    Device(Arc<dyn DeviceElements>),
}

impl Elements {
    /// Starts to read all of these; those on a device as one read, which waits for it once.
    pub(super) fn start_reads(all: &[Self]) -> Vec<HostRead> {
        let on_device = all.iter().filter_map(Self::as_device).collect::<Vec<_>>();
        let together = on_device
            .first()
            .map(|first| unrecorded(|| first.start_reads(&on_device)));
        let mut reads = together.into_iter().flatten();
        let each = all.iter().map(|elements| match elements {
            Self::Host(elements) => HostRead::from_host(elements.clone()),
            Self::Device(_) => reads.next().expect("one for each that is on a device"),
        });
        each.collect()
    }

    fn as_device(&self) -> Option<&Arc<dyn DeviceElements>> {
        match self {
            Self::Host(_) => None,
            Self::Device(elements) => Some(elements),
        }
    }

    fn on_host(mut elements: TensorData) -> Self {
        elements.shape = Shape::from(vec![elements.num_elements()]);
        Self::Host(shared(elements))
    }

    fn on_device<I: Backend>(elements: FloatTensor<I>) -> Self {
        let flat = Shape::from(vec![elements.shape().num_elements()]);
        let elements = I::float_reshape(elements, flat);
        Self::Device(Arc::new(OfBackend::<I>(elements)))
    }

    fn cast<I: Backend>(&self, dtype: DType, device: &Device<I>) -> Self {
        match self {
            Self::Host(own) if own.num_elements() == 0 => {
                Self::Host(own.clone().convert_dtype(dtype))
            }
            Self::Host(own) => {
                let own = I::float_from_data(own.clone(), device);
                Self::on_host(read::<I>(I::float_cast(own, dtype.into())))
            }
            Self::Device(own) => {
                let own = of_backend::<I>(own).clone();
                Self::on_device::<I>(I::float_cast(own, dtype.into()))
            }
        }
    }

    fn dtype(&self) -> DType {
        match self {
            Self::Host(elements) => elements.dtype,
            Self::Device(elements) => elements.dtype(),
        }
    }
}

/// A flat tensor on a device, of any backend.
pub(super) trait DeviceElements: Any + Send + Sync {
    /// Starts to read a range of it.
    fn read(&self, range: Range<usize>) -> HostRead;

    /// Starts to read all of these, of the same backend and device, as one read.
    fn start_reads(&self, all: &[&Arc<dyn DeviceElements>]) -> Vec<HostRead>;

    fn dtype(&self) -> DType;
}

/// A flat tensor of a backend.
struct OfBackend<I: Backend>(FloatTensor<I>);

impl<I: Backend> DeviceElements for OfBackend<I> {
    fn read(&self, range: Range<usize>) -> HostRead {
        let part = I::float_slice(self.0.clone(), &[Slice::from(range)]);
        HostRead::start::<I>(part)
    }

    fn start_reads(&self, all: &[&Arc<dyn DeviceElements>]) -> Vec<HostRead> {
        let all = all.iter().map(|elements| of_backend::<I>(elements).clone());
        HostRead::start_together::<I>(all.collect())
    }

    fn dtype(&self) -> DType {
        self.0.dtype()
    }
}

fn of_backend<I: Backend>(elements: &Arc<dyn DeviceElements>) -> &FloatTensor<I> {
    let elements: &dyn Any = &**elements;
    let OfBackend(tensor) = elements
        .downcast_ref::<OfBackend<I>>()
        .expect("the shards of a model are on its backend");
    tensor
}

/// The elements in these ranges of the flat tensor, flat.
pub(super) fn cut(data: &TensorData, ranges: &[Range<usize>]) -> TensorData {
    fn of_type<E: Element>(data: &TensorData, ranges: &[Range<usize>]) -> TensorData {
        let all = data.as_slice::<E>().expect("its own type");
        let parts: Vec<&[E]> = ranges.iter().map(|range| &all[range.clone()]).collect();
        let found = parts.concat();
        let shape = [found.len()];
        TensorData::new(found, shape)
    }
    match data.dtype {
        DType::F32 => of_type::<f32>(data, ranges),
        DType::BF16 => of_type::<bf16>(data, ranges),
        DType::F16 => of_type::<f16>(data, ranges),
        other => unreachable!("{other:?} is not exchanged"),
    }
}
