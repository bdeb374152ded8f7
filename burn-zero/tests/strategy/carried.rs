//! The model's output as bytes.

use burn_zero::RankItem;

use crate::model::Output;

impl RankItem for Output {
    fn into_bytes(self) -> Vec<u8> {
        let mut bytes = self.loss.to_le_bytes().to_vec();
        bytes.push(self.slow.into());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let (loss, slow) = bytes.split_first_chunk().ok_or("there is no loss")?;
        Ok(Self {
            loss: f32::from_le_bytes(*loss),
            slow: slow == [1],
        })
    }
}
