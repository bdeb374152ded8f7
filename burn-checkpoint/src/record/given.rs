//! Tensors that no recorded operation computes: parameters and delivered tensors, and views and
//! casts of delivered tensors.

use std::sync::Arc;

use burn_backend::tensor::Device;
use burn_backend::{Backend, DType, DeviceOps, Shape, TensorMetadata};

use crate::host::ahead::Version;
use crate::host::request::{DELIVERED, Request};
use crate::node::entry::Origin;
use crate::node::extent::Extent;
use crate::node::handle::{Handle, Managed};
use crate::node::kind::{Kind, Value};
use crate::node::recipe::Upload;
use crate::node::{Node, Recipe, Source, Storage, TensorMeta};
use crate::record::context;
use crate::record::op::OpInfo;
use crate::record::work::Work;

/// A parameter with a name. It is not counted, as other parameters are not.
pub(crate) fn parameter<B: Backend>(path: &'static OpInfo, value: Value<B>) -> Managed<B> {
    let number = context::tick(path).number;
    let device = value.device().unwrap_or_default();
    let memory = context::memory_on(device.id());
    let (shape, dtype) = (value.shape(), value.dtype());
    let extent = Extent::of(&shape, dtype);
    let meta = TensorMeta {
        bytes: 0,
        ..TensorMeta::new(path, number, shape, dtype, extent, device, memory)
    };
    meta.storage_added();
    let node = Node::new(meta, Storage::Resident(value), Origin::Fixed, None, None);
    Managed::new(Source::new(Arc::new(node)))
}

/// The tensor that was requested.
pub(crate) fn delivered<B: Backend>(request: Request, device: &Device<B>) -> Managed<B> {
    let promised = Promised {
        shape: request.shape.clone(),
        dtype: request.dtype,
        device: device.clone(),
        row_major: true,
        viewed: None,
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
    let (viewed, recipe) = node.recipe()?.in_type(dtype)?;
    let meta = &node.meta;
    let promised = Promised {
        shape: meta.shape.clone(),
        dtype,
        device: meta.device.clone(),
        row_major: meta.row_major,
        viewed,
    };
    Some(derived(meta.op, promised, recipe))
}

/// What is known of a tensor before it is delivered, or computed from a delivered one.
pub(crate) struct Promised<B: Backend> {
    pub shape: Shape,
    pub dtype: DType,
    pub device: Device<B>,
    row_major: bool,
    /// The managed tensor that it is computed from.
    viewed: Option<Source<B>>,
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
            row_major: false,
            viewed: match handle {
                Handle::Resident(..) => None,
                Handle::Managed(managed) => Some(managed.source()),
            },
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
    let group = viewed.map(|viewed| viewed.node().meta.group.clone().unwrap_or(viewed));
    let (shape, dtype, device) = (promised.shape, promised.dtype, promised.device);
    let extent = Extent::of(&shape, dtype);
    let memory = context::memory_on(device.id());
    let meta = TensorMeta {
        is_delivered: true,
        contiguous: promised.row_major,
        row_major: promised.row_major,
        group,
        ..TensorMeta::new(op, number, shape, dtype, extent, device, memory)
    };
    let node = Node::new(
        meta,
        Storage::Evicted,
        Origin::Delivered,
        None,
        Some(recipe),
    );
    Managed::new(Source::new(Arc::new(node)))
}
