//! Law: no operation's value or gradient is worse under autocast than PyTorch's autocast of the
//! same operation.
//!
//! Finite where PyTorch's is, and within twice PyTorch's error and one rounding of the low type.
//! `cases.rs` is what runs, `reference.rs` reads `golden/numerics.txt`, which `golden/numerics.py`
//! writes.

mod cases;
mod reference;

use std::collections::BTreeSet;
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::Autodiff;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use burn_amp::{Autocast, Bf16, Cast, F16, Policy, op_table};
use burn_flex::Flex;
use tests::compare::values;
use tests::defaults::Defaults;

use cases::{Case, cases};
use reference::{Expected, Reference, references};

/// A case that is worse, and why.
struct Known {
    case: &'static str,
    /// How much is allowed besides, by the exact number.
    allowed: fn(f64) -> f64,
    why: &'static str,
}

const KNOWN: [Known; 3] = [
    Known {
        case: "gelu_approximate",
        allowed: |exact| if exact > 1.7e38 { f64::INFINITY } else { 0.0 },
        why: "burn-tensor doubles the operand before it halves it: infinite in f32 too above 1.7e38",
    },
    Known {
        case: "glu",
        allowed: |_| 3e-8 * 65504.0,
        why: "the gate is a tensor of its own, and 0 below the smallest number of f16: off by 3e-8 of the other half",
    },
    Known {
        case: "bce_with_logits",
        allowed: |_| f64::from(f32::EPSILON),
        why: "burn-nn adds two gradients of magnitude 1 in f32: off by 1.2e-7",
    },
];

/// Rows with float operands that are not compared, and why.
const NOT_COMPARED: [(&str, &str); 5] = [
    (
        "moves or reads elements, or has no float result: exact in every type",
        "into_data to_device into_int detach set_require_grad is_require_grad cast device argmax argtopk argmin argsort any \
         any_dim all all_dim is_nan is_inf tr_execute",
    ),
    (
        "Burn's autodiff has no gradient of it, and panics",
        "topk rfft irfft",
    ),
    (
        "nothing in burn-tensor calls it: `Tensor::powi` of floats is `powf`",
        "powi",
    ),
    (
        "runs in f32, and PyTorch has no such operation",
        "deform_conv2d",
    ),
    (
        "quantized operands are left alone",
        "quantize quantize_dynamic q_matmul",
    ),
];

/// A case that Burn fails on Vulkan without autocast too, in f32: left out there.
struct Failing {
    case: &'static str,
    why: &'static str,
}

const FAILING_ON_VULKAN: [Failing; 2] = [
    Failing {
        case: "interpolate",
        why: "CubeCL has no gradient of bilinear interpolation, and panics",
    },
    Failing {
        case: "gather_nd",
        why: "CubeCL adds up the gradients of equal indices without atomic operations, and loses all but one",
    },
];

/// The value, and the gradient of each operand.
fn run<B: AutodiffBackend>(case: &Case<B>, reference: &Reference, low: DType) -> Vec<Vec<f32>> {
    let device = B::Device::default();
    let leaves: Vec<Tensor<B, 2>> = reference
        .operands
        .iter()
        .map(|grid| {
            let data = TensorData::new(grid.values.clone(), [grid.rows, grid.columns]);
            Tensor::from_data(data, &device).require_grad()
        })
        .collect();
    let operands: Vec<_> = leaves.iter().map(|leaf| leaf.clone().cast(low)).collect();
    let result = (case.run)(&operands);
    let gradients = result.clone().sum().backward();
    let mut found = vec![values(result)];
    for leaf in &leaves {
        let zeros = || vec![0.0; leaf.shape().num_elements()];
        found.push(leaf.grad(&gradients).map_or_else(zeros, values));
    }
    found
}

/// What one rounding of a case is relative to, besides each number itself.
#[derive(Clone, Copy)]
enum Scale {
    /// Nothing.
    Number,
    /// Four of f32's roundings at the largest number of a row: norms and losses of rows add up in
    /// f32. So does PyTorch on a GPU, and in f64 on a CPU, where the reference was made.
    Rows { rows: usize },
    /// The largest number of the case: in which type a product is added up is the backend's choice.
    Largest { number: f64 },
}

fn largest<'a>(numbers: impl IntoIterator<Item = &'a f64>) -> f64 {
    numbers.into_iter().fold(0.0, |most, x| most.max(x.abs()))
}

