//! A tokenizer of words that needs no download.

pub struct Tokenizer;

pub struct Encoding(Vec<u32>);

const WORDS: u32 = 128;

impl Tokenizer {
    pub fn from_pretrained(_: &str, _: Option<()>) -> Result<Self, String> {
        Ok(Self)
    }

    pub fn encode(&self, text: &str, _: bool) -> Result<Encoding, String> {
        let hash = |word: &str| {
            word.bytes()
                .fold(7_u32, |hash, byte| hash.wrapping_mul(31) + u32::from(byte))
        };
        let ids = text
            .split_whitespace()
            .map(|word| 1 + hash(word) % (WORDS - 1));
        Ok(Encoding(ids.collect()))
    }

    pub fn decode(&self, ids: &[u32], _: bool) -> Result<String, String> {
        Ok(format!("{ids:?}"))
    }

    pub fn get_vocab_size(&self, _: bool) -> usize {
        WORDS as usize
    }

    pub fn token_to_id(&self, _: &str) -> Option<u32> {
        Some(0)
    }
}

impl Encoding {
    pub fn get_ids(&self) -> &[u32] {
        &self.0
    }
}
