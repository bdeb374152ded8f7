//! Burn's outputs as bytes.

use burn::data::dataloader::Progress;
use burn::tensor::{Distribution, Int, Tensor};
use burn::train::metric::{
    AccuracyMetric, Adaptor, LossMetric, Metric, MetricMetadata, Numeric, PerplexityMetric,
};
use burn::train::{ClassificationOutput, ItemLazy, SequenceOutput};
use burn_flex::Flex;
use burn_zero::{RankItem, SummedOutput};

#[test]
fn outputs_come_back_bit_for_bit() {
    let device = Default::default();
    let loss = Tensor::<Flex, 1>::from_floats([0.1], &device);
    let output = Tensor::<Flex, 2>::from_floats([[0.3, -0.7], [f32::MIN_POSITIVE, 1e30]], &device);
    let targets = Tensor::<Flex, 1, Int>::from_ints([1, 0], &device);
    let item = ClassificationOutput::new(loss.clone(), output.clone(), targets.clone());
    let back = ClassificationOutput::<Flex>::from_bytes(&item.into_bytes()).unwrap();
    assert_eq!(back.loss.into_data(), loss.clone().into_data());
    assert_eq!(back.output.into_data(), output.clone().into_data());
    assert_eq!(back.targets.into_data(), targets.into_data());

    for predictions in [None, Some(Tensor::from_ints([[3, 4]], &device))] {
        let targets = Tensor::<Flex, 2, Int>::from_ints([[1, 0]], &device);
        let item = SequenceOutput::<Flex>::new(
            loss.clone(),
            output.clone().unsqueeze(),
            predictions.clone(),
            targets,
        );
        let bytes = item.into_bytes();
        let back = SequenceOutput::<Flex>::from_bytes(&bytes).unwrap();
        let data = |tensor: Option<Tensor<Flex, 2, Int>>| tensor.map(Tensor::into_data);
        assert_eq!(data(back.predictions), data(predictions));
        assert!(SequenceOutput::<Flex>::from_bytes(&bytes[..bytes.len() - 1]).is_err());
    }
}

/// Loss, accuracy and perplexity of some batches.
fn metrics<T>(batches: Vec<T>, pad_token: Option<usize>) -> [f64; 3]
where
    T: ItemLazy,
    T::ItemSync: Adaptor<burn::train::metric::LossInput<Flex>>
        + Adaptor<burn::train::metric::AccuracyInput<Flex>>
        + Adaptor<burn::train::metric::PerplexityInput<Flex>>,
{
    let metadata = MetricMetadata {
        progress: Progress::new(1, 1),
        global_progress: Progress::new(1, 1),
        iteration: None,
        lr: None,
    };
    let mut loss = LossMetric::<Flex>::new();
    let (mut accuracy, mut perplexity) = (AccuracyMetric::<Flex>::new(), PerplexityMetric::new());
    if let Some(pad_token) = pad_token {
        accuracy = accuracy.with_pad_token(pad_token);
        perplexity = perplexity.with_pad_token(pad_token);
    }
    for batch in batches {
        let batch = batch.sync();
        loss.update(&batch.adapt(), &metadata);
        accuracy.update(&batch.adapt(), &metadata);
        perplexity.update(&batch.adapt(), &metadata);
    }
    [
        loss.running_value().current(),
        accuracy.value().current(),
        perplexity.running_value().current(),
    ]
}

fn assert_same([loss, accuracy, perplexity]: [f64; 3], expected: [f64; 3]) {
    assert_eq!([loss, accuracy], expected[..2]);
    let error = (perplexity - expected[2]).abs() / expected[2];
    assert!(error < 1e-5, "{perplexity} is not {}", expected[2]);
}

/// Sixteen bytes, where the logits of these 20 predictions of 50 classes have 4,000.
#[test]
fn a_process_sends_sums_from_which_the_metrics_are_those_of_its_outputs() {
    let device = Default::default();
    let batch = |seed: usize| {
        let loss = Tensor::<Flex, 1>::from_floats([0.1 + seed as f32], &device);
        let logits = Tensor::<Flex, 2>::random([20, 50], Distribution::Normal(0.0, 1.0), &device);
        let targets: Vec<_> = (0..20).map(|at| (at * 7 + seed) as i32 % 50).collect();
        let targets = Tensor::<Flex, 1, Int>::from_ints(targets.as_slice(), &device);
        // Some are right.
        let some = targets.clone().unsqueeze_dim::<2>(1).narrow(0, 0, 8);
        let raise = Tensor::<Flex, 2>::full([8, 1], 9.0, &device);
        let raised = logits.clone().narrow(0, 0, 8).scatter(
            1,
            some,
            raise,
            burn::tensor::IndexingUpdateOp::Add,
        );
        (loss, logits.slice_assign([0..8, 0..50], raised), targets)
    };
    let batches: Vec<_> = (0..3).map(batch).collect();
    let sent = |output: SummedOutput<Flex>| {
        let bytes = output.into_bytes();
        assert_eq!(bytes.len(), 16);
        assert!(SummedOutput::<Flex>::from_bytes(&bytes[1..]).is_err());
        SummedOutput::<Flex>::from_bytes(&bytes).unwrap()
    };

    let outputs = || batches.iter().cloned();
    let whole = || {
        outputs().map(|(loss, logits, targets)| ClassificationOutput::new(loss, logits, targets))
    };
    let expected = metrics(whole().collect(), None);
    assert!(expected[1] > 30.0 && expected[1] < 60.0, "{expected:?}");
    let summed = whole().map(|output| sent(output.into()));
    assert_same(metrics(summed.collect(), None), expected);
    assert!(whole().next().unwrap().into_bytes().len() > 4000);

    let sequences = outputs().map(|(loss, logits, targets)| {
        let output = SequenceOutput::new(
            loss,
            logits.reshape([4, 5, 50]),
            None,
            targets.reshape([4, 5]),
        );
        sent(output.into())
    });
    assert_same(metrics(sequences.collect(), None), expected);

    // Burn weights a batch's accuracy with all of its predictions: here all batches have equally
    // many.
    let pad = 7;
    let expected = metrics(whole().take(1).collect(), Some(pad));
    let padded = outputs().take(1).map(|(loss, logits, targets)| {
        sent(SummedOutput::without_padding(loss, logits, targets, pad))
    });
    let found = metrics(padded.collect(), None);
    assert!(
        (found[1] - expected[1]).abs() < 1e-4,
        "{found:?} {expected:?}"
    );
    assert_same([found[0], expected[1], found[2]], expected);
}