impl Scale {
    fn of<B: Backend>(case: &Case<B>, reference: &Reference) -> Self {
        let is_lower = |name: &str| {
            let row = op_table().iter().find(|row| row.short_name() == name);
            row.is_some_and(|row| row.cast == Cast::Lower)
        };
        match reference.operands[0].rows {
            _ if case.rows.split_whitespace().any(is_lower) => Self::Largest {
                number: largest(
                    reference
                        .expected
                        .iter()
                        .flat_map(|expected| &expected.exact),
                ),
            },
            1 => Self::Number,
            rows => Self::Rows { rows },
        }
    }

    /// One rounding of each number.
    fn roundings(self, exact: &[f64], low: FloatDType) -> Vec<f64> {
        let range = low.finfo();
        // The distance of the smallest numbers of the type.
        let smallest = range.min_positive * range.epsilon;
        let own = exact.iter().map(|x| range.epsilon * x.abs() + smallest);
        let beside: Vec<f64> = match self {
            Self::Number => vec![0.0; exact.len()],
            Self::Rows { rows } => {
                let of_row =
                    |row: &[f64]| vec![4.0 * f64::from(f32::EPSILON) * largest(row); row.len()];
                exact
                    .chunks(exact.len().div_ceil(rows).max(1))
                    .flat_map(of_row)
                    .collect()
            }
            Self::Largest { number } => vec![range.epsilon * number; exact.len()],
        };
        own.zip(beside).map(|(own, beside)| own + beside).collect()
    }
}

/// The largest errors of one result in roundings, where PyTorch's is finite.
#[derive(Clone, Copy, Default)]
struct Errors {
    ours: f64,
    pytorch: f64,
}

/// The largest errors, and the first number that is worse than PyTorch's allows.
fn compare(
    found: &[f32],
    expected: &Expected,
    roundings: &[f64],
    allowed: fn(f64) -> f64,
) -> (Errors, Option<String>) {
    assert_eq!(
        found.len(),
        expected.exact.len(),
        "numbers of elements differ"
    );
    let mut errors = Errors::default();
    let mut worse = None;
    for (index, rounding) in roundings.iter().enumerate() {
        let (exact, error) = (expected.exact[index], expected.error[index]);
        if !error.is_finite() || !exact.is_finite() {
            continue;
        }
        let difference = (f64::from(found[index]) - exact).abs();
        let is_within = difference <= 2.0 * error + rounding + allowed(exact)
            || allowed(exact) == f64::INFINITY;
        if !is_within && worse.is_none() {
            let found = found[index];
            worse = Some(format!(
                "[{index}] is {found:e}, not {exact:e}; PyTorch's error is {error:e}"
            ));
        }
        let difference = if difference.is_nan() {
            f64::INFINITY
        } else {
            difference
        };
        errors.ours = errors.ours.max(difference / rounding);
        errors.pytorch = errors.pytorch.max(error / rounding);
    }
    (errors, worse)
}

/// What was found of a case in one low type.
struct Found {
    case: &'static str,
    rows: &'static str,
    value: Errors,
    /// The largest over all operands.
    gradient: Errors,
    worse: Vec<String>,
}

/// Cases on a backend in one low type: those that `is_chosen` by name.
fn measure<X: Backend, P: Policy>(low: FloatDType, is_chosen: fn(&str) -> bool) -> Vec<Found>
where
    Autocast<Autodiff<X>, P>: AutodiffBackend,
{
    let references = references(low);
    let measure = |case: &Case<Autocast<Autodiff<X>, P>>| {
        let reference = references.get(case.name);
        let reference = reference.unwrap_or_else(|| panic!("no reference of {}", case.name));
        let mut found = Found {
            case: case.name,
            rows: case.rows,
            value: Errors::default(),
            gradient: Errors::default(),
            worse: Vec::new(),
        };
        let computed = catch_unwind(AssertUnwindSafe(|| run(case, reference, low.into())));
        let Ok(computed) = computed else {
            found.worse.push(format!("{} panics", case.name));
            return found;
        };
        let scale = Scale::of(case, reference);
        let known = KNOWN.iter().find(|known| known.case == case.name);
        let allowed = known.map_or((|_| 0.0) as fn(f64) -> f64, |known| known.allowed);
        for (index, (numbers, expected)) in computed.iter().zip(&reference.expected).enumerate() {
            let roundings = scale.roundings(&expected.exact, low);
            let (errors, worse) = compare(numbers, expected, &roundings, allowed);
            let what = ["value", "gradient of a", "gradient of b", "gradient of c"][index];
            found
                .worse
                .extend(worse.map(|worse| format!("{} {what}{worse}", case.name)));
            let largest = if index == 0 {
                &mut found.value
            } else {
                &mut found.gradient
            };
            largest.ours = largest.ours.max(errors.ours);
            largest.pytorch = largest.pytorch.max(errors.pytorch);
        }
        found
    };
    let cases = cases();
    let chosen = cases.iter().filter(|case| is_chosen(case.name));
    chosen.map(measure).collect()
}

