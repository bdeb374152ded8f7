//! Operations that are not in Burn's table: a user's own kernels.

use std::sync::Arc;

use burn_backend::Backend;

use super::backend::Remat;
use crate::node::handle::Handle;
use crate::node::kind::{Float, Value};
use crate::node::recipe::{SavedValue, recipe};
use crate::record::context;
use crate::record::op::OpInfo;
use crate::record::work::Work;
use crate::record::{Call, Results};
use crate::scope::units::{self, Unit};

impl<B: Backend> Remat<B> {
    /// Runs an operation of your own with its recipe: a scope or a budget drops its result and
    /// calls `run` again when it is needed, with the same operands. The result of a custom kernel
    /// that runs otherwise is kept, and its operands are brought back for it.
    ///
    /// `run` has to be a function of its operands: no random numbers, no state. It returns one
    /// tensor, or `Value::Many` of them. `op` says what the result costs; a result of
    /// [`Work::Fixed`] is kept. The name of an operation that only backward runs ends in
    /// `_backward`.
    ///
    /// # Cost
    ///
    /// Outside of scopes and budgets none of its own. Inside three allocations, one more than an
    /// operation of Burn's: its node, its recipe and `run`; and one for each operand that is not
    /// managed.
    ///
    /// # Panics
    ///
    /// If `run` does.
    ///
    /// ```
    /// use burn::backend::Autodiff;
    /// use burn::tensor::backend::Backend;
    /// use burn::tensor::ops::FloatTensor;
    /// use burn::tensor::{Tensor, TensorPrimitive};
    /// use burn_checkpoint::{OpInfo, Remat, RematStats, Work, checkpoint, kinds::Value};
    /// use burn_flex::Flex;
    ///
    /// trait Fused: Backend {
    ///     /// exp(x) + y
    ///     fn exp_add(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self>;
    /// }
    ///
    /// impl Fused for Flex {
    ///     fn exp_add(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self> {
    ///         Flex::float_add(Flex::float_exp(x), y) // your kernel
    ///     }
    /// }
    /// # use burn::tensor::ops::FloatTensorOps;
    ///
    /// impl<B: Fused> Fused for Remat<B> {
    ///     fn exp_add(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self> {
    ///         const OP: &OpInfo = &OpInfo::custom("exp_add", Work::Math);
    ///         let operands = [Value::Float(x), Value::Float(y)];
    ///         let run = |[x, y]: [Value<B>; 2]| Value::Float(B::exp_add(x.float(), y.float()));
    ///         Remat::<B>::operation(OP, operands, run).float()
    ///     }
    /// }
    ///
    /// type Managed = Remat<Flex>;
    /// let x = Tensor::<Managed, 1>::from_floats([0.0, 1.0], &Default::default());
    /// let exp_add = |x: Tensor<Managed, 1>| {
    ///     let [x, y] = [x.clone(), x].map(|x| x.into_primitive().tensor());
    ///     Tensor::<Managed, 1>::from_primitive(TensorPrimitive::Float(Managed::exp_add(x, y)))
    /// };
    /// let mut saved = None;
    /// let y = checkpoint(|| {
    ///     let y = exp_add(x.clone());
    ///     saved = Some(y.clone()); // as autodiff's tape would
    ///     y.sin()
    /// });
    /// assert_eq!(RematStats::of_thread().evicted_operations, 1);
    /// assert_eq!(saved.unwrap().into_data(), exp_add(x).into_data());
    /// assert_eq!(RematStats::of_thread().replayed_operations, 1);
    /// ```
    pub fn operation<const N: usize>(
        op: &'static OpInfo,
        operands: [Value<Self>; N],
        run: impl Fn([Value<B>; N]) -> Value<B> + Send + Sync + 'static,
    ) -> Value<Self> {
        let unit = units::exist()
            .then(|| operands.iter().find_map(unit))
            .flatten();
        let _reached = unit.and_then(|unit| units::reach(&unit));
        if !context::records() {
            return resident(run(operands.map(inner)));
        }
        let run = Arc::new(run);
        let mut call = Call::<B>::new(op);
        let comes_back = !matches!(op.work, Work::Fixed | Work::Pass);
        if comes_back {
            operands.iter().for_each(|operand| show(operand, &mut call));
        }
        call.begin();
        let recipe = (comes_back && call.needs_recipe()).then(|| {
            let (again, saved) = (run.clone(), operands.each_ref().map(save));
            recipe::<B, _>(move |visit| {
                if let Some(visit) = visit {
                    saved.iter().for_each(|operand| operand.sources(visit));
                    return Value::Absent;
                }
                again(saved.each_ref().map(SavedValue::load))
            })
        });
        let mut value = match call.retry(recipe.as_ref()) {
            Some(value) => value,
            None => run(operands.map(inner)),
        };
        let kinds = value.clone();
        let mut results = call.results(&mut value, recipe);
        managed(&kinds, &mut results)
    }
}

