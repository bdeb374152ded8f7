//! Outputs of models as bytes.

use burn::tensor::{BasicOps, Tensor, TensorData, backend::Backend};
use burn::train::{
    ClassificationOutput, ItemLazy, MultiLabelClassificationOutput, RegressionOutput,
    SequenceOutput,
};
use burn_backend::DType;

/// An output of a model that is sent to rank 0's process, which computes the metrics of all ranks: see
/// [`ZeroStrategy::sharing_items`](crate::ZeroStrategy::sharing_items).
///
/// Burn's outputs are such items. For one of your own, write what its metrics need:
///
/// ```
/// use burn::train::ItemLazy;
/// use burn_zero::RankItem;
///
/// struct Loss(f32);
///
/// impl ItemLazy for Loss {
///     type ItemSync = Self;
///     fn sync(self) -> Self { self }
/// }
///
/// impl RankItem for Loss {
///     fn into_bytes(self) -> Vec<u8> { self.0.to_le_bytes().into() }
///     fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
///         let bytes = bytes.try_into().map_err(|_| "a loss has four bytes")?;
///         Ok(Self(f32::from_le_bytes(bytes)))
///     }
/// }
/// ```
pub trait RankItem: ItemLazy {
    /// The data that the metrics need.
    fn into_bytes(self) -> Vec<u8>;

    /// The item, from the bytes of the same program on another rank.
    ///
    /// # Errors
    ///
    /// What is wrong with the bytes.
    fn from_bytes(bytes: &[u8]) -> Result<Self, String>
    where
        Self: Sized;
}

impl RankItem for () {
    fn into_bytes(self) -> Vec<u8> {
        Vec::new()
    }

    fn from_bytes(_: &[u8]) -> Result<Self, String> {
        Ok(())
    }
}

/// Concatenated tensors: of each the type and shape as JSON, then the elements.
fn pack(tensors: impl IntoIterator<Item = TensorData>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for data in tensors {
        let head = serde_json::to_vec(&(data.dtype, data.shape.to_vec(), data.bytes.len()));
        let head = head.expect("a type and numbers are plain");
        bytes.extend_from_slice(&(head.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&head);
        bytes.extend_from_slice(&data.bytes);
    }
    bytes
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn next(&mut self) -> Result<TensorData, String> {
        let (length, rest) = self.0.split_first_chunk().ok_or("a tensor is missing")?;
        let length = u64::from_le_bytes(*length) as usize;
        let (head, rest) = rest.split_at_checked(length).ok_or("it is cut off")?;
        let head = serde_json::from_slice(head).map_err(|error| error.to_string())?;
        let (dtype, shape, length): (DType, Vec<usize>, usize) = head;
        let (bytes, rest) = rest.split_at_checked(length).ok_or("it is cut off")?;
        self.0 = rest;
        Ok(TensorData::from_bytes_vec(bytes.to_vec(), shape, dtype))
    }

    fn tensor<B: Backend, const D: usize, K: BasicOps<B>>(
        &mut self,
    ) -> Result<Tensor<B, D, K>, String> {
        let data = self.next()?;
        let dtype = data.dtype;
        Ok(Tensor::from_data(data, (&Default::default(), dtype)))
    }
}

/// For an output that is a loss, an output and targets.
macro_rules! three_tensors {
    ($($item:ident)*) => {
        $(impl<B: Backend> RankItem for $item<B> {
            fn into_bytes(self) -> Vec<u8> {
                pack([
                    self.loss.into_data(),
                    self.output.into_data(),
                    self.targets.into_data(),
                ])
            }

            fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
                let mut reader = Reader(bytes);
                Ok(Self::new(
                    reader.tensor()?,
                    reader.tensor()?,
                    reader.tensor()?,
                ))
            }
        })*
    };
}

three_tensors!(ClassificationOutput MultiLabelClassificationOutput RegressionOutput);

impl<B: Backend> RankItem for SequenceOutput<B> {
    fn into_bytes(self) -> Vec<u8> {
        let tensors = [
            self.loss.into_data(),
            self.logits.into_data(),
            self.targets.into_data(),
        ];
        pack(
            tensors
                .into_iter()
                .chain(self.predictions.map(Tensor::into_data)),
        )
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let mut reader = Reader(bytes);
        let (loss, logits, targets) = (reader.tensor()?, reader.tensor()?, reader.tensor()?);
        let predictions = match reader.0 {
            [] => None,
            _ => Some(reader.tensor()?),
        };
        Ok(Self::new(loss, logits, predictions, targets))
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Int;
    use burn_flex::Flex;

    use super::*;

    #[test]
    fn outputs_come_back_bit_for_bit() {
        let device = Default::default();
        let loss = Tensor::<Flex, 1>::from_floats([0.1], &device);
        let output =
            Tensor::<Flex, 2>::from_floats([[0.3, -0.7], [f32::MIN_POSITIVE, 1e30]], &device);
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
}
