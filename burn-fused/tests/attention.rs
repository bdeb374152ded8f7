//! Attention in blocks of queries: results and gradients are those of all scores at once, for every
//! form that it has.

use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use burn::backend::Autodiff;
use burn::tensor::activation::softmax;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Tensor, TensorData};
use burn_amp::{Autocast, Bf16, F16, Policy};
use burn_checkpoint::{MemoryBudget, Remat, apart, checkpoint};
use burn_flex::Flex;
use burn_fused::FusedBackward;
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Tests run beside each other, but for the one that measures the heap, which they share.
static TESTS: RwLock<()> = RwLock::new(());

fn beside_others() -> RwLockReadGuard<'static, ()> {
    TESTS.read().unwrap_or_else(PoisonError::into_inner)
}

type Plain = Autodiff<Flex>;
type Fused = FusedBackward<Plain>;
type Recomputed = FusedBackward<Autodiff<Remat<Flex>>>;

/// A form of attention, and its sizes.
#[derive(Clone, Copy, Debug)]
struct Form {
    heads: usize,
    key_heads: usize,
    queries: usize,
    keys: usize,
    causal: bool,
    /// The shape of the mask, if there is one: 1 in a dimension that shares it.
    mask: Option<[usize; 4]>,
    /// As `mask`.
    bias: Option<[usize; 4]>,
    /// Whether every fifth element of the bias is `-inf`, and the first query's all are.
    bias_is_infinite: bool,
    softcap: Option<f64>,
}

/// Two batches, one head of keys for each of queries, and nothing else.
const fn plain(queries: usize, keys: usize) -> Form {
    Form {
        heads: 2,
        key_heads: 2,
        queries,
        keys,
        causal: false,
        mask: None,
        bias: None,
        bias_is_infinite: false,
        softcap: None,
    }
}

const BATCH: usize = 2;
const WIDTH: usize = 4;
const VALUE_WIDTH: usize = 3;

fn forms() -> Vec<Form> {
    let causal = |form: Form| Form {
        causal: true,
        ..form
    };
    let grouped = |form: Form| Form { heads: 6, ..form };
    let one_key_head = |form: Form| Form {
        heads: 3,
        key_heads: 1,
        ..form
    };
    let masked = |form: Form, mask| Form {
        mask: Some(mask),
        ..form
    };
    let biased = |form: Form, bias| Form {
        bias: Some(bias),
        ..form
    };
    vec![
        plain(5, 7),
        plain(400, 300),
        causal(plain(400, 400)),
        causal(plain(300, 420)),
        causal(plain(420, 300)),
        causal(plain(500, 1)),
        grouped(plain(6, 5)),
        grouped(causal(plain(330, 330))),
        one_key_head(causal(plain(330, 330))),
        masked(plain(6, 5), [BATCH, 2, 6, 5]),
        masked(plain(400, 300), [BATCH, 1, 1, 300]),
        masked(causal(plain(330, 330)), [1, 2, 330, 330]),
        masked(grouped(plain(330, 330)), [BATCH, 6, 330, 330]),
        biased(plain(6, 5), [BATCH, 2, 6, 5]),
        biased(causal(plain(400, 300)), [1, 2, 400, 300]),
        biased(plain(330, 330), [1, 2, 1, 330]),
        biased(grouped(plain(330, 330)), [1, 6, 1, 330]),
        Form {
            bias_is_infinite: true,
            ..biased(causal(plain(330, 330)), [1, 1, 330, 330])
        },
        Form {
            softcap: Some(0.5), // a power of two: Burn's gradient of a division rounds the divisor to f32
            ..grouped(causal(plain(330, 330)))
        },
        Form {
            softcap: Some(4.0),
            ..masked(biased(plain(6, 5), [1, 2, 6, 5]), [1, 1, 6, 5])
        },
    ]
}

