//! Where the state of the optimizer is: whole or a shard of it, on the device or on the host.
//!
//! One type for all places, so that the training is compiled once.

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};
use burn::record::Record;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_accum::ClipGlobalNorm;
use burn_decorator::message;
use burn_flex::Flex;
use burn_zero::{
    HostOffload, Memory, OffloadConfig, OffloadRecord, OffloadedAdamW, ParameterShards,
    ZeroOptimizer, tensor_bytes,
};

use super::accumulation::clipped;
use super::carry::{self, OfNamed};
use super::error::GptError;
use super::held::{Held, gradient_bytes};
use super::job::JobConfig;
use super::model::Gpt;
use super::optimizer::{Named, OptimizerConfig, host_adamw};

/// An optimizer with its state on the device or on the host.
#[derive(Clone)]
pub struct Located<B: AutodiffBackend, M: AutodiffModule<B>> {
    place: Place<B, M>,
    held: Held,
}

#[derive(Clone)]
enum Place<B: AutodiffBackend, M: AutodiffModule<B>> {
    Device(OptimizerAdaptor<Named<B::InnerBackend>, M, B>),
    Host(OffloadedAdamW),
    HostBackend(OnFlex),
}

/// An optimizer of Burn that runs on the CPU, whatever the training's backend is.
type OnFlex = HostOffload<
    Flex,
    OptimizerAdaptor<Named<Flex>, ParameterShards<Autodiff<Flex>>, Autodiff<Flex>>,
>;

/// Its state.
#[derive(Record, Clone)]
pub enum LocatedRecord<B: AutodiffBackend> {
    /// On the device.
    Device(OfNamed<B>),
    /// On the host, of AdamW.
    Host(OffloadRecord),
    /// On the host, of the others.
    HostBackend(<OnFlex as Optimizer<Gpt<B>, B>>::Record),
}

impl<B: AutodiffBackend, M: AutodiffModule<B>> Located<B, M> {
    /// The optimizer of a configuration, where it says.
    ///
    /// # Errors
    ///
    /// [`GptError::Offload`].
    fn new(config: &JobConfig, held: &Held) -> Result<Self, GptError> {
        let optimizer = config.optimizer.as_ref().expect("settings name one");
        let adamw = match optimizer {
            OptimizerConfig::AdamW(params) => Some(host_adamw(params)),
            _ => None,
        };
        let place = match (config.zero.offload_optimizer, adamw) {
            (Memory::Device, _) => Place::Device(Named::new(optimizer).into()),
            (Memory::Host, Some(adamw)) => Place::Host(
                OffloadConfig {
                    bucket_elements: config.zero.settings().bucket_elements,
                    ..OffloadConfig::new(adamw)
                }
                .init()?,
            ),
            (Memory::Host, None) => {
                Place::HostBackend(HostOffload::new(Named::new(optimizer).into()))
            }
        };
        let held = held.clone();
        Ok(Self { place, held })
    }

    /// Bytes of the state, and of the parameters beside it on the host.
    fn state_bytes(&self) -> u64 {
        match &self.place {
            Place::Device(optimizer) => bytes_of::<B, _>(optimizer.to_record()),
            Place::Host(optimizer) => optimizer.state_bytes() as u64,
            Place::HostBackend(optimizer) => {
                let record = Optimizer::<M, B>::to_record(optimizer);
                bytes_of::<B, _>(record) + optimizer.parameter_bytes() as u64
            }
        }
    }
}

fn bytes_of<B: Backend, R: Record<B>>(record: R) -> u64 {
    tensor_bytes::<B, R>(record).expect("the state of Burn's optimizers can be serialized")
}

impl<B: AutodiffBackend, M: AutodiffModule<B>> Place<B, M> {
    /// Loads the state of a run that kept it in another place.
    ///
    /// # Panics
    ///
    /// If the state is another optimizer's. The optimizer named in the run's directory has been compared before.
    fn load_carried(self, record: LocatedRecord<B>) -> Self {
        const OTHER: &str =
            "the record is that of another optimizer: resume with the one of its run";
        let to_device = |record| match record {
            LocatedRecord::Device(record) => Some(record),
            LocatedRecord::Host(record) => carry::to_device::<B>(record),
            LocatedRecord::HostBackend(record) => carry::carry::<B, _>(record),
        };
        let record = to_device(record).expect(OTHER);
        match self {
            Self::Device(optimizer) => Self::Device(optimizer.load_record(record)),
            Self::Host(optimizer) => {
                let record = carry::to_host::<B>(record).expect(OTHER);
                Self::Host(Optimizer::<M, B>::load_record(optimizer, record))
            }
            Self::HostBackend(optimizer) => {
                let record = carry::carry::<B, _>(record).expect(OTHER);
                Self::HostBackend(Optimizer::<M, B>::load_record(optimizer, record))
            }
        }
    }
}

