//! The model, and the text that it writes.

use burn::backend::Autodiff;
use burn::module::Module;
use burn::prelude::*;
use burn_flex::Flex;
use examples::gpt::model::{Gpt, GptConfig};
use examples::gpt::sample::{printable, sample};

use super::turn;

fn model<B: Backend>(device: &B::Device) -> Gpt<B> {
    GptConfig::new(6, 2, 2, 8)
        .with_vocabulary(11)
        .init::<B>(device)
}

fn logits(model: &Gpt<Flex>, tokens: [[i32; 6]; 1]) -> Vec<f32> {
    let tokens = Tensor::from_data(tokens, &Default::default());
    let logits = model.forward(tokens);
    assert_eq!(logits.dims(), [1, 6, 11]);
    logits.into_data().to_vec().unwrap()
}

#[test]
fn a_token_reads_only_what_is_before_it() {
    let _turn = turn();
    let model = model::<Flex>(&Default::default());
    let one = logits(&model, [[1, 2, 3, 4, 5, 6]]);
    let other = logits(&model, [[1, 2, 3, 9, 5, 6]]);
    assert_eq!(one[..3 * 11], other[..3 * 11]);
    for position in 3..6 {
        let at = position * 11..(position + 1) * 11;
        assert_ne!(one[at.clone()], other[at], "position {position}");
    }
}

#[test]
fn positions_differ() {
    let _turn = turn();
    let logits = logits(&model::<Flex>(&Default::default()), [[1; 6]]);
    assert_ne!(logits[..11], logits[11..22]);
}

#[test]
fn weights_are_drawn_before_the_first_clone() {
    let _turn = turn();
    let model = model::<Flex>(&Default::default());
    let tokens = [[1, 2, 3, 4, 5, 6]];
    assert_eq!(logits(&model.clone(), tokens), logits(&model, tokens));
}

#[test]
fn every_parameter_gets_a_gradient() {
    let _turn = turn();
    use burn::module::{ModuleVisitor, Param};
    use burn::optim::GradientsParams;

    struct Count(usize);
    impl<B: Backend> ModuleVisitor<B> for Count {
        fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<B, D>>) {
            self.0 += 1;
        }
    }

    let device = Default::default();
    let model = model::<Autodiff<Flex>>(&device);
    let tokens = Tensor::from_data([[1, 2, 3, 4, 5, 6]], &device);
    let gradients = model.forward(tokens).powf_scalar(2.0).sum().backward();
    let mut parameters = Count(0);
    model.visit(&mut parameters);
    assert_eq!(parameters.0, 2 + 2 * 12 + 2 + 1);
    let gradients = GradientsParams::from_grads(gradients, &model);
    assert_eq!(gradients.len(), parameters.0);
}

#[test]
fn control_characters_are_not_printed() {
    assert_eq!(printable(b"a\tb\n\x1b[2J\0"), "a\tb\n\u{fffd}[2J\u{fffd}");
}

#[test]
fn a_sample_is_longer_than_the_context_and_a_function_of_the_seed() {
    let _turn = turn();
    let device = Default::default();
    let model = GptConfig::new(8, 1, 2, 8).init::<Flex>(&device);
    let text = sample(&model, 20, 1, &device);
    assert!(text.starts_with("/// "));
    assert_eq!(text, sample(&model, 20, 1, &device));
    assert_ne!(text, sample(&model, 20, 2, &device));
}
