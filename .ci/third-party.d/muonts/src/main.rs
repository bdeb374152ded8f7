//! muonts: a temporal fusion transformer, which has recurrent cells, attention and dropout, by its
//! own `TrainStep`.

use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn::train::TrainStep;
use frame::{Dropout, Project, Training};
use muonts::data::batchitem::BatchItem;
use muonts::models::tft::model::TemporalFusionTransformerModelConfig;

struct Muonts;

const PAST: usize = 12;
const FUTURE: usize = 4;

impl Project for Muonts {
    const NAME: &'static str = "muonts 0.2.0, temporal fusion transformer";
    const ROWS: usize = 64;

    fn training<B: AutodiffBackend>(device: B::Device, dropout: Dropout) -> impl Training<B> {
        let config = TemporalFusionTransformerModelConfig::new(PAST, FUTURE);
        let config = match dropout {
            Dropout::OfTheProject => config,
            Dropout::Off => config.with_dropout(0.0),
        };
        let model = config.init::<B>(&device);
        frame::steps(model, move |model, step, rows| {
            let series = frame::numbers::<B, 2>(&device, step, rows.clone(), [0, PAST + FUTURE]);
            let count = rows.len();
            let ones = |time| Tensor::<B, 2>::ones([count, time], &device);
            let batch = BatchItem {
                past_target: series.clone().narrow(1, 0, PAST),
                past_observed_values: ones(PAST),
                future_target: series.narrow(1, PAST, FUTURE),
                future_observed_values: ones(FUTURE),
                feat_static_real: Some(frame::numbers(&device, 100, rows.clone(), [0, 1])),
                feat_static_cat: Some(frame::integers(&device, 100, rows.clone(), [0, 1], 1)),
                feat_dynamic_real: Some(frame::numbers(
                    &device,
                    200 + step,
                    rows,
                    [0, PAST + FUTURE, 1],
                )),
                feat_dynamic_cat: None,
                past_feat_dynamic_real: None,
                past_feat_dynamic_cat: None,
            };
            let output = TrainStep::step(model, batch);
            (output.item.loss, output.grads)
        })
    }
}

fn main() {
    frame::main::<Muonts>();
}
