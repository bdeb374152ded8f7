//! Updated pieces that go to the other ranks before they go to the device.
//!
//! In a [`ZeroOptimizer`](crate::ZeroOptimizer) of several ranks an updated piece is sent to the others and comes up to the device with
//! theirs: one that went up at once would come down again. The optimizer does not see who calls it, for others may wrap it. What both can
//! see is the thread. Whoever looks at such a piece on the way finds a parameter that is uploaded at that moment, as Burn's lazy ones
//! are made when they are asked for.

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Param, ParamId};
use burn::tensor::{Shape, Tensor, TensorData, TensorPrimitive, backend::AutodiffBackend};
use burn_backend::Backend;
use burn_backend::tensor::{Device, FloatTensor};

use super::marks::Mark;

/// What was updated on the host and will be gathered, by its id.
#[derive(Default)]
pub(crate) struct Kept(HashMap<ParamId, KeptPiece>);

struct KeptPiece {
    /// Until it is sent.
    data: Option<Arc<TensorData>>,
    /// A [`Mark`] that waits for the piece to be on the device.
    mark: Box<dyn Any>,
}

thread_local! {
    /// While pieces are updated that will be gathered.
    static KEPT: RefCell<Option<Kept>> = const { RefCell::new(None) };
}

/// Gives the thread back what it had, also where a step panics.
struct Before(Option<Kept>);

impl Drop for Before {
    fn drop(&mut self) {
        KEPT.set(self.0.take());
    }
}

/// Runs a step whose pieces will be gathered: what it updates on the host stays there.
pub(crate) fn gathered_after<R>(step: impl FnOnce() -> R) -> (R, Kept) {
    let _before = Before(KEPT.replace(Some(Kept::default())));
    let result = step();
    (result, KEPT.take().unwrap_or_default())
}

/// Whether what is updated now will be gathered.
pub(super) fn will_be_gathered() -> bool {
    KEPT.with_borrow(Option::is_some)
}

/// An updated piece that [will be gathered](will_be_gathered), and the mark that it will have then.
pub(super) fn keep<B: AutodiffBackend, const D: usize>(
    id: ParamId,
    data: TensorData,
    device: &Device<B>,
    requires_grad: bool,
) -> (Param<Tensor<B, D>>, Mark<B::InnerBackend>) {
    let shape = Shape::from(data.shape.to_vec());
    let data = Arc::new(data);
    let mark = Mark::later();
    let kept = KeptPiece {
        data: Some(data.clone()),
        mark: Box::new(mark.clone()),
    };
    KEPT.with_borrow_mut(|all| {
        if let Some(Kept(all)) = all {
            all.insert(id, kept);
        }
    });
    let upload = move |device: &Device<B>, requires_grad: bool| {
        let value = B::float_from_data(TensorData::clone(&data), device);
        let value = Tensor::<B, D>::from_primitive(TensorPrimitive::Float(value));
        value.set_require_grad(requires_grad)
    };
    let param = Param::uninitialized(id, upload, device.clone(), requires_grad, shape);
    (param, mark)
}

impl Kept {
    /// A piece as it was updated, which its parameter shares; `None` if it was not updated on the host.
    pub(crate) fn take(&mut self, id: ParamId) -> Option<Arc<TensorData>> {
        self.0.get_mut(&id)?.data.take()
    }

    /// The piece is another now.
    pub(crate) fn forget(&mut self, id: ParamId) {
        self.0.remove(&id);
    }

    /// Whether the optimizer is to know what a piece is on the device.
    pub(crate) fn is_awaited(&self, id: ParamId) -> bool {
        self.0.contains_key(&id)
    }

    /// The piece is there, cut as the next step will cut it.
    pub(crate) fn arrived<I: Backend>(&mut self, id: ParamId, piece: FloatTensor<I>) {
        let kept = self.0.remove(&id);
        if let Some(mark) = kept
            .as_ref()
            .and_then(|kept| kept.mark.downcast_ref::<Mark<I>>())
        {
            mark.set(piece);
        }
    }
}