fn every(_: &str) -> bool {
    true
}

fn check<X: Backend, P: Policy>(low: FloatDType, is_chosen: fn(&str) -> bool)
where
    Autocast<Autodiff<X>, P>: AutodiffBackend,
{
    let found = measure::<X, P>(low, is_chosen);
    let worse: Vec<String> = found.into_iter().flat_map(|found| found.worse).collect();
    assert!(
        worse.is_empty(),
        "worse than PyTorch under {}:\n{}",
        P::name(),
        worse.join("\n")
    );
}

#[test]
fn on_flex() {
    check::<Flex, F16>(FloatDType::F16, every);
    check::<Flex, Bf16>(FloatDType::BF16, every);
}

#[test]
fn on_burns_default_formulas() {
    check::<Defaults<Flex>, F16>(FloatDType::F16, every);
    check::<Defaults<Flex>, Bf16>(FloatDType::BF16, every);
}

#[cfg(feature = "vulkan")]
fn runs_on_vulkan(case: &str) -> bool {
    FAILING_ON_VULKAN.iter().all(|failing| failing.case != case)
}

#[cfg(feature = "vulkan")]
#[test]
fn on_vulkan_with_fusion() {
    check::<tests::VulkanFusion, F16>(FloatDType::F16, runs_on_vulkan);
}

#[cfg(feature = "vulkan")]
#[test]
fn on_vulkan() {
    check::<tests::Vulkan, F16>(FloatDType::F16, runs_on_vulkan);
}

/// Without Fusion, whose streams a panic breaks for the whole process.
#[cfg(feature = "vulkan")]
#[test]
fn what_is_left_out_on_vulkan_fails_without_autocast() {
    let references = references(FloatDType::F16);
    for failing in &FAILING_ON_VULKAN {
        let cases = cases::<Autodiff<tests::Vulkan>>();
        let case = cases.iter().find(|case| case.name == failing.case);
        let case = case.expect("a case of this name");
        let reference = &references[case.name];
        let computed = catch_unwind(AssertUnwindSafe(|| run(case, reference, DType::F32)));
        let is_right = computed.is_ok_and(|computed| {
            let pairs = computed.iter().zip(&reference.expected);
            pairs.into_iter().all(|(numbers, expected)| {
                let roundings = Scale::Number.roundings(&expected.exact, FloatDType::F16);
                let (_, worse) = compare(numbers, expected, &roundings, |_| 0.0);
                worse.is_none()
            })
        });
        assert!(!is_right, "{} does not fail: {}", case.name, failing.why);
    }
}