/// Numbers in `-1..1`.
fn numbers(seed: u64, shape: [usize; 4]) -> Vec<f64> {
    let count = shape.iter().product::<usize>() as u64;
    let number = |index: u64| {
        let bits = (index + 1).wrapping_mul(seed * 2 + 0x9e37_79b9_7f4a_7c15) >> 40;
        bits as f64 / f64::from(1 << 23) - 1.0
    };
    (0..count).map(number).collect()
}

/// Differentiated operands: query, key, value, and the bias if there is one.
struct Operands<B: Backend> {
    floats: Vec<Tensor<B, 4>>,
    mask: Option<Tensor<B, 4, Bool>>,
}

impl Form {
    fn operands<B: AutodiffBackend>(self, dtype: DType) -> Operands<B> {
        let device = B::Device::default();
        let leaf = |values: Vec<f64>, shape: [usize; 4]| {
            let data = TensorData::new(values, shape);
            Tensor::<B, 4>::from_data(data, (&device, dtype)).require_grad()
        };
        let key_shape = [BATCH, self.key_heads, self.keys, WIDTH];
        let value_shape = [BATCH, self.key_heads, self.keys, VALUE_WIDTH];
        let query_shape = [BATCH, self.heads, self.queries, WIDTH];
        let mut floats = vec![
            leaf(numbers(1, query_shape), query_shape),
            leaf(numbers(2, key_shape), key_shape),
            leaf(numbers(3, value_shape), value_shape),
        ];
        if let Some(shape) = self.bias {
            let mut values = numbers(4, shape);
            for (index, value) in values.iter_mut().enumerate() {
                let is_first = (index / shape[3]).is_multiple_of(shape[2]);
                if self.bias_is_infinite && (is_first || index % 5 == 0) {
                    *value = f64::NEG_INFINITY;
                }
            }
            floats.push(leaf(values, shape));
        }
        // The first query may attend to no key.
        let mask = self.mask.map(|shape| {
            let count = shape.iter().product();
            let is_closed = |index: usize| {
                let query = (index / shape[3]) % shape[2];
                (shape[2] > 1 && query == 0) || index.is_multiple_of(5)
            };
            let closed: Vec<bool> = (0..count).map(is_closed).collect();
            Tensor::<B, 4, Bool>::from_data(TensorData::new(closed, shape), &device)
        });
        Operands { floats, mask }
    }

    fn options(self) -> AttentionModuleOptions {
        AttentionModuleOptions {
            scale: Some(0.8),
            softcap: self.softcap,
            is_causal: self.causal,
        }
    }

    fn attend<B: Backend>(self, operands: &Operands<B>) -> Tensor<B, 4> {
        let [query, key, value] = [0, 1, 2].map(|index| operands.floats[index].clone());
        let bias = operands.floats.get(3).cloned();
        attention(
            query,
            key,
            value,
            operands.mask.clone(),
            bias,
            self.options(),
        )
    }

    /// As Burn composes it, with the heads of keys and values repeated, and mask and bias in full.
    fn attend_in_full<B: Backend>(self, operands: &Operands<B>) -> Tensor<B, 4> {
        let full = [BATCH, self.heads, self.queries, self.keys];
        let [query, key, value] = [0, 1, 2].map(|index| operands.floats[index].clone());
        attention(
            query,
            self.repeat(key),
            self.repeat(value),
            operands.mask.clone().map(|mask| mask.expand(full)),
            operands
                .floats
                .get(3)
                .cloned()
                .map(|bias| bias.expand(full)),
            self.options(),
        )
    }

