//! Which gradients are non-finite.

use burn::{
    module::{AutodiffModule, ModuleVisitor, Param},
    tensor::{
        Tensor,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_decorator::gradient::non_finite_on_any_rank;

use crate::arrived::{Arrived, on, widen};

/// What one host read told of a micro-step.
pub(crate) struct Findings {
    /// Paths of the parameters with a non-finite gradient on any rank: in module order, or in that of their names if there are
    /// several ranks.
    pub(crate) culprits: Vec<String>,
    /// The values of the counts that were read along.
    pub(crate) counts: Vec<f64>,
}

/// Looks for non-finite gradients on all ranks, and reads the `counts` that were taken out of them along.
///
/// A sum of finite numbers may overflow, but a sum that is finite has only finite terms: infinities and NaNs survive
/// every addition. So one reduction a gradient, without temporaries, is proof of all being well; only if it fails an
/// exact look follows.
pub(crate) fn inspect<B, M>(
    module: &M,
    arrived: &Arrived,
    counts: Vec<Tensor<B::InnerBackend, 1>>,
) -> Findings
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    let (paths, mut probes) = probe::<B, M>(module, arrived, Probe::Sum);
    let gradients = probes.len();
    probes.extend(counts);
    let mut values = read(probes);
    let counts = values.split_off(gradients);

    let mut culprits = Vec::new();
    if values.iter().any(|value| !value.is_finite()) {
        let (_, probes) = probe::<B, M>(module, arrived, Probe::Exact);
        let found = paths.into_iter().zip(read(probes));
        culprits.extend(found.filter_map(|(path, flag)| (flag != 0.0).then_some(path)));
        // One for each device.
        culprits.dedup();
    }
    // A rank that drops a micro-batch or a window alone would part from the others.
    let culprits = non_finite_on_any_rank(culprits);
    Findings { culprits, counts }
}

/// The values of `[1]` tensors, in one host read.
pub(crate) fn read<I: Backend>(tensors: Vec<Tensor<I, 1>>) -> Vec<f64> {
    let Some(device) = tensors.first().map(Tensor::device) else {
        return Vec::new();
    };
    let tensors = tensors.into_iter().map(|tensor| on(widen(tensor), &device));
    let values = Tensor::cat(tensors.collect(), 0).into_data();
    values.iter::<f64>().collect()
}

#[derive(Clone, Copy)]
enum Probe {
    /// The sum of the gradient.
    Sum,
    /// Not 0 if the gradient is non-finite.
    Exact,
}

fn probe<B, M>(
    module: &M,
    arrived: &Arrived,
    probe: Probe,
) -> (Vec<String>, Vec<Tensor<B::InnerBackend, 1>>)
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    let mut prober = Prober {
        arrived,
        probe,
        path: Vec::new(),
        paths: Vec::new(),
        probes: Vec::new(),
    };
    module.visit(&mut prober);
    (prober.paths, prober.probes)
}

struct Prober<'a, I: Backend> {
    arrived: &'a Arrived,
    probe: Probe,
    path: Vec<String>,
    paths: Vec<String>,
    probes: Vec<Tensor<I, 1>>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Prober<'_, B::InnerBackend> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        for gradient in self.arrived.each::<B::InnerBackend, D>(param.id) {
            self.paths.push(self.path.join("."));
            self.probes.push(match self.probe {
                Probe::Sum => widen(gradient).sum(),
                Probe::Exact => {
                    let non_finite = gradient.clone().is_nan().bool_or(gradient.is_inf());
                    non_finite.any().float()
                }
            });
        }
    }
}
