//! What a model is made of, from `config.json`.

use std::path::Path;

use serde::Deserialize;

use super::LlmError;

/// A family of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 1 to 3, SmolLM2 and others.
    Llama,
    /// Mistral, without its sliding window.
    Mistral,
    /// Qwen2 and Qwen2.5: queries, keys and values have a bias.
    Qwen2,
    /// Qwen3: queries and keys are normalised.
    Qwen3,
}

/// How the angles of the rotary embedding are scaled for longer sequences than those of the
/// pretraining.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RotaryScaling {
    /// Not at all.
    None,
    /// Positions are divided by this factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Llama 3's: low frequencies are divided by the factor, high ones stay, those between are
    /// interpolated.
    Llama3 {
        /// The factor.
        factor: f64,
        /// Wavelengths longer than the original context divided by this are scaled in full.
        low_frequency_factor: f64,
        /// Wavelengths shorter than the original context divided by this are not scaled.
        high_frequency_factor: f64,
        /// The context of the pretraining, in tokens.
        original_context: f64,
    },
}

/// What an [`Llm`](super::Llm) is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct LlmConfig {
    /// The family.
    pub architecture: Architecture,
    /// Number of different tokens.
    pub vocabulary: usize,
    /// Features of a token in the residual stream.
    pub width: usize,
    /// Features between the two layers of a feed-forward network.
    pub inner_width: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; divides `heads`.
    pub key_heads: usize,
    /// Features of a head.
    pub head_width: usize,
    /// The longest sequence that the model was made for, in tokens.
    pub context: usize,
    /// Added to the mean square in norms.
    pub norm_epsilon: f64,
    /// The base of the rotary embedding's frequencies.
    pub rotary_base: f64,
    /// How its angles are scaled.
    pub rotary_scaling: RotaryScaling,
    /// Whether the head's weight is that of the embedding.
    pub is_tied: bool,
    /// Whether the projections of queries, keys and values have a bias.
    pub has_qkv_bias: bool,
    /// Whether attention's output projection has a bias.
    pub has_output_bias: bool,
    /// Whether the layers of the feed-forward network have a bias.
    pub has_feed_forward_bias: bool,
}

impl LlmConfig {
    /// Reads `config.json` of a Hugging Face directory.
    ///
    /// # Errors
    ///
    /// The file cannot be read, lacks a key, or asks for what these models do not have: another
    /// architecture, a sliding window, another activation or rotary embedding, quantized weights.
    pub fn read(folder: &Path) -> Result<Self, LlmError> {
        Self::read_file(&folder.join("config.json"))
    }

    /// Reads a file that is a `config.json`.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn read_file(path: &Path) -> Result<Self, LlmError> {
        let text = fs_err::read_to_string(path)?;
        let file: File = serde_json::from_str(&text).map_err(|error| LlmError::Json {
            path: path.to_owned(),
            reason: error.to_string(),
        })?;
        file.config(path)
    }

    /// The number of parameters, those of a tied head counted once.
    pub fn parameters(&self) -> usize {
        let Self {
            width, inner_width, ..
        } = *self;
        let query = self.heads * self.head_width;
        let keys = self.key_heads * self.head_width;
        let bias = |has: bool, size: usize| if has { size } else { 0 };
        let norms = if self.architecture == Architecture::Qwen3 {
            2 * self.head_width
        } else {
            0
        };
        let attention = width * (2 * query + 2 * keys)
            + bias(self.has_qkv_bias, query + 2 * keys)
            + bias(self.has_output_bias, width)
            + norms;
        let feed_forward =
            3 * width * inner_width + bias(self.has_feed_forward_bias, 2 * inner_width + width);
        let block = attention + feed_forward + 2 * width;
        let embeddings = if self.is_tied { 1 } else { 2 };
        embeddings * self.vocabulary * width + self.layers * block + width
    }
}

/// The keys of `config.json`.
#[derive(Deserialize)]
struct File {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    #[serde(default = "default_activation")]
    hidden_act: String,
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    rope_scaling: Option<Rope>,
    /// Transformers 5 has both in one.
    rope_parameters: Option<Rope>,
    partial_rotary_factor: Option<f64>,
    #[serde(default)]
    tie_word_embeddings: bool,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
    quantization_config: Option<serde_json::Value>,
}

fn default_activation() -> String {
    "silu".to_owned()
}

/// The rotary embedding.
#[derive(Deserialize)]
struct Rope {
    rope_theta: Option<f64>,
    #[serde(alias = "type")]
    rope_type: Option<String>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
}

