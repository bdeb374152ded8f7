//! Converts optimizer state between device and host: the same numbers, bit for bit.
//!
//! Burn's records belong to a backend, those of `OffloadedAdamW` to the host. Both have the same file format, so a file in memory
//! converts one to the other.

use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::record::{AdaptorRecord, AdaptorRecordV1};
use burn::optim::{AdamW, Optimizer};
use burn::record::{FullPrecisionSettings, NamedMpkBytesRecorder, Record, Recorder};
use burn::tensor::backend::AutodiffBackend;
use burn_zero::OffloadRecord;

use super::model::Gpt;
use super::optimizer::{Named, NamedState};

/// Burn's record of an optimizer: the same type for all modules.
type Of<O, B> = <OptimizerAdaptor<O, Gpt<B>, B> as Optimizer<Gpt<B>, B>>::Record;

/// Burn's record of an optimizer that settings name.
pub type OfNamed<B> = Of<Named<<B as AutodiffBackend>::InnerBackend>, B>;

/// The record as another type with the same file format. `None` if the formats differ.
pub fn carry<B: AutodiffBackend, To: Record<B>>(record: impl Record<B>) -> Option<To> {
    let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
    let bytes = Recorder::<B>::record(&recorder, record, ()).ok()?;
    Recorder::<B>::load(&recorder, bytes, &Default::default()).ok()
}

/// AdamW's state on the device for the host. `None` if it is not AdamW's.
pub fn to_host<B: AutodiffBackend>(record: OfNamed<B>) -> Option<OffloadRecord> {
    macro_rules! state {
        ($record:expr, $($rank:ident)*) => {
            match $record {
                $(AdaptorRecordV1::$rank(NamedState::AdamW(state)) => Some(AdaptorRecordV1::$rank(state)),)*
                _ => None,
            }
        };
    }
    let states = record.into_iter().map(|(id, AdaptorRecord::V1(record))| {
        let state = state!(record, Rank0 Rank1 Rank2 Rank3 Rank4 Rank5 Rank6 Rank7 Rank8)?;
        Some((id, AdaptorRecord::V1(state)))
    });
    let states: Option<Of<AdamW, B>> = states.collect();
    carry::<B, _>(states?)
}

/// The host's state of AdamW for the device. Without master copies of low-precision parameters: on the device the parameters
/// are used.
pub fn to_device<B: AutodiffBackend>(record: OffloadRecord) -> Option<OfNamed<B>> {
    macro_rules! state {
        ($record:expr, $($rank:ident)*) => {
            match $record {
                $(AdaptorRecordV1::$rank(state) => AdaptorRecordV1::$rank(NamedState::AdamW(state)),)*
            }
        };
    }
    let states: Of<AdamW, B> = carry::<B, _>(record)?;
    let states = states.into_iter().map(|(id, AdaptorRecord::V1(record))| {
        let state = state!(record, Rank0 Rank1 Rank2 Rank3 Rank4 Rank5 Rank6 Rank7 Rank8);
        (id, AdaptorRecord::V1(state))
    });
    Some(states.collect())
}

#[cfg(test)]
mod tests {
    use burn::backend::Autodiff;
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::{GradientsParams, Optimizer};
    use burn::prelude::*;
    use burn_flex::Flex;
    use burn_zero::{HostAdamWConfig, OffloadConfig};

    use super::*;
    use crate::gpt::optimizer::{OptimizerConfig, SgdParams, default_optimizer, optimizer};

    type B = Autodiff<Flex>;

    fn steps<O: Optimizer<Linear<B>, B>>(optimizer: &mut O) {
        let device = Default::default();
        let mut model: Linear<B> = LinearConfig::new(3, 2).init(&device);
        for step in 1..4 {
            let x = Tensor::<B, 2>::full([2, 3], step as f32, &device);
            let loss = model.forward(x).square().mean();
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.01, model, gradients);
        }
    }

    fn bytes<R: Record<B>>(record: R) -> serde_json::Value {
        serde_json::to_value(record.into_item::<FullPrecisionSettings>()).unwrap()
    }

    #[test]
    fn there_and_back_are_the_same_bits() {
        let mut on_device = optimizer::<B, Linear<B>>(&default_optimizer(0.1));
        steps(&mut on_device);
        let record = on_device.to_record();
        let expected = bytes(record.clone());
        assert_eq!(expected.as_object().unwrap().len(), 2);
        let on_host = to_host::<B>(record).unwrap();
        assert_eq!(on_host.len(), 2);
        assert_eq!(bytes(to_device::<B>(on_host).unwrap()), expected);

        let mut on_host = OffloadConfig::new(HostAdamWConfig::default())
            .init()
            .unwrap();
        steps(&mut on_host);
        let record = Optimizer::<Linear<B>, B>::to_record(&on_host);
        let expected = bytes(record.clone());
        let on_device = to_device::<B>(record).unwrap();
        assert_eq!(bytes(to_host::<B>(on_device).unwrap()), expected);
    }

    #[test]
    fn state_of_another_optimizer_is_not_taken() {
        let sgd = OptimizerConfig::Sgd(SgdParams {
            momentum: 0.9,
            ..Default::default()
        });
        let mut sgd = optimizer::<B, Linear<B>>(&sgd);
        steps(&mut sgd);
        assert!(to_host::<B>(sgd.to_record()).is_none());
    }
}
