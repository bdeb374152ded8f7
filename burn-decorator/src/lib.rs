//! Every operation of Burn 0.21's backend, once, as a row.
//!
//! A backend decorator (autocast, recomputation, profiling, ...) has to forward 418 operations,
//! half of which have defaults that compile when they are forgotten and then silently lose a fused
//! kernel or a gradient. This crate writes each signature down once; a decorator is a macro that
//! says what happens to *any* row.
//!
//! # A row
//!
//! ```text
//! full    norm    softmax(tensor: Float, dim: [usize]) -> Float
//!         = "Exponentials and a sum.";
//! ```
//!
//! reads: cast class, work class, operation, operands with their kinds, result kind, and the reason
//! for the cast class where it is not obvious. The cast classes (`lower`, `full`, `promote`,
//! `keep`) are PyTorch's CUDA autocast table mapped on Burn's operations; a decorator that does not
//! cast ignores them. The work classes say how costly it is to compute the result again;
//! burn-checkpoint decides by them which operations to record:
//!
//! | work | the result is computed again by |
//! |---|---|
//! | `compute` | a product: matmul, convolution, attention; its cost grows faster than its bytes |
//! | `sort` | sorting, a Fourier transform, dynamic programming |
//! | `norm` | several passes with exponentials or roots: softmax, layer norm |
//! | `math` | a transcendental function of each element |
//! | `reduce` | a pass over the input: sums, extrema, scans |
//! | `index` | moving elements by index, or by windows: gather, embedding, pooling |
//! | `cheap` | a few instructions an element: arithmetic, comparisons, casts, copies |
//! | `view` | nothing, or a copy: the result may share the operand's storage |
//! | `new` | a function of plain arguments: zeros, ones, full, arange |
//! | `fixed` | not possible: random numbers, data from the host, uninitialised tensors, shapes that depend on data |
//! | `pass` | not applicable: the result is no tensor (queries, reads to the host) |
//!
//! | kind | Rust type over a backend `B` |
//! |---|---|
//! | `Float`, `Int`, `Bool`, `Quant` | the tensor primitive of `B` |
//! | `FloatRef`, `IntRef`, `BoolRef`, `QuantRef` | a reference to it |
//! | `FloatOpt`, `BoolOpt` | an `Option` of it |
//! | `Floats`, `Ints`, `Bools`, `Quants` | a `Vec` of it |
//! | `Follow` | a `Float` that is written into the row's first `Float` operand, whose type decides |
//! | `Fill` | a `Scalar` that is written into the row's first `Float` operand, finite where it was finite |
//! | `Tensor` | `TensorPrimitive<B>`: float or quantized |
//! | `QuantParams` | `QuantizationParametersPrimitive<B>` |
//! | `Transaction`, `TransactionData` | `TransactionPrimitive<B>` and what it reads |
//! | `Device`, `DeviceRef` | `B::Device`, and a reference to it |
//! | `Data` | a future of the tensor's data on the host |
//! | `FutureInt`, `FutureFloat`, `FutureBool` | a future of a tensor |
//! | `(A, B)` | a pair of kinds |
//! | `[T]` | the plain type `T` |
//! | `{T}` | a slice `&[T]` |
//! | `{Name field: Kind, ..}` (result) | a struct of `burn_backend::ops` with these fields |
//!
//! # Using it
//!
//! Each macro of this crate ([`float_ops!`], [`int_ops!`], [`bool_ops!`], [`quantized_ops!`],
//! [`module_ops!`], [`activation_ops!`], [`transaction_ops!`]) hands one trait's rows to a macro of
//! yours; [`kind_type!`] turns a kind into a type, and [`forward_types!`], [`forward_device!`],
//! [`forward_dtypes!`], [`forward_inner!`] and [`forward_metadata!`] write what a decorator passes
//! on. Where only its float tensors are its own, [`map_operand!`] and [`map_result!`] take operands
//! and results apart. [`every_ops!`] hands out the rows of all traits, one after the other. Bring
//! the types that rows mention into scope with [`types`]:
//!
//! ```
//! macro_rules! names {
//!     ($trait:ident $($cast:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
//!         const NAMES: &[&str] = &[$(stringify!($op)),*];
//!     };
//! }
//! burn_decorator::activation_ops!(names);
//! assert!(NAMES.contains(&"softmax"));
//! ```
//!
//! # Backends and optimizers
//!
//! What decorators of backends and the parts of an update have in common: [`ranks`], how clones that
//! share state make a copy of their own for a rank; [`carried`], what a call carries to code inside
//! of it; [`cell`], flags of a thread while something runs; [`gradient`], what backends and
//! optimizers must know about gradients; [`tape`],
//! how code above decorators reaches autodiff's tensors below them; [`fused`], whether attention is
//! one operation there; [`warn`], warnings that reach a user without a logger; [`weight`], what a
//! loss was multiplied by; [`ensure_mended`], which refuses LibTorch without its mends;
//! [`repeated_block`], which parameters a model uses together.
//!
//! With the feature `autodiff`: `autodiff`, operations of one's own on its tape. With `module`:
//! `module`, tensors of a module by path; `exact`, records that no recorder rounds to half
//! precision; `device`, a module's device. With `train`: `non_finite`, which gradients are infinite
//! or NaN; `gauge`, a number as a metric of the Learner. [`split_mix`] makes random numbers of a seed
//! and an index. [`profile`] is what a device can do, for those that tell time from it.
//!
//! # Between host and device
//!
//! [`HostRead`] copies a tensor to the host while the thread that trains goes on: [`on_reader`] is
//! the thread that waits for it, [`reading_stream`] the stream that it reads on. [`upload`] is for
//! parameters that come from host memory when they are used, and [`shared`] makes data that such
//! uploads take without a copy. [`UseOrder`] tells what is used next, so that it can be brought
//! ahead of its use.
//!
//! Moving to another Burn release means editing `src/table/release.rs`, which has the rows that
//! only this release has; a test of the workspace walks the traits of the pinned Burn source and
//! names every operation without a row.