impl<B: AutodiffBackend, M: AutodiffModule<B>> Optimizer<M, B> for Located<B, M> {
    type Record = LocatedRecord<B>;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        let elements = module.num_params();
        let module = match &mut self.place {
            Place::Device(optimizer) => optimizer.step(lr, module, grads),
            Place::Host(optimizer) => optimizer.step(lr, module, grads),
            Place::HostBackend(optimizer) => optimizer.step(lr, module, grads),
        };
        if message::received().is_none() {
            self.held.note_step(elements, || self.state_bytes());
        }
        module
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        let elements = module.num_params();
        let module = match &mut self.place {
            Place::Device(optimizer) => optimizer.step_multi(lr, module, grads),
            Place::Host(optimizer) => optimizer.step_multi(lr, module, grads),
            Place::HostBackend(optimizer) => optimizer.step_multi(lr, module, grads),
        };
        if message::received().is_none() {
            self.held.note_step(elements, || self.state_bytes());
        }
        module
    }

    fn to_record(&self) -> LocatedRecord<B> {
        match &self.place {
            Place::Device(optimizer) => LocatedRecord::Device(optimizer.to_record()),
            Place::Host(optimizer) => LocatedRecord::Host(Optimizer::<M, B>::to_record(optimizer)),
            Place::HostBackend(optimizer) => {
                LocatedRecord::HostBackend(Optimizer::<M, B>::to_record(optimizer))
            }
        }
    }

    fn load_record(self, record: LocatedRecord<B>) -> Self {
        let place = match (self.place, record) {
            (Place::Device(optimizer), LocatedRecord::Device(record)) => {
                Place::Device(optimizer.load_record(record))
            }
            (Place::Host(optimizer), LocatedRecord::Host(record)) => {
                Place::Host(Optimizer::<M, B>::load_record(optimizer, record))
            }
            (Place::HostBackend(optimizer), LocatedRecord::HostBackend(record)) => {
                Place::HostBackend(Optimizer::<M, B>::load_record(optimizer, record))
            }
            (place, record) => place.load_carried(record),
        };
        let held = self.held;
        Self { place, held }
    }
}

/// With the whole state, or with a shard of it.
#[derive(Clone)]
pub struct Placed<B: AutodiffBackend> {
    ranks: Ranks<B>,
    held: Held,
}

#[derive(Clone)]
#[allow(clippy::large_enum_variant, reason = "there is one of it")]
enum Ranks<B: AutodiffBackend> {
    One(ClipGlobalNorm<Located<B, Gpt<B>>>),
    Many(ZeroOptimizer<ClipGlobalNorm<Located<B, ParameterShards<B>>>>),
}

impl<B: AutodiffBackend> Placed<B> {
    /// The optimizer of a configuration behind the clipping of its gradients: over `ranks` ranks inside of a Learner.
    ///
    /// # Errors
    ///
    /// [`GptError::Offload`], [`GptError::Options`].
    pub fn new(config: &JobConfig, ranks: usize, held: &Held) -> Result<Self, GptError> {
        let max_norm = config.zero.gradient_clipping;
        let ranks = if ranks == 1 {
            Ranks::One(clipped(Located::new(config, held)?, max_norm))
        } else {
            let clip = clipped(Located::new(config, held)?, max_norm);
            // A rank has only a shard of the gradients, so the norm is reduced over all ranks.
            let norm = clip.norm();
            let zero = ZeroOptimizer::in_learner(clip, config.zero.settings());
            Ranks::Many(zero.with_norm(move |value| norm.provide(value)))
        };
        let held = held.clone();
        Ok(Self { ranks, held })
    }

    /// Gives each of several ranks random numbers of its own: for threads, which share the generator of their process.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        let ranks = match self.ranks {
            Ranks::Many(zero) => Ranks::Many(zero.with_seed(seed)),
            one => one,
        };
        Self { ranks, ..self }
    }
}

impl<B: AutodiffBackend> Optimizer<Gpt<B>, B> for Placed<B> {
    type Record = LocatedRecord<B>;

    fn step(&mut self, lr: LearningRate, module: Gpt<B>, grads: GradientsParams) -> Gpt<B> {
        if message::received().is_none() {
            self.held.note_update();
        }
        match &mut self.ranks {
            Ranks::One(optimizer) => {
                self.held.note_gradients(gradient_bytes(&module, &grads));
                optimizer.step(lr, module, grads)
            }
            Ranks::Many(optimizer) => {
                let module = optimizer.step(lr, module, grads);
                self.held.note_gradients(optimizer.peak_gradient_bytes());
                module
            }
        }
    }

    fn step_multi(
        &mut self,
        lr: LearningRate,
        module: Gpt<B>,
        grads: MultiGradientsParams,
    ) -> Gpt<B> {
        if message::received().is_none() {
            self.held.note_update();
        }
        match &mut self.ranks {
            Ranks::One(optimizer) => optimizer.step_multi(lr, module, grads),
            Ranks::Many(optimizer) => {
                let module = optimizer.step_multi(lr, module, grads);
                self.held.note_gradients(optimizer.peak_gradient_bytes());
                module
            }
        }
    }

    fn to_record(&self) -> LocatedRecord<B> {
        match &self.ranks {
            Ranks::One(optimizer) => optimizer.to_record(),
            Ranks::Many(optimizer) => Optimizer::<Gpt<B>, B>::to_record(optimizer),
        }
    }

    fn load_record(self, record: LocatedRecord<B>) -> Self {
        let ranks = match self.ranks {
            Ranks::One(optimizer) => Ranks::One(optimizer.load_record(record)),
            Ranks::Many(optimizer) => {
                Ranks::Many(Optimizer::<Gpt<B>, B>::load_record(optimizer, record))
            }
        };
        let held = self.held;
        Self { ranks, held }
    }
}