/// What has no gradient cannot be compared.
#[test]
fn burns_autodiff_panics_where_it_is_said_to_have_no_gradient() {
    type Run<B> = fn(Tensor<B, 1>) -> Tensor<B, 1>;
    fn operations<B: Backend>() -> [(&'static str, Run<B>); 3] {
        use burn::tensor::signal;
        [
            ("topk", |x| x.topk(2, 0)),
            ("rfft", |x| signal::rfft(x.slice(0..4), 0, None).0),
            // Of 8 numbers.
            ("irfft", |x| signal::irfft(x.clone(), x, 0, None)),
        ]
    }
    fn operand<B: Backend>() -> Tensor<B, 1> {
        Tensor::from_floats([1.0, 4.0, 2.0, 3.0, 5.0], &Default::default())
    }
    for (name, operation) in operations::<Flex>() {
        assert!(values(operation(operand())).len() > 1, "{name}");
    }
    for (name, operation) in operations::<Autodiff<Flex>>() {
        let x = operand::<Autodiff<Flex>>().require_grad();
        let backward = || operation(x).sum().backward();
        let computed = catch_unwind(AssertUnwindSafe(backward));
        assert!(computed.is_err(), "{name} has a gradient: compare it");
    }
}

/// A product that overflows saturates, and the training goes on.
fn saturated_functions_are_finite_at_infinity<X: Backend>()
where
    Autocast<Autodiff<X>, F16>: AutodiffBackend,
{
    type Vector<X> = Tensor<Autocast<Autodiff<X>, F16>, 1>;
    type Function<X> = fn(Vector<X>) -> Vector<X>;
    let infinite = TensorData::from([f32::INFINITY, f32::NEG_INFINITY]);
    let functions: [(&str, Function<X>); 2] = [("tanh", Tensor::tanh), ("erf", Tensor::erf)];
    for (name, function) in functions {
        let leaf = Vector::<X>::from_data(infinite.clone(), &Default::default()).require_grad();
        let result = function(leaf.clone().cast(DType::F16));
        let gradients = result.clone().sum().backward();
        assert_eq!(values(result), [1.0, -1.0], "{name}");
        let gradient = leaf.grad(&gradients).expect("it is a leaf");
        assert_eq!(values(gradient), [0.0, 0.0], "gradient of {name}");
    }
}

tests::on_every_backend!(saturated_functions_are_finite_at_infinity);

#[test]
fn every_row_with_float_operands_is_compared_or_named() {
    let cases = cases::<Flex>();
    let compared: BTreeSet<&str> = cases
        .iter()
        .flat_map(|case| case.rows.split_whitespace())
        .collect();
    let named = NOT_COMPARED
        .iter()
        .flat_map(|(_, rows)| rows.split_whitespace());
    let named: BTreeSet<&str> = named.collect();
    let rows: Vec<&str> = op_table()
        .iter()
        .filter(|row| row.float_operands)
        .map(|row| row.short_name())
        // Autodiff calls them inside of autocast: the gradients of their forwards are compared.
        .filter(|row| !row.ends_with("_backward"))
        .collect();
    let is_missing = |row: &&&str| !compared.contains(**row) && !named.contains(**row);
    let missing: Vec<_> = rows.iter().filter(is_missing).collect();
    assert!(
        missing.is_empty(),
        "neither compared nor named: {missing:?}"
    );
    for row in compared.union(&named) {
        let is_once = !(compared.contains(row) && named.contains(row));
        assert!(is_once, "{row} is compared and named");
    }
    for known in KNOWN {
        assert!(
            cases.iter().any(|case| case.name == known.case),
            "{}",
            known.case
        );
    }
}

/// The table of `docs/operations.md`.
fn table() -> String {
    let f16 = measure::<Defaults<Flex>, F16>(FloatDType::F16, every);
    let bf16 = measure::<Defaults<Flex>, Bf16>(FloatDType::BF16, every);
    let mut text = String::from(
        "\nThe largest errors over magnitudes from the smallest to the largest of the type, in roundings of the type (its epsilon times \
         the number, and the distance of its smallest numbers), beside PyTorch's own where that is finite. On Burn's default formulas, as \
         on CubeCL and Fusion. A test (`tests/tests/laws/numerics`) holds each number to twice PyTorch's error and one rounding; \
         `UPDATE_DOCS=1 cargo test --workspace --test laws numerics` prints this table.\n\n\
         | case | rows | f16 value | PyTorch | f16 gradient | PyTorch | bf16 value | PyTorch | bf16 gradient | PyTorch |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
    );
    let number = |x: f64| match x {
        x if x < 0.01 => "0".to_owned(),
        x if x < 100.0 => format!("{x:.2}"),
        x => format!("{x:.0e}"),
    };
    for (f16, bf16) in f16.iter().zip(&bf16) {
        write!(text, "| {} | {} |", f16.case, f16.rows).expect("a string");
        for errors in [f16.value, f16.gradient, bf16.value, bf16.gradient] {
            let (ours, pytorch) = (number(errors.ours), number(errors.pytorch));
            write!(text, " {ours} | {pytorch} |").expect("a string");
        }
        text.push('\n');
    }
    text.push_str("\nWorse than PyTorch's:\n\n");
    for known in KNOWN {
        writeln!(text, "- {}: {}.", known.case, known.why).expect("a string");
    }
    text.push_str("\nLeft out on Vulkan, where Burn fails without autocast too:\n\n");
    for failing in &FAILING_ON_VULKAN {
        writeln!(text, "- {}: {}.", failing.case, failing.why).expect("a string");
    }
    text.push_str("\nNot compared:\n\n");
    for (why, rows) in NOT_COMPARED {
        let rows: Vec<_> = rows
            .split_whitespace()
            .map(|row| format!("`{row}`"))
            .collect();
        writeln!(text, "- {why}: {}.", rows.join(", ")).expect("a string");
    }
    text
}

#[test]
fn docs_have_a_line_for_each_case() {
    let text = tests::docs::errors(table);
    for case in cases::<Flex>() {
        let line = format!("| {} | {} |", case.name, case.rows);
        assert!(
            text.contains(&line),
            "no line of {}; run UPDATE_DOCS=1 cargo test --workspace --test laws numerics",
            case.name
        );
    }
    for known in KNOWN {
        assert!(text.contains(known.why), "{}", known.case);
    }
    for failing in &FAILING_ON_VULKAN {
        assert!(text.contains(failing.why), "{}", failing.case);
    }
}
