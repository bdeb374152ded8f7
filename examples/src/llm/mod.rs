//! Language models that others have published: Llama, Mistral, Qwen2 and Qwen3, from a Hugging Face
//! directory.
//!
//! ```no_run
//! use burn::tensor::{Int, Tensor};
//! use examples::llm::LlmConfig;
//!
//! # type B = burn_flex::Flex;
//! let folder = "SmolLM2-135M".as_ref();
//! let device = Default::default();
//! let model = LlmConfig::read(folder)?.init::<B>(&device); // no weight is there yet
//! let model = model.read_weights(folder)?; // each is read when it is first used
//! let tokens = Tensor::<B, 2, Int>::from_data([[1, 2, 3]], &device);
//! let logits = model.logits(tokens);
//! # let _ = logits;
//! # Ok::<(), examples::llm::LlmError>(())
//! ```
//!
//! | where | what |
//! |---|---|
//! | `config` | [`LlmConfig`] from `config.json`, and what is refused by its name |
//! | `weights`, `write` | the parameters from `*.safetensors` and into it, one by one |
//! | `sequences` | tokens, and the boundaries of documents in them |
//! | `lora`, `trained` | adapters, from and to PEFT's files, and what else is trained or frozen |
//! | `model`, `block`, `attention`, `projection`, `rotary` | the model; its fields have the names of the files' tensors |
//! | `error` | [`LlmError`] |

mod attention;
mod block;
mod config;
mod error;
mod lora;
mod model;
mod projection;
mod rotary;
mod sequences;
mod trained;
mod weights;
mod write;

use burn::nn::RmsNorm;
use burn::prelude::*;
use burn_fused::rms_norm;

pub use attention::GroupedAttention;
pub use block::{DecoderBlock, GatedFeedForward};
pub use config::{Architecture, LlmConfig, RotaryScaling};
pub use error::LlmError;
pub(crate) use lora::SETTINGS as ADAPTER_SETTINGS;
pub use lora::{ALL_LINEAR, LoraConfig};
pub use model::{Decoder, Llm};
pub use projection::{Adapter, Projection};
pub use rotary::Rotation;
pub use sequences::{Layout, Sequences};

/// A norm as one operation of `FusedBackward`, in the type of `x`.
fn normalised<B: Backend, const D: usize>(norm: &RmsNorm<B>, x: Tensor<B, D>) -> Tensor<B, D> {
    let dtype = x.dtype();
    rms_norm(x, norm.gamma.val(), norm.epsilon).cast(dtype)
}