/// A value with its tensors mapped: `$x` by `$tensor`, the list `$xs` by `$list`, and `$absent`
/// where there is none.
macro_rules! map_value {
    ($value:expr, $x:pat => $tensor:expr, $xs:pat => $list:expr, $absent:expr) => {
        match $value {
            Value::Float($x) => Value::Float($tensor),
            Value::Int($x) => Value::Int($tensor),
            Value::Bool($x) => Value::Bool($tensor),
            Value::Quant(boxed) => Value::Quant(Box::new({
                let $x = *boxed;
                $tensor
            })),
            Value::Many($xs) => Value::Many($list),
            Value::Absent => $absent,
        }
    };
}

/// An operand as the inner backend takes it: brought back if it is evicted.
fn inner<B: Backend>(value: Value<Remat<B>>) -> Value<B> {
    map_value!(value, x => x.into_inner(), xs => xs.into_iter().map(inner).collect(), Value::Absent)
}

/// The unit that an operand is a parameter of.
fn unit<B: Backend>(value: &Value<Remat<B>>) -> Option<Arc<Unit>> {
    match value {
        Value::Float(x) => x.unit(),
        Value::Int(x) => x.unit(),
        Value::Bool(x) => x.unit(),
        Value::Quant(x) => x.unit(),
        Value::Many(xs) => xs.iter().find_map(unit),
        Value::Absent => None,
    }
}

/// Shows an operand to a call.
fn show<B: Backend>(value: &Value<Remat<B>>, call: &mut Call<B>) {
    match value {
        Value::Float(x) => x.show(call),
        Value::Int(x) => x.show(call),
        Value::Bool(x) => x.show(call),
        Value::Quant(x) => x.show(call),
        Value::Many(xs) => xs.iter().for_each(|x| show(x, call)),
        Value::Absent => {}
    }
}

/// An operand as a recipe keeps it.
fn save<B: Backend>(value: &Value<Remat<B>>) -> SavedValue<B> {
    match value {
        Value::Float(x) => x.save().value,
        Value::Int(x) => x.save().value,
        Value::Bool(x) => x.save().value,
        Value::Quant(x) => x.save().value,
        Value::Many(xs) => SavedValue::Many(xs.iter().map(save).collect()),
        Value::Absent => SavedValue::Absent,
    }
}

/// Handles of tensors that are not managed.
fn resident<B: Backend>(value: Value<B>) -> Value<Remat<B>> {
    map_value!(value, x => Handle::resident(x), xs => xs.into_iter().map(resident).collect(), Value::Absent)
}

/// Handles of nodes, of the kinds that the operation returned.
fn managed<B: Backend>(kinds: &Value<B>, results: &mut Results<'_, B>) -> Value<Remat<B>> {
    map_value!(
        kinds,
        _ => results.expect(),
        kinds => kinds.iter().map(|kind| managed(kind, results)).collect(),
        {
            results.next::<Float>();
            Value::Absent
        }
    )
}
