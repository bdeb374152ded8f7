//! Budgets: the same bits at any limit, and the limit kept.

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn_checkpoint::{MemoryBudget, Remat, RematStats, Verify, checkpoint};
use burn_flex::Flex;

use crate::models::{
    Around, Bare, Cnn, Mlp, Model, Transformer, generator, model, parameters, step, step_of,
};

type Plain = Autodiff<Flex>;
type Managed = Autodiff<Remat<Flex>>;

/// The most bytes that a step needs if nothing is evicted.
fn unconstrained<R: AutodiffBackend, N: Model<R>>() -> u64 {
    let model = model::<R, N>();
    let budget = MemoryBudget::bytes(u64::MAX / 2).install();
    step_of::<R, N>(&model, &Bare);
    assert_eq!(RematStats::of_thread().evicted_operations, 0);
    budget.peak_bytes()
}

fn any_limit<P, R, M, N>()
where
    P: AutodiffBackend,
    R: AutodiffBackend,
    M: Model<P>,
    N: Model<R>,
{
    let _generator = generator();
    let _verify = Verify::on();
    let plain = step::<P, M>(&Bare);
    RematStats::reset_thread();
    let peak = unconstrained::<R, N>();
    let mut floor = 0;
    for percent in [0, 5, 20, 40, 60, 90] {
        RematStats::reset_thread();
        let model = model::<R, N>();
        let budget = MemoryBudget::bytes(peak * percent / 100).install();
        let found = step_of::<R, N>(&model, &Bare);
        let reached = budget.peak_bytes();
        drop((budget, model));
        assert!(plain == found, "{percent} %");
        let stats = RematStats::of_thread();
        assert!(stats.evicted_operations > 0, "{percent} %: {stats:?}");
        assert_eq!(stats.live_bytes, 0, "{percent} %");
        println!("{percent} %: {reached} of {peak} bytes, {stats:?}");
        // The size of an operation's result is a guess the first time, and there is a floor.
        if percent == 0 {
            floor = reached;
        }
        let limit = floor.max(peak * percent / 100) + peak / 20;
        assert!(reached <= limit, "{percent} %: {reached} of {peak}");
        assert!(reached < peak, "{percent} %");
    }
}

#[test]
fn mlp_at_any_limit() {
    any_limit::<Plain, Managed, Mlp<_>, Mlp<_>>();
}

#[test]
fn cnn_at_any_limit() {
    any_limit::<Plain, Managed, Cnn<_>, Cnn<_>>();
}

#[test]
fn transformer_at_any_limit() {
    any_limit::<Plain, Managed, Transformer<_>, Transformer<_>>();
}

#[test]
fn balanced_checkpointing_at_any_limit() {
    type P = Autodiff<Flex, BalancedCheckpointing>;
    type R = Autodiff<Remat<Flex>, BalancedCheckpointing>;
    any_limit::<P, R, Mlp<_>, Mlp<_>>();
}

#[test]
fn autocast_at_any_limit() {
    use burn_amp::Autocast;
    type P = Autocast<Autodiff<Flex>>;
    type R = Autocast<Autodiff<Remat<Flex>>>;
    any_limit::<P, R, Mlp<_>, Mlp<_>>();
}

/// The parameters after some steps of AdamW, and what is done before each.
fn train<B: AutodiffBackend, M: Model<B> + AutodiffModule<B>>(
    steps: usize,
    around: &impl Around,
    mut before: impl FnMut(usize),
) -> Vec<Vec<u8>> {
    let device = Default::default();
    let mut model = model::<B, M>();
    let mut optimizer = AdamWConfig::new().init();
    for index in 0..steps {
        before(index);
        let loss = model.loss(around, &device);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, grads);
    }
    parameters::<B, M>(&model)
}

struct Scopes;

impl Around for Scopes {
    fn block<B: Backend, const D: usize>(
        &self,
        region: impl FnOnce() -> Tensor<B, D>,
    ) -> Tensor<B, D> {
        checkpoint(region)
    }
}

#[test]
fn steps_do_not_add_up() {
    let _generator = generator();
    let plain = train::<Plain, Transformer<_>>(30, &Bare, |_| {});
    let budget = MemoryBudget::bytes(60_000).install();
    let mut live = Vec::new();
    let found = train::<Managed, Transformer<_>>(30, &Bare, |_| live.push(budget.live_bytes()));
    assert!(plain == found);
    let stats = RematStats::of_thread();
    println!("{live:?} {stats:?}");
    assert!(stats.evicted_operations > 0);
    assert!(live[29] <= live[3], "{live:?}");
    drop(budget);
    assert_eq!(RematStats::of_thread().live_bytes, 0);
}

#[test]
fn a_scope_within_a_budget() {
    let _generator = generator();
    let plain = train::<Plain, Mlp<_>>(3, &Bare, |_| {});
    for bytes in [1_000, 20_000, 1 << 30] {
        let _budget = MemoryBudget::bytes(bytes).install();
        assert!(
            plain == train::<Managed, Mlp<_>>(3, &Scopes, |_| {}),
            "{bytes}"
        );
    }
}

#[test]
fn a_fraction_of_the_tape() {
    let _generator = generator();
    let plain = train::<Plain, Mlp<_>>(3, &Bare, |_| {});
    let budget = MemoryBudget::fraction(0.5).expect("a fraction").install();
    assert_eq!(budget.limit_bytes(), []);
    assert!(plain == train::<Managed, Mlp<_>>(3, &Bare, |_| {}));
    let limit = budget.limit_bytes()[0].expect("it is measured by now");
    assert!(limit < budget.peak_bytes() && RematStats::of_thread().evicted_operations > 0);
    assert!(MemoryBudget::fraction(0.0).is_err() && MemoryBudget::fraction(1.5).is_err());
}

#[test]
#[should_panic(expected = "needs at least")]
fn a_strict_budget_refuses() {
    let _generator = generator();
    let _budget = MemoryBudget::bytes(1000).strict().install();
    step::<Managed, Mlp<_>>(&Bare);
}

#[test]
fn measured_costs() {
    let _generator = generator();
    let plain = train::<Plain, Transformer<_>>(3, &Bare, |_| {});
    let budget = MemoryBudget::bytes(60_000).measured_costs().install();
    assert!(plain == train::<Managed, Transformer<_>>(3, &Bare, |_| {}));
    assert!(RematStats::of_thread().evicted_operations > 0);
    drop(budget);
}