    /// Two products and the backend's softmax, over all scores at once.
    fn attend_by_products<B: Backend>(self, operands: &Operands<B>) -> Tensor<B, 4> {
        let [query, key, value] = [0, 1, 2].map(|index| operands.floats[index].clone());
        let scale = self.options().scale.expect("one for all forms");
        let (queries, keys) = (self.queries, self.keys);
        let full = [BATCH, self.heads, queries, keys];
        let mut scores = query.matmul(self.repeat(key).transpose()) * scale;
        if let Some(softcap) = self.softcap {
            scores = (scores / softcap).tanh() * softcap;
        }
        let nothing = || Tensor::<B, 4, Bool>::full(full, false, &scores.device());
        let mut closed = operands
            .mask
            .clone()
            .map_or_else(nothing, |mask| mask.expand(full));
        if self.causal {
            let offset = keys as i64 - queries as i64;
            let later = Tensor::<B, 2, Bool>::tril_mask([queries, keys], offset, &scores.device());
            closed = closed.bool_or(later.unsqueeze::<4>().expand(full));
        }
        if let Some(bias) = operands.floats.get(3) {
            let is_infinite = bias.clone().equal_elem(f64::NEG_INFINITY);
            let finite = bias.clone().mask_fill(is_infinite.clone(), 0.0);
            scores = scores + finite.expand(full);
            closed = closed.bool_or(is_infinite.expand(full));
        }
        let probabilities = softmax(scores.mask_fill(closed.clone(), f32::MIN), 3);
        let probabilities = probabilities.mask_fill(closed, 0.0);
        probabilities.matmul(self.repeat(value))
    }

    /// A head of keys for each of queries.
    fn repeat<B: Backend>(self, tensor: Tensor<B, 4>) -> Tensor<B, 4> {
        let group = self.heads / self.key_heads;
        let [batch, heads, keys, width] = tensor.dims();
        let tensor = tensor.reshape([batch, heads, 1, keys, width]);
        let tensor = tensor.expand([batch, heads, group, keys, width]);
        tensor.reshape([batch, heads * group, keys, width])
    }

    /// The result, and the gradient of each operand.
    fn differentiate<B: AutodiffBackend>(
        operands: &Operands<B>,
        result: Tensor<B, 4>,
    ) -> Vec<TensorData> {
        let shape = result.dims();
        let weight = TensorData::new(numbers(9, shape), shape);
        let weight = Tensor::<B, 4>::from_data(weight, (&result.device(), DType::F32));
        let value = result.clone().into_data();
        let dtype = if result.dtype() == DType::F64 {
            DType::F64
        } else {
            DType::F32
        };
        let gradients = (result.cast(dtype) * weight.cast(dtype)).sum().backward();
        let gradient = |operand: &Tensor<B, 4>| operand.grad(&gradients).unwrap().into_data();
        let gradients = operands.floats.iter().map(gradient);
        std::iter::once(value).chain(gradients).collect()
    }

    fn in_blocks<B: AutodiffBackend>(self, dtype: DType) -> Vec<TensorData> {
        let operands = self.operands::<B>(dtype);
        Self::differentiate(&operands, self.attend(&operands))
    }

    fn by_products<B: AutodiffBackend>(self, dtype: DType) -> Vec<TensorData> {
        let operands = self.operands::<B>(dtype);
        Self::differentiate(&operands, self.attend_by_products(&operands))
    }

    fn in_full<B: AutodiffBackend>(self, dtype: DType) -> Vec<TensorData> {
        let operands = self.operands::<B>(dtype);
        Self::differentiate(&operands, self.attend_in_full(&operands))
    }
}

/// The largest difference, relative to the largest number of each tensor.
fn difference(ours: &[TensorData], theirs: &[TensorData]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    let mut most = 0.0_f64;
    for (ours, theirs) in ours.iter().zip(theirs) {
        assert_eq!(ours.shape, theirs.shape);
        let largest = theirs
            .iter::<f64>()
            .fold(1e-3, |most: f64, x| most.max(x.abs()));
        for (ours, theirs) in ours.iter::<f64>().zip(theirs.iter::<f64>()) {
            assert!(ours.is_finite() && theirs.is_finite(), "{ours} {theirs}");
            most = most.max((ours - theirs).abs() / largest);
        }
    }
    most
}

#[test]
fn blocks_are_all_scores_at_once() {
    let _beside = beside_others();
    for form in forms() {
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 2e-5)] {
            let theirs = form.in_full::<Plain>(dtype);
            let difference = difference(&form.in_blocks::<Fused>(dtype), &theirs);
            assert!(
                difference <= tolerance,
                "{form:?} {dtype:?}: {difference:e}"
            );
        }
    }
}

