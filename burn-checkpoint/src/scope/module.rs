//! Checkpointing that is chosen where a model is configured.

use burn::module::{
    AutodiffModule, Content, Devices, HasAutodiffModule, Module, ModuleDisplay,
    ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::tensor::backend::{AutodiffBackend, Backend};

use crate::scope::checkpoint::checkpoint_with;
use crate::scope::outputs::Outputs;
use crate::scope::policy::Policy;

/// A module that runs in a checkpoint scope. Its parameters, their paths and its record are those
/// of the wrapped module, so a record can be loaded with and without the wrapper.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Tensor, activation::gelu, backend::Backend};
/// use burn_checkpoint::{Checkpointed, Policy, Remat};
/// use burn_flex::Flex;
///
/// #[derive(Module, Debug)]
/// struct Model<B: Backend> {
///     blocks: Vec<Checkpointed<Linear<B>>>,
/// }
///
/// type B = Autodiff<Remat<Flex>>;
/// let device = Default::default();
/// let block = || Checkpointed::new(LinearConfig::new(8, 8).init(&device), Policy::Recompute);
/// let model = Model::<B> { blocks: vec![block(), block()] };
/// let mut x = Tensor::<B, 2>::ones([2, 8], &device);
/// for block in &model.blocks {
///     x = block.run(|linear| gelu(linear.forward(x)));
/// }
/// let grads = x.sum().backward();
/// assert!(model.blocks[0].inner().weight.grad(&grads).is_some());
/// ```
#[derive(Clone, Debug)]
pub struct Checkpointed<M> {
    module: M,
    policy: Policy,
}

impl<M> Checkpointed<M> {
    /// Runs `module` in scopes with this policy.
    pub fn new(module: M, policy: Policy) -> Self {
        Self { module, policy }
    }

    /// Runs `forward` on the module in a scope: [`checkpoint_with`], with its cost.
    pub fn run<R: Outputs>(&self, forward: impl FnOnce(&M) -> R) -> R {
        checkpoint_with(self.policy.clone(), || forward(&self.module))
    }

    /// The module, to be run without a scope.
    pub fn inner(&self) -> &M {
        &self.module
    }

    /// The module alone.
    pub fn into_inner(self) -> M {
        self.module
    }

    fn map_inner<N>(self, map: impl FnOnce(M) -> N) -> Checkpointed<N> {
        Checkpointed::new(map(self.module), self.policy)
    }
}

impl<B: Backend, M: Module<B>> Module<B> for Checkpointed<M> {
    type Record = M::Record;

    fn collect_devices(&self, devices: Devices<B>) -> Devices<B> {
        self.module.collect_devices(devices)
    }

    fn fork(self, device: &B::Device) -> Self {
        self.map_inner(|module| module.fork(device))
    }

    fn to_device(self, device: &B::Device) -> Self {
        self.map_inner(|module| module.to_device(device))
    }

    fn visit<Visitor: ModuleVisitor<B>>(&self, visitor: &mut Visitor) {
        self.module.visit(visitor);
    }

    fn map<Mapper: ModuleMapper<B>>(self, mapper: &mut Mapper) -> Self {
        self.map_inner(|module| module.map(mapper))
    }

    fn load_record(self, record: Self::Record) -> Self {
        self.map_inner(|module| module.load_record(record))
    }

    fn into_record(self) -> Self::Record {
        self.module.into_record()
    }
}

/// The module for validation runs in a scope too, which does nothing without autodiff's tape.
impl<B: AutodiffBackend, M: AutodiffModule<B>> AutodiffModule<B> for Checkpointed<M> {
    type InnerModule = Checkpointed<M::InnerModule>;

    fn valid(&self) -> Self::InnerModule {
        Checkpointed::new(self.module.valid(), self.policy.clone())
    }

    fn from_inner(module: Self::InnerModule) -> Self {
        module.map_inner(M::from_inner)
    }
}

impl<B: AutodiffBackend, M: HasAutodiffModule<B>> HasAutodiffModule<B> for Checkpointed<M> {
    type TrainModule = Checkpointed<M::TrainModule>;
}

impl<M: ModuleDisplay> ModuleDisplay for Checkpointed<M> {}

impl<M: ModuleDisplay> ModuleDisplayDefault for Checkpointed<M> {
    fn content(&self, content: Content) -> Option<Content> {
        content
            .add("policy", &self.policy.name().to_owned())
            .add("module", &self.module)
            .optional()
    }
}