#[cfg(feature = "autodiff")]
pub mod autodiff;
mod block;
pub mod carried;
pub mod cell;
mod config;
#[cfg(feature = "module")]
pub mod device;
#[cfg(feature = "module")]
pub mod exact;
mod forward;
pub mod fused;
#[cfg(feature = "train")]
pub mod gauge;
pub mod gradient;
#[cfg(feature = "module")]
mod independent;
mod kind;
mod map;
#[cfg(feature = "module")]
pub mod module;
#[cfg(feature = "train")]
pub mod non_finite;
mod order;
pub mod profile;
pub mod ranks;
mod reads;
mod shared;
pub mod simulated;
pub mod split_mix;
mod stream;
mod table;
pub mod tape;
#[cfg(feature = "tch")]
pub mod tch;
mod unmended;
mod upload;
pub mod warn;
pub mod weight;
mod with_fields;
#[cfg(feature = "autodiff")]
mod without_ddp;

pub use block::repeated_block;
pub use order::UseOrder;
pub use reads::{
    HostRead, Read, ReadError, ReadsInPlace, finish_reads, on_reader, view_shape, wait_for_read,
};
pub use shared::{in_shape, shared};
pub use stream::reading_stream;
pub use unmended::ensure_mended;
pub use upload::{end_uploads, upload};

/// The types that rows mention, for the module in which a decorator expands the table.
pub mod types {
    pub use burn_backend::ops::{
        ActivationOps, BoolTensorOps, FloatTensorOps, IntTensorOps, ModuleOps, QTensorOps,
        TransactionOps,
    };
    pub use burn_backend::ops::{
        AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward,
        DeformConvOptions, GridSampleOptions, InterpolateOptions, MaxPool1dBackward,
        MaxPool1dWithIndices, MaxPool2dBackward, MaxPool2dWithIndices, TransactionPrimitive,
        TransactionPrimitiveData, UnfoldOptions,
    };
    pub use burn_backend::quantization::{QuantScheme, QuantizationParametersPrimitive};
    pub use burn_backend::tensor::{
        BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor, QuantizedTensor,
    };
    pub use burn_backend::{
        BoolDType, DType, DTypeUsageSet, Distribution, ExecutionError, FloatDType, IntDType,
        Scalar, Shape, Slice, TensorData, TensorPrimitive,
    };
    pub use core::future::Future;
    pub use core::ops::Range;
}
