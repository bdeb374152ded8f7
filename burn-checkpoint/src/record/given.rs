//! Tensors that no recorded operation computes: parameters and delivered tensors, and views and
//! casts of delivered tensors.

use std::sync::Arc;

use burn_backend::tensor::Device;
use burn_backend::{Backend, DType, DeviceOps, Shape, TensorMetadata};

use crate::budget::counted::CountedBytes;
use crate::host::ahead::Version;
use crate::host::request::{DELIVERED, Named, Request};
use crate::node::content::{Content, Home, State};
use crate::node::extent::Extent;
use crate::node::handle::{Handle, Managed};
use crate::node::kind::{Kind, Value};
use crate::node::meta::TensorMeta;
use crate::node::recipe::Upload;
use crate::node::recipe::{InType, Recipe};
use crate::node::source::Source;
use crate::node::{Node, Storage};
use crate::record::op::OpInfo;
use crate::record::work::Work;
use crate::record::{context, flags};
use crate::scope::units::Unit;

/// A parameter with a name. It is not counted, as other parameters are not.
pub(crate) fn parameter<B: Backend>(named: Named, value: Value<B>) -> Managed<B> {
    let number = flags::tick();
    let device = value.device().unwrap_or_default();
    let memory = context::memory_on(device.id());
    let (shape, dtype) = (value.shape(), value.dtype());
    let extent = Extent::of(&shape, dtype);
    let meta = TensorMeta {
        op: named.path,
        id: number,
        call: 0,
        shape,
        dtype,
        extent,
        device,
        contiguous: true,
        is_delivered: false,
    };
    let storage = Storage::Own(CountedBytes::resident(memory, 0));
    let state = State::new(Content::Kept(value), Home::of_parameter(named.unit));
    let node = Node::new(meta, storage, None, 1, state);
    Managed::first(Source::new(Arc::new(node)))
}

/// The tensor that was requested.
pub(crate) fn delivered<B: Backend>(request: Request, device: &Device<B>) -> Managed<B> {
    let promised = Promised {
        shape: request.shape.clone(),
        dtype: request.dtype,
        device: device.clone(),
        contiguous: true,
        viewed: None,
        unit: None,
    };
    let (device, place) = (device.clone(), request.place.clone());
    let upload = Arc::new(Upload { request, device });
    if let Some(place) = place {
        let version: Arc<dyn Version> = upload.clone();
        place.set(Arc::downgrade(&version));
    }
    derived(&DELIVERED, promised, upload)
}

/// A delivered tensor, or a view of one, in another type, if its elements can be delivered in that
/// type.
pub(crate) fn in_type<B: Backend>(node: &Node<B>, dtype: DType) -> Option<Managed<B>> {
    let InType { viewed, recipe } = node.recipe()?.in_type(dtype)?;
    let meta = &node.meta;
    let promised = Promised {
        shape: meta.shape.clone(),
        dtype,
        device: meta.device.clone(),
        contiguous: meta.contiguous,
        viewed,
        unit: node.state().home.unit().cloned(),
    };
    Some(derived(meta.op, promised, recipe))
}

/// What is known of a tensor before it is delivered, or computed from a delivered one.
pub(crate) struct Promised<B: Backend> {
    pub shape: Shape,
    pub dtype: DType,
    pub device: Device<B>,
    /// Whether a reshape of it is a view.
    contiguous: bool,
    /// The managed tensor that it is computed from.
    viewed: Option<Source<B>>,
    /// The unit of the parameter that it is a view or a cast of.
    unit: Option<Arc<Unit>>,
}

impl<B: Backend> Promised<B> {
    /// The dimensions in another order.
    pub fn permute(&mut self, change: impl FnOnce(&mut Vec<usize>)) {
        let mut dims = self.shape.to_vec();
        change(&mut dims);
        self.shape = Shape::from(dims);
    }

    /// Of the shape, type and device of its operand.
    pub fn like<K: Kind<B>>(handle: &Handle<B, K>) -> Self {
        Self {
            shape: handle.shape(),
            dtype: handle.dtype(),
            device: handle.device(),
            contiguous: false,
            viewed: match handle {
                Handle::Resident(..) => None,
                Handle::Managed(managed) => Some(managed.source()),
            },
            unit: handle.unit(),
        }
    }
}

/// A tensor that is resident only during its uses, and evicted until the first.
pub(crate) fn derived<B: Backend>(
    op: &'static OpInfo,
    promised: Promised<B>,
    recipe: Arc<dyn Recipe<B>>,
) -> Managed<B> {
    let number = context::tick(op).number;
    let viewed = promised.viewed.filter(|_| op.work == Work::View);
    let (shape, dtype, device) = (promised.shape, promised.dtype, promised.device);
    let extent = Extent::of(&shape, dtype);
    let memory = context::memory_on(device.id());
    let storage = match viewed {
        Some(viewed) => Storage::shared(viewed, memory),
        None => Storage::Own(CountedBytes::new(memory, extent.bytes)),
    };
    let meta = TensorMeta {
        op,
        id: number,
        call: 0,
        shape,
        dtype,
        extent,
        device,
        contiguous: promised.contiguous,
        is_delivered: true,
    };
    let content = Content::Delivered {
        value: None,
        recipe,
    };
    let node = Node::new(
        meta,
        storage,
        None,
        1,
        State::new(content, Home::of_parameter(promised.unit)),
    );
    Managed::first(Source::new(Arc::new(node)))
}
