//! Uploads of delivered tensors before their use.
//!
//! Training uses its parameters in the same order in each step. So the uses of the tensors of an
//! [`UploadOrder`] are noted, and at each use the upload begins of what the step before used next.
//! What was uploaded for another use is dropped: an order that changes costs an upload and changes
//! no result.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, DType, DeviceOps, StreamId};
use burn_decorator::{UseOrder, upload};
use parking_lot::Mutex;

use crate::budget::counted::CountedBytes;
use crate::host::delivered::Delivery;
use crate::host::request::Request;
use crate::node::drops::Held;
use crate::node::extent::Extent;
use crate::record::context;

/// The order in which the tensors of a model are used that are [delivered](crate::delivered()) at
/// each use. Clones share it.
///
/// A tensor has an [`UploadPlace`] in it, which all of its versions share: each update of a
/// parameter makes a new version.
#[derive(Clone, Debug, Default)]
pub struct UploadOrder(Arc<Mutex<Order>>);

/// A tensor's place in an [`UploadOrder`]. What is delivered for this place last is its current
/// version: only that is uploaded before its use.
#[derive(Clone, Debug)]
pub struct UploadPlace {
    order: UploadOrder,
    index: usize,
}

/// A use of the tensor at a place, in a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Use {
    place: usize,
    dtype: DType,
}

#[derive(Default)]
struct Order {
    /// The current version of the tensor at each place.
    versions: Vec<Option<Weak<dyn Version>>>,
    /// The uses of the step before.
    expected: UseOrder<Use>,
    /// The uses of this step.
    uses: Vec<Use>,
    /// The stream of these uses. Another thread's are another sequence.
    stream: Option<StreamId>,
    /// The tensor that is on the device before its use.
    ahead: Option<Ahead>,
}

impl std::fmt::Debug for Order {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Order")
            .field("places", &self.versions.len())
            .field("uses", &self.uses.len())
            .finish_non_exhaustive()
    }
}

/// More than those of a step: a program without steps uses tensors without end.
const MOST_USES: usize = 1 << 16;

/// A version of a tensor, of any backend.
pub(crate) trait Version: Send + Sync {
    /// Begins its upload in this type, if its elements are at hand and the thread's memory has no
    /// limit.
    fn begin(&self, dtype: DType) -> Option<Ahead>;
}

/// A tensor that is on the device before its use.
pub(crate) struct Ahead {
    /// The tensor of the inner backend.
    tensor: Box<dyn Any + Send>,
    /// What delivers its elements: other versions deliver others.
    delivery: Weak<dyn Delivery>,
    dtype: DType,
    _counted: CountedBytes,
}

/// What an order says at a use.
struct Noted {
    /// What was uploaded before a use, this one or another.
    ahead: Option<Ahead>,
    /// What to upload next.
    next: Option<Next>,
}

/// A version that is expected to be used next.
struct Next {
    version: Arc<dyn Version>,
    dtype: DType,
}

impl UploadOrder {
    /// An order of no tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// A further place.
    pub fn place(&self) -> UploadPlace {
        let mut order = self.0.lock();
        order.versions.push(None);
        UploadPlace {
            order: self.clone(),
            index: order.versions.len() - 1,
        }
    }
}

impl UploadPlace {
    /// From now on this is the tensor's version. A step ends where a version replaces another one.
    pub(crate) fn set(&self, version: Weak<dyn Version>) {
        let mut order = self.order.0.lock();
        let before = order.versions[self.index].replace(version);
        let unneeded = before.and_then(|_| order.end_step());
        drop(order);
        drop(unneeded);
    }

    /// The tensor for a use, uploaded now unless it was before. Then begins to upload what is
    /// expected to be used next.
    pub(crate) fn deliver<B: Backend>(
        &self,
        request: &Request,
        device: &Device<B>,
    ) -> FloatTensor<B> {
        let used = Use {
            place: self.index,
            dtype: request.dtype,
        };
        let is_expected = |ahead: &Ahead| ahead.is_of(request);
        let Noted { ahead, next } = self.order.0.lock().used(used);
        let expected = ahead.filter(is_expected).map(|ahead| ahead.tensor);
        let uploaded = expected.and_then(|any| any.downcast::<Held<FloatTensor<B>>>().ok());
        let tensor = match uploaded {
            Some(tensor) => tensor.into_inner(),
            None => upload::<B>(request.data(), device),
        };
        if let Some(Next { version, dtype }) = next {
            // A panic, such as for want of memory, is of no use yet: the use tries again.
            let begin = AssertUnwindSafe(|| version.begin(dtype));
            let begun = catch_unwind(begin).ok().flatten();
            self.order.0.lock().ahead = begun;
        }
        tensor
    }
}

