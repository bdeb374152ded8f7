//! burn_dino: a small vision transformer, with layer norm and attention of its own.

use burn::tensor::backend::AutodiffBackend;
use burn_dino::layers::attention::AttentionConfig;
use burn_dino::layers::block::BlockConfig;
use burn_dino::layers::layer_scale::LayerScaleConfig;
use burn_dino::model::dino::DinoVisionTransformerConfig;
use frame::{Dropout, Project, Training, backward, numbers};

struct Dino;

const SIDE: usize = 56;
const PATCH: usize = 14;
const WIDTH: usize = 96;

impl Project for Dino {
    const NAME: &'static str = "burn_dino 0.8.0, 6 blocks";
    const ROWS: usize = 8;

    fn training<B: AutodiffBackend>(device: B::Device, _: Dropout) -> impl Training<B> {
        let config = DinoVisionTransformerConfig {
            embedding_dimension: WIDTH,
            depth: 6,
            block_config: BlockConfig {
                attn: AttentionConfig {
                    dim: WIDTH,
                    num_heads: 4,
                    ..Default::default()
                },
                layer_scale: Some(LayerScaleConfig { dim: WIDTH }),
                ..Default::default()
            },
            ..DinoVisionTransformerConfig::from_size(Some(SIDE), Some(PATCH))
        };
        let model = config.init::<B>(&device);
        frame::steps(model, move |model, step, rows| {
            let images = numbers(&device, step, rows.clone(), [0, 3, SIDE, SIDE]);
            let class = numbers(&device, 100, rows.clone(), [0, WIDTH]);
            let patches = (SIDE / PATCH).pow(2);
            let tokens = numbers(&device, 200, rows, [0, patches, WIDTH]);
            let output = model.forward(images, None);
            let class = (output.x_norm_clstoken - class).square().mean();
            let tokens = (output.x_norm_patchtokens - tokens).square().mean();
            backward(model, class + tokens)
        })
    }
}

fn main() {
    frame::main::<Dino>();
}
