//! What Burn 0.22.1 allows without a patch: each run, and its gradients compared with those of the
//! plain way.

use std::fmt;
use std::marker::PhantomData;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients as Tape;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::{Autodiff, Flex};
use burn::module::{
    Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer,
};
use burn::nn::{Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::{DType, Device, Distribution, FloatDType, Gradients, Tensor, TensorData};
use burn_amp::{GradScalerConfig, LossScale};

#[derive(Module, Debug)]
struct Block {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(device: &Device) -> Self {
        Self {
            norm: LayerNormConfig::new(8).init(device),
            up: LinearConfig::new(8, 32).init(device),
            down: LinearConfig::new(32, 8).init(device),
        }
    }

    fn run(&self, x: Tensor<3>) -> Tensor<3> {
        let hidden = Gelu::new().forward(self.up.forward(self.norm.forward(x.clone())));
        x + self.down.forward(hidden)
    }
}

fn device() -> Device {
    Device::flex().autodiff()
}

/// The bits of the gradients of a module's parameters, in order of visit.
fn gradients(module: &impl Module, grads: &Gradients) -> Vec<Vec<u8>> {
    struct Collect<'a>(&'a Gradients, Vec<Vec<u8>>);
    impl ModuleVisitor for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let grad = param.val().grad(self.0).expect("every parameter has one");
            assert_eq!(grad.dtype(), DType::F32);
            self.1.push(grad.into_data().as_bytes().to_vec());
        }
    }
    let mut visitor = Collect(grads, Vec::new());
    module.visit(&mut visitor);
    visitor.1
}

type Ad = Autodiff<Flex, NoCheckpointing>;

/// New leaves for a second graph, and which node of the first each stands for.
struct Fresh(Vec<(ParamId, NodeId)>);

impl ModuleMapper for Fresh {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let primitive = tensor.clone().try_into_primitive::<Ad>();
        self.0.push((id, primitive.expect("on Flex").id()));
        Param::from_mapped_value(id, tensor.detach().require_grad(), mapper)
    }
}

#[derive(Clone)]
struct Saved {
    block: Block,
    x: Tensor<3>,
}

impl fmt::Debug for Saved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Saved")
    }
}

/// A block as one operation of the tape: its backward runs the block once more and a backward pass
/// of its own.
#[derive(Debug)]
struct Recompute(PhantomData<Block>);

struct Harvest<'a> {
    grads: Gradients,
    outer: Vec<(ParamId, NodeId)>,
    tape: &'a mut Tape,
}

impl ModuleVisitor for Harvest<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = param.val().grad_remove(&mut self.grads) {
            let outer = self.outer.iter().find(|(id, _)| *id == param.id);
            let grad = grad.try_into_primitive::<Flex>().expect("on Flex");
            self.tape.register::<Flex>(outer.expect("a leaf").1, grad);
        }
    }
}

impl Backward<Flex, 1> for Recompute {
    type State = Saved;

    fn backward(self, ops: Ops<Saved, 1>, tape: &mut Tape, _: &mut Checkpointer) {
        let grad = Tensor::<3>::from_primitive::<Flex>(tape.consume::<Flex>(&ops.node));
        let mut fresh = Fresh(Vec::new());
        let block = ops.state.block.map(&mut fresh);
        let x = ops.state.x.autodiff().require_grad();
        let y = block.run(x.clone());
        let mut grads = (y * grad.autodiff()).sum().backward();
        if let (Some(parent), Some(grad)) = (&ops.parents[0], x.grad_remove(&mut grads)) {
            let grad = grad.try_into_primitive::<Flex>().expect("on Flex");
            tape.register::<Flex>(parent.id, grad);
        }
        let outer = fresh.0;
        block.visit(&mut Harvest { grads, outer, tape });
    }
}

fn checkpoint(block: &Block, x: Tensor<3>) -> Tensor<3> {
    // Recorded, and the record dropped: without autodiff Flex takes its own layer norm, whose
    // results differ in the last bits.
    let y = block.run(x.clone().detach()).inner();
    let y = y.try_into_primitive::<Flex>().expect("on Flex");
    let inner = x.clone().inner();
    let node = x.try_into_primitive::<Ad>().expect("on Flex").node();
    let operation = Recompute(PhantomData).prepare::<NoCheckpointing>([node]);
    let result = match operation.compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let block = block.clone();
            prep.finish(Saved { block, x: inner }, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(y),
    };
    Tensor::from_primitive::<Ad>(result)
}

/// A nested backward pass inside of a backward step, which deadlocks on 0.21.
#[test]
fn a_block_is_recomputed_by_a_custom_operation() {
    let device = device();
    let blocks: Vec<Block> = (0..3).map(|_| Block::new(&device)).collect();
    let x = Tensor::<3>::random([2, 4, 8], Distribution::Default, &device).require_grad();
    let run = |by: &dyn Fn(&Block, Tensor<3>) -> Tensor<3>| {
        let y = blocks.iter().fold(x.clone() * 2.0, |x, block| by(block, x));
        let loss = y.powi_scalar(2).mean();
        let grads = loss.backward();
        let mut found = gradients(&blocks, &grads);
        let of_x = x.grad(&grads).expect("a gradient");
        found.push(of_x.into_data().as_bytes().to_vec());
        found
    };
    let plain = run(&|block, x| block.run(x));
    assert!(run(&checkpoint) == plain, "bit for bit");
}

#[derive(Module, Debug)]
struct ComputeIn {
    #[module(skip)]
    dtype: FloatDType,
}