impl Order {
    /// Notes a use.
    fn used(&mut self, used: Use) -> Noted {
        let stream = StreamId::current();
        if self.stream.replace(stream) != Some(stream) {
            // Taken on the stream that uploaded it only.
            self.ahead = None;
        }
        if self.uses.len() < MOST_USES {
            self.uses.push(used);
        }
        let next = self.expected.next(used).and_then(|next| {
            let version = self.versions[next.place].as_ref()?.upgrade()?;
            let dtype = next.dtype;
            Some(Next { version, dtype })
        });
        let ahead = self.ahead.take();
        Noted { ahead, next }
    }

    /// The next step is expected to be as this one. What was uploaded before its use is of an old
    /// version.
    fn end_step(&mut self) -> Option<Ahead> {
        if !self.uses.is_empty() {
            self.expected.expect(std::mem::take(&mut self.uses));
        }
        self.ahead.take()
    }
}

impl Ahead {
    /// Begins to upload the elements of a request in another type or its own; `None` if they are
    /// not at hand, or the thread's memory has a limit: what a budget evicts must not depend on
    /// what may be used next.
    pub(crate) fn begin<B: Backend>(
        request: &Request,
        dtype: DType,
        device: &Device<B>,
    ) -> Option<Self> {
        let memory = context::memory_on(device.id());
        if memory.budget().is_some() {
            return None;
        }
        let data = request.at_hand(dtype)?;
        let bytes = Extent::of(&request.shape, dtype).bytes;
        Some(Self {
            tensor: Box::new(Held::new(upload::<B>(data, device))),
            delivery: Arc::downgrade(&request.delivery),
            dtype,
            _counted: CountedBytes::resident(memory, bytes),
        })
    }

    /// Whether it is what a request delivers.
    fn is_of(&self, request: &Request) -> bool {
        self.dtype == request.dtype
            && std::ptr::addr_eq(self.delivery.as_ptr(), Arc::as_ptr(&request.delivery))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What nothing is uploaded of.
    struct Nothing;

    impl Version for Nothing {
        fn begin(&self, _dtype: DType) -> Option<Ahead> {
            None
        }
    }

    /// An order of places with versions that live as long as the result.
    struct Places {
        order: UploadOrder,
        places: Vec<UploadPlace>,
        versions: Vec<Arc<dyn Version>>,
    }

    impl Places {
        fn new(count: usize) -> Self {
            let order = UploadOrder::new();
            let mut places = Self {
                places: (0..count).map(|_| order.place()).collect(),
                versions: Vec::new(),
                order,
            };
            places.update();
            places
        }

        /// Ends a step.
        fn update(&mut self) {
            self.versions.clear();
            for place in &self.places {
                let version: Arc<dyn Version> = Arc::new(Nothing);
                place.set(Arc::downgrade(&version));
                self.versions.push(version);
            }
        }

        /// The place that is expected after each use.
        fn expected(&self, used: &[usize]) -> Vec<Option<usize>> {
            let each = used.iter().map(|&place| {
                let dtype = DType::F32;
                let next = self.order.0.lock().used(Use { place, dtype }).next?;
                let mut versions = self.versions.iter();
                versions.position(|own| Arc::ptr_eq(own, &next.version))
            });
            each.collect()
        }
    }

    const STEP: [usize; 6] = [0, 1, 2, 2, 1, 0];

    #[test]
    fn a_step_like_the_one_before_is_expected_whole() {
        let mut places = Places::new(3);
        assert_eq!(places.expected(&STEP), [None; 6]);
        for _ in 0..2 {
            places.update();
            let next = STEP.iter().skip(1).copied().map(Some);
            let next: Vec<_> = next.chain([None]).collect();
            assert_eq!(places.expected(&STEP), next);
        }
    }

    #[test]
    fn the_order_of_the_last_step_counts() {
        let mut places = Places::new(3);
        places.expected(&[0, 1, 2]);
        places.update();
        assert_eq!(places.expected(&[0, 2, 1]), [Some(1), None, Some(2)]);
        places.update();
        assert_eq!(places.expected(&[0, 2, 1]), [Some(2), Some(1), None]);
    }

    #[test]
    fn what_is_remembered_without_steps_is_bounded() {
        let places = Places::new(2);
        let uses: Vec<_> = (0..2 * MOST_USES).map(|use_| use_ % 2).collect();
        assert!(places.expected(&uses).iter().all(Option::is_none));
        assert_eq!(places.order.0.lock().uses.len(), MOST_USES);
    }
}
