//! Random windows, weights, missing gradients, bad micro-batches, tails and stops, against a model
//! of plain f64 arithmetic.

use burn::{
    module::list_param_ids,
    optim::{GradientsParams, SgdConfig},
    tensor::Tensor,
};
use burn_accum::{AccumConfig, Accumulation, Counted, Normalization};
use burn_update::Update;
use proptest::prelude::*;

use crate::support::{B, Inner, Net, Windows, floats, net, values};

/// One micro-batch: a constant gradient for each parameter that has one.
#[derive(Clone, Debug)]
struct Micro {
    gradients: [Option<f32>; 4],
    items: u8,
    flush: bool,
    stop: bool,
}

fn micro() -> impl Strategy<Value = Micro> {
    let gradient = prop_oneof![
        6 => (-2.0_f32..2.0).prop_map(Some),
        3 => Just(None),
        1 => prop_oneof![Just(f32::NAN), Just(f32::INFINITY)].prop_map(Some),
    ];
    let gradients = proptest::array::uniform4(gradient);
    let rarely = || prop::bool::weighted(0.1);
    (gradients, 1..50_u8, rarely(), rarely()).prop_map(|(gradients, items, flush, stop)| Micro {
        gradients,
        items,
        flush,
        stop,
    })
}

fn normalization() -> impl Strategy<Value = Normalization> {
    prop_oneof![
        Just(Normalization::Mean),
        Just(Normalization::Sum),
        Just(Normalization::Tokens)
    ]
}

/// Every parameter starts at 0 in spirit: how far it has moved, in f64.
#[derive(Default)]
struct Model {
    moved: [f64; 4],
    sums: [Option<f64>; 4],
    weight: f64,
    micro_steps: u64,
    kept: u64,
    updates: u64,
    dropped: u64,
}

impl Model {
    fn step(&mut self, micro: &Micro, normalization: Normalization, steps: usize) {
        let finite = micro.gradients.iter().flatten().all(|g| g.is_finite());
        self.micro_steps += 1;
        if finite {
            self.kept += 1;
            self.weight += match normalization {
                Normalization::Mean => 1.0,
                Normalization::Sum => 0.0,
                Normalization::Tokens => f64::from(micro.items),
            };
            for (sum, gradient) in self.sums.iter_mut().zip(micro.gradients) {
                if let Some(gradient) = gradient {
                    *sum.get_or_insert(0.0) += f64::from(gradient);
                }
            }
        } else {
            self.dropped += 1;
        }
        if self.micro_steps >= steps as u64 || micro.flush {
            self.close();
        }
    }

    fn close(&mut self) {
        if self.kept > 0 {
            self.updates += 1;
            let weight = if self.weight == 0.0 { 1.0 } else { self.weight };
            for (moved, sum) in self.moved.iter_mut().zip(self.sums) {
                *moved += sum.unwrap_or(0.0) / weight;
            }
        }
        self.sums = [None; 4];
        (self.weight, self.micro_steps, self.kept) = (0.0, 0, 0);
    }
}

fn made_up(net: &Net<B>, micro: &Micro, normalization: Normalization) -> GradientsParams {
    let device = Default::default();
    let mut gradients = match normalization {
        // Brings the count, and no gradient.
        Normalization::Tokens => {
            let nothing = Tensor::<B, 1>::zeros([1], &device).require_grad();
            Counted::sum(nothing, f64::from(micro.items)).backward(net)
        }
        _ => GradientsParams::new(),
    };
    for (index, id) in list_param_ids(net).into_iter().enumerate() {
        match (micro.gradients[index], index) {
            (None, _) => {}
            (Some(value), 0) => {
                gradients.register(id, Tensor::<Inner, 2>::full([5, 7], value, &device))
            }
            (Some(value), 2) => {
                gradients.register(id, Tensor::<Inner, 2>::full([7, 3], value, &device))
            }
            (Some(value), _) => {
                let length = if index == 1 { 7 } else { 3 };
                gradients.register(id, Tensor::<Inner, 1>::full([length], value, &device))
            }
        }
    }
    gradients
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn windows_are_exact(
        micros in prop::collection::vec(micro(), 1..30),
        normalization in normalization(),
        steps in 1..6_usize,
    ) {
        let new = || {
            let config = AccumConfig { steps, normalization };
            let windows = Accumulation::new(config).unwrap();
            Windows::of(Update::new(SgdConfig::new().init()), windows)
        };
        let start = net();
        let mut net = start.clone();
        let mut optimizer = new();
        let mut model = Model::default();
        for micro in &micros {
            let (updates, before) = (model.updates, values(&net));
            let gradients = made_up(&net, micro, normalization);
            net = optimizer.step(1.0, net, gradients);
            if micro.flush {
                net = optimizer.flush(1.0, net);
            }
            if micro.stop {
                optimizer = new().load(optimizer.update.record());
            }
            model.step(micro, normalization, steps);

            let counter = optimizer.updates();
            prop_assert_eq!(counter.updates(), model.updates);
            prop_assert_eq!(counter.micro_step(), model.micro_steps);
            prop_assert_eq!(counter.dropped(), model.dropped);
            if model.updates == updates {
                prop_assert_eq!(values(&net), before, "unchanged within a window");
            }
        }
        for (index, (before, after)) in floats(&start).iter().zip(floats(&net)).enumerate() {
            let expected = f64::from(before[0]) - model.moved[index];
            let tolerance = 1e-5 * expected.abs().max(1.0) * micros.len() as f64;
            prop_assert!((expected - f64::from(after[0])).abs() < tolerance, "{expected} {}", after[0]);
        }
    }
}