impl Reparameterization for ComputeIn {
    const NAME: &'static str = "compute_in";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base.cast(self.dtype)
    }
}

struct Lower(FloatDType);

impl Reparameterizer for Lower {
    type Reparam = ComputeIn;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<ComputeIn>) {
        (param, Some(ComputeIn { dtype: self.0 }))
    }
}

/// f32 masters, bf16 arithmetic: what comes in has to be cast by hand, and everything runs in bf16,
/// norms too, for there is no table.
#[test]
fn masters_compute_in_a_low_type() {
    let device = device();
    let linear = LinearConfig::new(8, 8).init(&device);
    let x = Tensor::<2>::random([4, 8], Distribution::Default, &device);
    let low = x.cast(FloatDType::BF16);
    let lowered = linear
        .clone()
        .apply_reparameterization(Lower(FloatDType::BF16));
    let y = lowered.forward(low.clone());
    assert_eq!(y.dtype(), DType::BF16);
    let found = gradients(&linear, &y.cast(FloatDType::F32).mean().backward());
    let by_hand = low.matmul(linear.weight.val().cast(FloatDType::BF16))
        + linear
            .bias
            .as_ref()
            .expect("a bias")
            .val()
            .cast(FloatDType::BF16)
            .unsqueeze();
    let expected = gradients(&linear, &by_hand.cast(FloatDType::F32).mean().backward());
    assert!(found == expected, "bit for bit");
}

/// The loss scale by hand: multiplied before backward, divided out of every gradient. A power of
/// two changes no bit of f32.
#[test]
fn the_loss_is_scaled_by_hand() {
    let device = device();
    let block = Block::new(&device);
    let x = Tensor::<3>::random([2, 4, 8], Distribution::Default, &device);
    let mut scale = LossScale::new(&GradScalerConfig::default());
    let loss = || block.run(x.clone()).powi_scalar(2).mean();
    let plain = loss().backward();
    let scaled = (loss() * scale.scale()).backward();
    let expected = block.up.weight.val().grad(&plain).expect("a gradient");
    let found = block.up.weight.val().grad(&scaled).expect("a gradient") / scale.scale();
    assert_eq!(
        found.into_data().as_bytes(),
        expected.into_data().as_bytes()
    );
    let _ = scale.update(true);
    assert_eq!(scale.scale(), 32768.0);
}

/// All values of a module's parameters, or of their gradients, one after the other.
fn flat(module: &impl Module, grads: Option<&Gradients>) -> Vec<f32> {
    struct Collect<'a>(Option<&'a Gradients>, Vec<f32>);
    impl ModuleVisitor for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let tensor = match self.0 {
                None => param.val().inner(),
                Some(grads) => param.val().grad(grads).expect("every parameter has one"),
            };
            let values = tensor.into_data().try_into_vec::<f32>();
            self.1.extend(values.expect("f32"));
        }
    }
    let mut visitor = Collect(grads, Vec::new());
    module.visit(&mut visitor);
    visitor.1
}

/// Puts values in the place of parameters.
struct Write<'a>(&'a [f32]);

impl ModuleMapper for Write<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let (values, rest) = self.0.split_at(tensor.shape().num_elements());
        self.0 = rest;
        let data = TensorData::new(values.to_vec(), tensor.shape());
        let tensor = Tensor::from_data(data, &tensor.device()).require_grad();
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// ZeRO's stages 1 and 2 with an optimizer of Burn: all parameters as one flat tensor with padding,
/// of which each rank steps its shard with a state of its own. AdamW treats every element alone:
/// bit for bit what it makes of whole parameters.
#[test]
fn an_optimizer_steps_flat_shards() {
    const RANKS: usize = 3;
    const LR: f64 = 1e-2;
    let device = device();
    let x = Tensor::<3>::random([2, 4, 8], Distribution::Default, &device);
    let backward = |block: &Block| block.run(x.clone()).powi_scalar(2).mean().backward();
    let mut block = Block::new(&device);
    let initial = flat(&block, None);
    assert_ne!(initial.len() % RANKS, 0, "no padding to try");
    let padded = |mut values: Vec<f32>| {
        values.resize(values.len().next_multiple_of(RANKS), 0.0);
        let shape = [values.len()];
        Tensor::<1>::from_data(TensorData::new(values, shape), &Device::flex())
    };
    let mut whole = (block.clone(), AdamWConfig::new().init());
    let adamw = AdamWConfig::new().build();
    let mut states = [None, None, None];
    for step in 0..4 {
        let grads = flat(&block, Some(&backward(&block)));
        let parameters = padded(flat(&block, None)).chunk(RANKS, 0);
        let shards = parameters.into_iter().zip(padded(grads).chunk(RANKS, 0));
        let stepped = shards.zip(&mut states).map(|((shard, grad), state)| {
            let (shard, new) = Optimizer::step(&adamw, LR, shard, grad, state.take());
            *state = new;
            shard
        });
        let gathered = Tensor::cat(stepped.collect(), 0).into_data();
        let gathered = gathered.try_into_vec::<f32>().expect("f32");
        block = block.map(&mut Write(&gathered));
        let grads = GradientsParams::from_grads(backward(&whole.0), &whole.0);
        whole.0 = whole.1.step(LR, whole.0, grads);
        let expected = flat(&whole.0, None);
        assert!(flat(&block, None) == expected, "step {step}: bit for bit");
    }
    let moved = flat(&block, None) != initial;
    assert!(moved, "nothing was stepped");
}
