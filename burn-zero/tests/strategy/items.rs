//! Burn's outputs as bytes.

use burn::tensor::{Int, Tensor};
use burn::train::{ClassificationOutput, SequenceOutput};
use burn_flex::Flex;
use burn_zero::RankItem;

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
