//! Uploads of parameters from host memory, many of them over a step, of which the device holds few
//! at a time.
//!
//! On Fusion what is dropped is freed when the queue of its stream runs, but data of the host is
//! allocated at once: a layer's weight would stay until enough operations are queued, while those
//! of the next layers arrive. So the queue is run before it holds more than two uploads of the
//! largest size.

use core::cell::RefCell;
use core::mem;

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, IntDType, Shape, StreamId, TensorData};

use crate::{HostRead, reading_stream};

/// Uploads of fewer bytes do not run the queue.
const LEAST_BYTES: usize = 1 << 20;

#[derive(Default)]
struct Uploads {
    /// Of the largest upload of the sequence so far.
    largest_bytes: usize,
    /// Since the queue ran.
    queued_bytes: usize,
    /// The read that has run the queue last.
    read: Option<HostRead>,
}

thread_local! {
    static UPLOADS: RefCell<Uploads> = RefCell::default();
}

/// A float tensor of `data`, as `Backend::float_from_data`, in a sequence of uploads that leave the
/// device soon: at most two of the largest, or 1 MiB, wait to be freed in this thread's queue on
/// Fusion. [`end_uploads`] ends the sequence.
///
/// # Cost
///
/// That of the upload. On Fusion every second upload of the largest size also runs the queue, so
/// that fewer operations are fused together, and waits for the device to be no more than as far
/// behind again.
///
/// ```
/// use burn_backend::{TensorData, TensorMetadata};
/// use burn_decorator::{end_uploads, upload};
/// use burn_flex::Flex;
///
/// let device = Default::default();
/// let weight = upload::<Flex>(TensorData::from([1.0, 2.0]), &device);
/// assert_eq!(weight.shape().num_elements(), 2);
/// end_uploads::<Flex>(&device);
/// ```
pub fn upload<B: Backend>(data: TensorData, device: &Device<B>) -> FloatTensor<B> {
    let bytes = data.as_bytes().len();
    let is_full = UPLOADS.with_borrow_mut(|uploads| {
        uploads.largest_bytes = uploads.largest_bytes.max(bytes);
        uploads.queued_bytes += bytes;
        uploads.queued_bytes > LEAST_BYTES.max(2 * uploads.largest_bytes)
    });
    if is_full {
        run_queue::<B>(device);
        UPLOADS.with_borrow_mut(|uploads| uploads.queued_bytes = bytes);
    }
    B::float_from_data(data, device)
}

/// Ends a sequence of [uploads](upload), and runs Fusion's queue of this thread if there were some
/// since it ran. For the end of a step, after which nothing runs the queue for a while.
pub fn end_uploads<B: Backend>(device: &Device<B>) {
    run_queue::<B>(device);
    UPLOADS.with_borrow_mut(|uploads| uploads.largest_bytes = 0);
}

fn run_queue<B: Backend>(device: &Device<B>) {
    let before = UPLOADS.with_borrow_mut(|uploads| {
        (mem::take(&mut uploads.queued_bytes) > 0).then(|| uploads.read.take())
    });
    let Some(before) = before else { return };
    if !has_queue(&B::name(device)) {
        return;
    }
    // It may have failed: the operation that follows tells.
    before.map(HostRead::wait);
    let queued = B::int_zeros(Shape::new([1]), device, IntDType::I32);
    // On another stream an operation runs the queue of its operand's, and a read that of its own.
    let read = reading_stream(StreamId::current())
        .executes(|| B::int_into_data(B::int_reshape(queued, Shape::new([1, 1]))));
    UPLOADS.with_borrow_mut(|uploads| uploads.read = Some(HostRead::of(read)));
}

/// Whether a backend keeps operations in a queue before it runs them: by its name, for no library
/// names the backend itself. Elsewhere a read would only make this thread wait for the device.
fn has_queue(name: &str) -> bool {
    name.contains("fusion<")
}

#[cfg(test)]
mod tests {
    use super::has_queue;

    #[test]
    fn only_fusion_has_a_queue() {
        for name in ["fusion<cubecl<cuda>>", "remat<fusion<cubecl<wgpu<spirv>>>>"] {
            assert!(has_queue(name), "{name}");
        }
        for name in ["cubecl<cuda>", "autocast<autodiff<libtorch<cuda>>>", "flex"] {
            assert!(!has_queue(name), "{name}");
        }
    }
}
