//! What a scope may return.

use burn::backend::Autodiff;
use burn::nn::attention::{MhaInput, MultiHeadAttentionConfig};
use burn::nn::{BiLstmConfig, LstmConfig, RnnConfig};
use burn::tensor::{Distribution, Tensor, TensorData};
use burn::train::RegressionOutput;
use burn_checkpoint::{Outputs, Policy, Remat, RematStats, checkpoint, checkpoint_listing};
use burn_flex::Flex;

type B = Autodiff<Remat<Flex>>;

/// A result of another crate: without [`Outputs`].
struct Detected {
    boxes: Tensor<B, 2>,
    scores: Vec<Tensor<B, 2>>,
    forgotten: Tensor<B, 2>,
}

fn detect(image: Tensor<B, 2>) -> Detected {
    let boxes = image.exp().sin();
    Detected {
        scores: vec![boxes.clone().cos(), boxes.clone().sin()],
        forgotten: boxes.clone().exp(),
        boxes,
    }
}

/// The operations that run again when a tensor is read.
fn replayed_by_reading<const D: usize>(tensor: &Tensor<B, D>) -> (u64, TensorData) {
    let before = RematStats::of_thread().replayed_operations;
    let data = tensor.clone().into_data();
    let after = RematStats::of_thread().replayed_operations;
    (after - before, data)
}

fn stays<const D: usize>(what: &str, tensor: &Tensor<B, D>) {
    assert_eq!(replayed_by_reading(tensor).0, 0, "{what}");
}

#[test]
fn listed_tensors_stay_and_others_are_computed_again() {
    let image = Tensor::random([32, 32], Distribution::Default, &Default::default());
    let image: Tensor<B, 2> = image.require_grad();
    let plain = detect(image.clone());
    for policy in [Policy::Recompute, Policy::KeepCompute] {
        let found = checkpoint_listing(
            policy.clone(),
            || detect(image.clone()),
            |found, tensors| {
                tensors.add(&found.boxes).add(&found.scores);
            },
        );
        stays("boxes", &found.boxes);
        stays("a score", &found.scores[0]);
        stays("another score", &found.scores[1]);
        let (replayed, forgotten) = replayed_by_reading(&found.forgotten);
        assert!(replayed > 0, "{policy:?}");
        assert_eq!(forgotten, plain.forgotten.clone().into_data(), "{policy:?}");
        let gradient = |of: &Detected| {
            let sum = of.boxes.clone().sum() + of.scores[1].clone().sum();
            image.grad(&sum.backward()).expect("tracked").into_data()
        };
        assert_eq!(
            gradient(&found),
            gradient(&detect(image.clone())),
            "{policy:?}"
        );
    }
}

#[test]
fn what_modules_of_burn_nn_return_stays() {
    let device = Default::default();
    let x = Tensor::<B, 3>::random([4, 8, 16], Distribution::Default, &device).require_grad();

    let lstm = LstmConfig::new(16, 16, true).init(&device);
    let (output, state) = checkpoint(|| lstm.forward(x.clone(), None));
    stays("output", &output);
    stays("cell", &state.cell);
    stays("hidden", &state.hidden);
    let both = BiLstmConfig::new(16, 16, true).init(&device);
    let (_, state) = checkpoint(|| both.forward(x.clone(), None));
    stays("cells of both directions", &state.cell);

    let rnn = RnnConfig::new(16, 16, true).init(&device);
    let (_, state) = checkpoint(|| rnn.forward(x.clone(), None));
    stays("hidden of an RNN", &state.hidden);

    let attention = MultiHeadAttentionConfig::new(16, 2).init(&device);
    let found = checkpoint(|| attention.forward(MhaInput::self_attn(x.clone())));
    stays("context", &found.context);
    stays("weights", &found.weights);

    let found = checkpoint(|| {
        let output = x.clone().exp().reshape([32, 16]);
        RegressionOutput::new(output.clone().mean(), output.clone(), output.sin())
    });
    stays("loss", &found.loss);
    stays("targets", &found.targets);
}

/// Compiles a program that returns a struct without [`Outputs`], as a user's build does, against
/// this crate as it was built last.
#[test]
fn the_compile_error_says_both_ways() {
    fn returns_outputs<T: Outputs>() {}
    returns_outputs::<Tensor<B, 1>>(); // what follows is about the same trait

    let deps = std::env::current_exe().expect("this program");
    let deps = deps.parent().expect("target/debug/deps");
    let built = |file: &std::fs::DirEntry| {
        let name = file.file_name().into_string().ok()?;
        let is_rlib = name.starts_with("libburn_checkpoint-") && name.ends_with(".rlib");
        let time = file.metadata().and_then(|data| data.modified()).ok()?;
        is_rlib.then(|| (time, file.path()))
    };
    let files = std::fs::read_dir(deps).expect("it can be read");
    let newest = files.flatten().filter_map(|file| built(&file)).max();
    let (_, library) = newest.expect("the crate is built");
    let directory = std::env::temp_dir().join(format!("burn-outputs-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory");
    let source = directory.join("user.rs");
    let program = "pub struct Mine; pub fn step() { burn_checkpoint::checkpoint(|| Mine); }";
    std::fs::write(&source, program).expect("it is written");
    let rustc = std::process::Command::new(std::env::var("RUSTC").unwrap_or("rustc".into()))
        .args([
            "--edition",
            "2024",
            "--crate-type",
            "lib",
            "--emit",
            "metadata",
        ])
        .arg("--out-dir")
        .arg(&directory)
        .arg("-L")
        .arg(format!("dependency={}", deps.display()))
        .arg("--extern")
        .arg(format!("burn_checkpoint={}", library.display()))
        .arg(&source)
        .output()
        .expect("rustc runs");
    std::fs::remove_dir_all(&directory).expect("cleaned up");
    let said = String::from_utf8_lossy(&rustc.stderr);
    assert!(!rustc.status.success(), "{said}");
    for part in [
        "a checkpoint scope cannot return `Mine`",
        "burn_checkpoint::outputs!(impl[B: Backend] Mine { field, .. })",
        "checkpoint_listing(policy, || .., |result, tensors| { tensors.add(&result.field); })",
    ] {
        assert!(said.contains(part), "{said}");
    }
}