/// The root of the mean squared difference of the tensor where that is largest, relative to the
/// largest number of that tensor.
fn mean_difference(ours: &[TensorData], theirs: &[TensorData]) -> f64 {
    let of_tensor = |(ours, theirs): (&TensorData, &TensorData)| {
        let pairs = ours.iter::<f64>().zip(theirs.iter::<f64>());
        let squares: f64 = pairs.map(|(ours, theirs)| (ours - theirs).powi(2)).sum();
        let largest = theirs
            .iter::<f64>()
            .fold(1e-3, |most: f64, x| most.max(x.abs()));
        (squares / ours.num_elements() as f64).sqrt() / largest
    };
    ours.iter().zip(theirs).map(of_tensor).fold(0.0, f64::max)
}

/// In f32 results and gradients, and so losses, are no further from f64's than those of two
/// products and a softmax on the same backend, but for one rounding: what `FusedBackward` had of
/// attention before it took blocks.
#[test]
fn in_f32_blocks_are_no_less_precise() {
    let _beside = beside_others();
    for form in forms() {
        let exact = form.in_full::<Plain>(DType::F64);
        let ours = mean_difference(&form.in_blocks::<Fused>(DType::F32), &exact);
        let theirs = mean_difference(&form.by_products::<Fused>(DType::F32), &exact);
        println!("{ours:.2e} beside {theirs:.2e}: {form:?}");
        assert!(
            ours <= theirs + f64::from(f32::EPSILON) / 2.0,
            "{form:?}: {ours:e}, not {theirs:e}"
        );
    }
}

/// In a low type no further from f64's than all scores at once are, but for two roundings of the
/// result.
fn under_autocast<P: Policy>(rounding: f64) {
    for form in forms() {
        let exact = form.in_full::<Plain>(DType::F64);
        let error = |results: Vec<TensorData>| {
            let results: Vec<_> = results.into_iter().map(|x| x.convert::<f64>()).collect();
            difference(&results, &exact)
        };
        let ours = error(form.in_blocks::<Autocast<Fused, P>>(DType::F32));
        let theirs = error(form.in_full::<Autocast<Plain, P>>(DType::F32));
        assert!(
            ours <= theirs + 2.0 * rounding,
            "{form:?}: {ours:e}, not {theirs:e}"
        );
    }
}

#[test]
fn in_a_low_type_blocks_are_no_less_precise() {
    let _beside = beside_others();
    under_autocast::<F16>(5e-4);
    under_autocast::<Bf16>(4e-3);
}

#[test]
fn recomputed_blocks_are_bit_for_bit_those_that_are_kept() {
    let _beside = beside_others();
    for form in forms() {
        let kept = form.in_blocks::<Fused>(DType::F32);
        let operands = form.operands::<Recomputed>(DType::F32);
        let result = checkpoint(|| form.attend(&operands).exp().log());
        let in_scope = Form::differentiate(&operands, result);
        let operands = form.operands::<Fused>(DType::F32);
        let result = form.attend(&operands).exp().log();
        assert_eq!(Form::differentiate(&operands, result), in_scope, "{form:?}");
        let _apart = apart();
        let _budget = MemoryBudget::bytes(1).install();
        assert_eq!(
            kept,
            form.in_blocks::<Recomputed>(DType::F32),
            "{form:?}, a budget"
        );
    }
}

#[test]
fn the_scores_of_all_pairs_never_exist() {
    let _alone = TESTS.write().unwrap_or_else(PoisonError::into_inner);
    let form = Form {
        causal: true,
        ..plain(2048, 2048)
    };
    let scores = BATCH * form.heads * form.queries * form.keys * size_of::<f32>();
    let operands = form.operands::<Fused>(DType::F32);
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let results = Form::differentiate(&operands, form.attend(&operands));
    let peak = HEAP.peak_usage() - before;
    println!("{peak} bytes where all scores take {scores}");
    assert_eq!(results.len(), 4);
    assert!(
        peak < scores / 2,
        "{peak} bytes where all scores take {scores}"
    );
}