impl File {
    fn config(self, path: &Path) -> Result<LlmConfig, LlmError> {
        let unsupported = |key, value: String, instead| LlmError::Unsupported {
            path: path.to_owned(),
            key,
            value,
            instead,
        };
        let architecture = match self.model_type.as_str() {
            "llama" => Architecture::Llama,
            "mistral" => Architecture::Mistral,
            "qwen2" => Architecture::Qwen2,
            "qwen3" => Architecture::Qwen3,
            other => {
                let instead = "there are llama, mistral, qwen2 and qwen3";
                return Err(unsupported("model_type", format!("{other:?}"), instead));
            }
        };
        if self.hidden_act != "silu" {
            let value = format!("{:?}", self.hidden_act);
            return Err(unsupported("hidden_act", value, "there is silu"));
        }
        // Qwen's files name a window that is switched off.
        let has_window = match architecture {
            Architecture::Qwen2 | Architecture::Qwen3 => self.use_sliding_window == Some(true),
            Architecture::Llama | Architecture::Mistral => true,
        };
        if let (true, Some(window)) = (has_window, self.sliding_window) {
            let instead = "attention reads all tokens before; take a model without a window";
            return Err(unsupported("sliding_window", window.to_string(), instead));
        }
        if self.quantization_config.is_some() {
            let instead = "take the model's weights in f32, bf16 or f16";
            return Err(unsupported(
                "quantization_config",
                "present".to_owned(),
                instead,
            ));
        }
        if let Some(factor) = self.partial_rotary_factor.filter(|factor| *factor != 1.0) {
            let instead = "all features of a head are rotated";
            return Err(unsupported(
                "partial_rotary_factor",
                factor.to_string(),
                instead,
            ));
        }
        let (heads, width) = (self.num_attention_heads, self.hidden_size);
        let key_heads = self.num_key_value_heads.unwrap_or(heads);
        if key_heads == 0 || !heads.is_multiple_of(key_heads) {
            let instead = "the heads of queries are a multiple of those of keys";
            return Err(unsupported(
                "num_key_value_heads",
                key_heads.to_string(),
                instead,
            ));
        }
        let head_width = self.head_dim.unwrap_or(width / heads);
        if !head_width.is_multiple_of(2) {
            let instead = "a head has an even number of features, which are rotated in pairs";
            return Err(unsupported("head_dim", head_width.to_string(), instead));
        }
        let rope = self.rope_parameters.or(self.rope_scaling);
        let of_rope = rope.as_ref().and_then(|rope| rope.rope_theta);
        let rotary_base = of_rope.or(self.rope_theta).unwrap_or(10_000.0);
        let rotary_scaling = match &rope {
            None => RotaryScaling::None,
            Some(rope) => rope.scaling().map_err(|missing| {
                let kind = rope.rope_type.clone().unwrap_or_default();
                match missing {
                    Missing::Kind => {
                        let instead = "there are default, linear and llama3";
                        unsupported("rope_type", format!("{kind:?}"), instead)
                    }
                    Missing::Key(key) => LlmError::Json {
                        path: path.to_owned(),
                        reason: format!("the rotary embedding {kind:?} lacks {key}"),
                    },
                }
            })?,
        };
        let has_bias = self.attention_bias.unwrap_or(false);
        Ok(LlmConfig {
            architecture,
            vocabulary: self.vocab_size,
            width,
            inner_width: self.intermediate_size,
            layers: self.num_hidden_layers,
            heads,
            key_heads,
            head_width,
            context: self.max_position_embeddings,
            norm_epsilon: self.rms_norm_eps,
            rotary_base,
            rotary_scaling,
            is_tied: self.tie_word_embeddings,
            has_qkv_bias: has_bias || architecture == Architecture::Qwen2,
            has_output_bias: has_bias,
            has_feed_forward_bias: self.mlp_bias.unwrap_or(false),
        })
    }
}

/// What a rotary embedding lacks.
enum Missing {
    /// It is of another kind.
    Kind,
    /// A key of its kind.
    Key(&'static str),
}

impl Rope {
    fn scaling(&self) -> Result<RotaryScaling, Missing> {
        let of = |value: Option<f64>, key| value.ok_or(Missing::Key(key));
        match self.rope_type.as_deref() {
            None | Some("default") => Ok(RotaryScaling::None),
            Some("linear") => Ok(RotaryScaling::Linear {
                factor: of(self.factor, "factor")?,
            }),
            Some("llama3") => Ok(RotaryScaling::Llama3 {
                factor: of(self.factor, "factor")?,
                low_frequency_factor: of(self.low_freq_factor, "low_freq_factor")?,
                high_frequency_factor: of(self.high_freq_factor, "high_freq_factor")?,
                original_context: of(
                    self.original_max_position_embeddings,
                    "original_max_position_embeddings",
                )?,
            }),
            Some(_) => Err(Missing::Kind),
        }
    }
}
