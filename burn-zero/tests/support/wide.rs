//! A model of many small parameters, which is large by value.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, Lstm, LstmConfig};
use burn::prelude::*;

pub const WIDTH: usize = 3;

/// Two LSTM blocks and as many linear layers as there are names, each a field of its own.
macro_rules! wide {
    ($($layer:ident)*) => {
        #[derive(Module, Debug)]
        pub struct Wide<B: Backend> {
            first: Lstm<B>,
            second: Lstm<B>,
            $(pub $layer: Linear<B>,)*
        }

        impl<B: Backend> Wide<B> {
            pub fn new(device: &B::Device) -> Self {
                let lstm = || LstmConfig::new(WIDTH, WIDTH, true).init(device);
                Self {
                    first: lstm(),
                    second: lstm(),
                    $($layer: LinearConfig::new(WIDTH, WIDTH).init(device),)*
                }
            }

            pub fn loss(&self, x: Tensor<B, 3>) -> Tensor<B, 1> {
                let (x, _) = self.first.forward(x, None);
                let (x, _) = self.second.forward(x, None);
                $(let x = self.$layer.forward(x.clone()) + x;)*
                x.square().mean()
            }
        }
    };
}

wide! {
    a0 a1 a2 a3 a4 a5 a6 a7 a8 a9 b0 b1 b2 b3 b4 b5 b6 b7 b8 b9 c0 c1 c2 c3 c4 c5 c6 c7 c8 c9
    d0 d1 d2 d3 d4 d5 d6 d7 d8 d9 e0 e1 e2 e3 e4 e5 e6 e7 e8 e9 f0 f1 f2 f3 f4 f5 f6 f7 f8 f9
}
