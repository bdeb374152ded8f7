//! llama-burn of tracel-ai/models: a small Llama with its key-value cache, which outlives a step.
//! The model's type is in a private module, so it has no name here.

use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::Int;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use frame::{Dropout, Project, Training, backward, integers};
use llama_burn::llama::{Llama, LlamaConfig};
use llama_burn::tokenizer::Tokenizer;

struct Llama3;

const VOCABULARY: usize = 512;
const TOKENS: usize = 24;

/// A model is made with a tokenizer; training takes tokens.
struct NoTokenizer;

impl Tokenizer for NoTokenizer {
    fn new(_: &str) -> Result<Self, String> {
        Ok(Self)
    }

    fn encode(&self, _: &str, _: bool, _: bool) -> Vec<u32> {
        Vec::new()
    }

    fn decode(&self, _: Vec<u32>) -> String {
        String::new()
    }

    fn bos_id(&self) -> u32 {
        0
    }

    fn eos_id(&self) -> u32 {
        0
    }

    fn stop_ids(&self) -> Vec<u32> {
        Vec::new()
    }
}

impl Project for Llama3 {
    const NAME: &'static str = "llama-burn 0.1.0, 4 layers";
    const ROWS: usize = 4;

    fn training<B: AutodiffBackend>(device: B::Device, _: Dropout) -> impl Training<B> {
        let config = LlamaConfig::new(256, VOCABULARY, String::new())
            .with_d_model(128)
            .with_num_hidden_layers(4)
            .with_num_attention_heads(4)
            .with_num_key_value_heads(Some(2))
            .with_max_seq_len(TOKENS)
            .with_max_batch_size(Self::ROWS);
        let llama: Llama<B, NoTokenizer> = config.init(&device).expect("no tokenizer fails");
        let Llama {
            model,
            mut cache,
            rope,
            ..
        } = llama;
        frame::steps(model, move |model, step, rows| {
            let count = rows.len();
            let tokens: Tensor<B, 2, Int> =
                integers(&device, step, rows, [0, TOKENS + 1], VOCABULARY as u64);
            cache.iter_mut().for_each(|cache| cache.reset());
            let logits = model.forward(tokens.clone().narrow(1, 0, TOKENS), &mut cache, &rope);
            let logits = logits.reshape([count * TOKENS, VOCABULARY]);
            let targets = tokens.narrow(1, 1, TOKENS).reshape([count * TOKENS]);
            let loss = CrossEntropyLossConfig::new().init(&device);
            backward(model, loss.forward(logits, targets))
        })
    }
}

fn main() {
    frame::main::<Llama3>();
}
