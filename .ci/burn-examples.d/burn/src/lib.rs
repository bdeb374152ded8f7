//! Burn, with data sets that are made instead of downloaded, and loaders that give the same batches
//! in the same order in each run: what Burn's examples use stands at the same paths.

pub use real::*;

pub mod backend {
    pub use burn_flex::Flex;
    pub use real::backend::*;
}

pub mod vision {
    pub use burn_vision::*;
}

pub mod train {
    pub use real::train::*;

    pub mod metric {
        use std::sync::Arc;

        pub use real::train::metric::*;

        /// Burn's shows a GPU's use.
        #[derive(Clone, Default)]
        pub struct CudaMetric;

        impl CudaMetric {
            pub fn new() -> Self {
                Self
            }
        }

        impl Metric for CudaMetric {
            type Input = ();

            fn name(&self) -> MetricName {
                Arc::new("Cuda".to_owned())
            }

            fn update(&mut self, _: &(), _: &MetricMetadata) -> SerializedEntry {
                SerializedEntry::new(String::new(), String::new())
            }

            fn clear(&mut self) {}
        }
    }
}

pub mod data {
    pub use real::data::*;

    pub mod dataloader {
        use std::sync::Arc;

        pub use real::data::dataloader::*;
        use real::data::dataset::Dataset;
        use real::tensor::backend::Backend;

        /// Burn's without workers, whose batches come in another order in each run.
        pub struct DataLoaderBuilder<B: Backend, I, O>(
            real::data::dataloader::DataLoaderBuilder<B, I, O>,
        );

        impl<B, I, O> DataLoaderBuilder<B, I, O>
        where
            B: Backend,
            I: Send + Sync + Clone + core::fmt::Debug + 'static,
            O: Send + Clone + core::fmt::Debug + 'static,
        {
            pub fn new<Bt: batcher::Batcher<B, I, O> + 'static>(batcher: Bt) -> Self {
                Self(real::data::dataloader::DataLoaderBuilder::new(batcher))
            }

            pub fn batch_size(self, batch_size: usize) -> Self {
                Self(self.0.batch_size(batch_size))
            }

            pub fn shuffle(self, seed: u64) -> Self {
                Self(self.0.shuffle(seed))
            }

            pub fn num_workers(self, _: usize) -> Self {
                self
            }

            pub fn build<D: Dataset<I> + 'static>(self, dataset: D) -> Arc<dyn DataLoader<B, O>> {
                self.0.build(dataset)
            }
        }
    }

    pub mod dataset {
        use core::marker::PhantomData;

        pub use real::data::dataset::*;
        use serde::de::DeserializeOwned;

        /// A number that depends on `seed` only: the output of SplitMix64.
        pub fn number(seed: u64) -> u64 {
            let mut z = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        }

        /// Texts of a few words, whose first one depends on the label.
        pub struct SqliteDataset<I>(PhantomData<fn() -> I>);

        impl<I: DeserializeOwned + Clone + Send + Sync> Dataset<I> for SqliteDataset<I> {
            fn get(&self, index: usize) -> Option<I> {
                if index >= self.len() {
                    return None;
                }
                let label = number(index as u64) % 4;
                let words =
                    (0..12).map(|word| format!("word{}", number((index * 12 + word) as u64) % 50));
                let text = format!("topic{label} {}", words.collect::<Vec<_>>().join(" "));
                let item = serde_json::json!({
                    "text": text, "title": text, "content": text, "label": label
                });
                serde_json::from_value(item).ok()
            }

            fn len(&self) -> usize {
                1000
            }
        }

        pub mod source {
            pub mod huggingface {
                use core::marker::PhantomData;

                use super::super::SqliteDataset;

                pub struct HuggingfaceDatasetLoader;

                impl HuggingfaceDatasetLoader {
                    pub fn new(_: &str) -> Self {
                        Self
                    }

                    pub fn dataset<I>(self, _: &str) -> Result<SqliteDataset<I>, String> {
                        Ok(SqliteDataset(PhantomData))
                    }
                }
            }
        }

        pub mod transform {
            use core::marker::PhantomData;

            use real::data::dataset::Dataset;
            pub use real::data::dataset::transform::*;

            /// At most as many items as these, of a sample that is the same in each run.
            const MOST: usize = 64;

            pub struct SamplerDataset<D, I> {
                dataset: D,
                size: usize,
                item: PhantomData<fn() -> I>,
            }

            impl<D: Dataset<I>, I: Send + Sync> SamplerDataset<D, I> {
                pub fn new(dataset: D, size: usize) -> Self {
                    let size = size.min(MOST);
                    let item = PhantomData;
                    Self {
                        dataset,
                        size,
                        item,
                    }
                }

                pub fn with_replacement(dataset: D, size: usize) -> Self {
                    Self::new(dataset, size)
                }

                pub fn without_replacement(dataset: D, size: usize) -> Self {
                    Self::new(dataset, size)
                }
            }

            impl<D: Dataset<I>, I: Send + Sync> Dataset<I> for SamplerDataset<D, I> {
                fn get(&self, index: usize) -> Option<I> {
                    let number = super::number(index as u64) as usize;
                    (index < self.size).then(|| self.dataset.get(number % self.dataset.len()))?
                }

                fn len(&self) -> usize {
                    self.size
                }
            }
        }

        pub mod vision {
            use serde::{Deserialize, Serialize};

            use super::{Dataset, number};

            #[derive(Deserialize, Serialize, Debug, Clone)]
            pub struct MnistItem {
                pub image: [[f32; 28]; 28],
                pub label: u8,
            }

            /// A bright row and a bright column for each digit, with noise.
            pub struct MnistDataset {
                seed: u64,
                len: usize,
                /// Items that can be got: mnist cuts the training data by Burn's numbers.
                all: usize,
            }

            impl MnistDataset {
                pub fn train() -> Self {
                    Self {
                        seed: 0,
                        len: 1024,
                        all: 60_000,
                    }
                }

                pub fn test() -> Self {
                    Self {
                        seed: 1 << 32,
                        len: 256,
                        all: 256,
                    }
                }
            }

            impl Dataset<MnistItem> for MnistDataset {
                fn get(&self, index: usize) -> Option<MnistItem> {
                    if index >= self.all {
                        return None;
                    }
                    let seed = self.seed + index as u64;
                    let label = (number(seed) % 10) as u8;
                    let line = 4 + 2 * usize::from(label);
                    let mut image = [[0.0; 28]; 28];
                    for (y, row) in image.iter_mut().enumerate() {
                        for (x, pixel) in row.iter_mut().enumerate() {
                            let noise = (number(seed * 784 + (y * 28 + x) as u64) % 64) as f32;
                            *pixel = if y == line || x == 31 - line {
                                191.0 + noise
                            } else {
                                noise
                            };
                        }
                    }
                    Some(MnistItem { image, label })
                }

                fn len(&self) -> usize {
                    self.len
                }
            }
        }
    }
}
