//! `burn-decorator` for Burn 0.22.1: its table, kinds and macros by path, and here only what the
//! release changes.
//!
//! `release.rs` has the rows that 0.21.0 lacks, `forward.rs` what a decorator passes on.

#[path = "../../../burn-decorator/src/carried.rs"]
pub mod carried;
#[path = "../../../burn-decorator/src/cell.rs"]
pub mod cell;
mod config;
mod forward;
#[path = "../../../burn-decorator/src/gradient.rs"]
pub mod gradient;
#[path = "../../../burn-decorator/src/kind.rs"]
mod kind;
#[path = "../../../burn-decorator/src/map.rs"]
mod map;
pub mod non_finite;
#[path = "../../../burn-decorator/src/order.rs"]
mod order;
#[path = "../../../burn-decorator/src/profile.rs"]
pub mod profile;
#[path = "../../../burn-decorator/src/reads.rs"]
mod reads;
#[path = "../../../burn-decorator/src/shared.rs"]
mod shared;
#[path = "../../../burn-decorator/src/stream.rs"]
mod stream;
mod table;
#[path = "../../../burn-decorator/src/unmended.rs"]
mod unmended;
#[path = "../../../burn-decorator/src/upload.rs"]
mod upload;
#[path = "../../../burn-decorator/src/warn.rs"]
pub mod warn;
#[path = "../../../burn-decorator/src/with_fields.rs"]
mod with_fields;

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
        AttentionModuleOptions, BatchNormTrain, BatchNormTrainBackward, ConvOptions,
        ConvTransposeOptions, DeformConv2dBackward, DeformConvOptions, GridSampleOptions,
        InterpolateOptions, MaxPool1dBackward, MaxPool1dWithIndices, MaxPool2dBackward,
        MaxPool2dWithIndices, PadMode, TransactionPrimitive, TransactionPrimitiveData,
        UnfoldOptions,
    };
    pub use burn_backend::quantization::{QuantScheme, QuantizationParametersPrimitive};
    pub use burn_backend::tensor::{
        BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor, QuantizedTensor,
    };
    pub use burn_backend::{
        BoolDType, DType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice,
        TensorData, TensorMetadata, TensorPrimitive,
    };
    pub use core::future::Future;
    pub use core::ops::Range;
}
