//! Errors name the wrong value and the valid ones.

use std::panic::catch_unwind;

use burn::tensor::Tensor;
use burn_amp::{AmpConfig, AmpError, Autocast, Cast};
use burn_flex::Flex;
use tests::spy::Spy;

/// A backend that can only store low types.
type Poor = Spy<Flex, false>;

#[test]
fn a_device_without_the_type_is_refused_before_anything_runs() {
    let error = AmpConfig::bf16()
        .check::<Poor>(&Default::default())
        .expect_err("no arithmetic");
    assert!(matches!(error, AmpError::UnsupportedDtype { .. }));
    let message = error.to_string();
    for part in ["bf16", "Cpu", "spy<flex>", "only store", "f32"] {
        assert!(
            message.to_lowercase().contains(&part.to_lowercase()),
            "{part}: {message}"
        );
    }
    AmpConfig::bf16()
        .check::<Flex>(&Default::default())
        .expect("Flex can");
    AmpConfig::off()
        .check::<Poor>(&Default::default())
        .expect("nothing is asked for");
}

#[test]
fn a_device_without_the_type_is_refused_where_the_check_was_forgotten() {
    let panic = catch_unwind(|| {
        let x = Tensor::<Autocast<Poor>, 2>::ones([2, 2], &Default::default());
        x.clone().matmul(x)
    })
    .expect_err("refused");
    let message = panic.downcast_ref::<String>().expect("a message");
    assert!(
        message.contains("autocast to bf16 is not possible"),
        "{message}"
    );
}

#[test]
fn unknown_names_list_the_valid_ones() {
    let error = AmpConfig::bf16()
        .with_op("sofmax", Cast::Lower)
        .install()
        .expect_err("misspelt");
    let AmpError::UnknownOp {
        name,
        nearest,
        valid,
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!((name.as_str(), nearest.as_str()), ("sofmax", "softmax"));
    assert!(
        valid.contains("layer_norm") && valid.contains("matmul"),
        "{valid}"
    );
    for op in ["int_add", "cast", "float_set_require_grad"] {
        assert!(
            AmpConfig::bf16()
                .with_op(op, Cast::Lower)
                .install()
                .is_err(),
            "{op}"
        );
    }
    let twice = AmpConfig::bf16()
        .with_op("matmul", Cast::Full)
        .with_op("float_matmul", Cast::Lower);
    assert_eq!(
        twice.install(),
        Err(AmpError::DuplicateOp { op: "float_matmul" })
    );

    let error = "fp8".parse::<burn_amp::PolicyName>().expect_err("unknown");
    assert_eq!(
        error.to_string(),
        "unknown autocast policy `fp8`: valid policies are off, bf16, f16"
    );

    let parse = |json| {
        serde_json::from_str::<AmpConfig>(json)
            .expect_err("invalid")
            .to_string()
    };
    let error = parse(r#"{"policy": "fp8"}"#);
    assert!(error.contains("fp8") && error.contains("`bf16`"), "{error}");
    let error = parse(r#"{"ops": {"softmax": "down"}}"#);
    assert!(
        error.contains("down") && error.contains("`promote`"),
        "{error}"
    );
    let error = parse(r#"{"ops": {"sofmax": "lower"}}"#);
    assert!(error.contains("nearest is `softmax`"), "{error}");
    let error = parse(r#"{"polcy": "bf16"}"#);
    assert!(
        error.contains("polcy") && error.contains("`policy`"),
        "{error}"
    );
}

/// burn-tch's own tensors are overwritten where memory is shared, so results would be wrong in
/// silence.
#[cfg(feature = "tch")]
#[test]
fn libtorch_that_is_not_mended_is_refused() {
    use burn::backend::Autodiff;
    use burn_checkpoint::{MemoryBudget, Remat, apart, checkpoint};
    use burn_tch::LibTorch;

    let product = || {
        let x = Tensor::<Autocast<LibTorch>, 2>::ones([2, 2], &Default::default());
        drop(x.clone().matmul(x));
    };
    let scope = || {
        let x = Tensor::<Autodiff<Remat<LibTorch>>, 2>::ones([2, 2], &Default::default());
        drop(checkpoint(|| x.exp()));
    };
    let budget = || {
        let _apart = apart();
        let _budget = MemoryBudget::bytes(1 << 20).install();
        let x = Tensor::<Autodiff<Remat<LibTorch>>, 2>::ones([2, 2], &Default::default());
        drop(x.exp());
    };
    for use_it in [product as fn(), scope, budget] {
        let panic = catch_unwind(use_it).expect_err("refused");
        let message = panic.downcast_ref::<String>().expect("a message");
        assert!(
            message.contains("put `burn_decorator::tch::Mended` around `LibTorch`"),
            "{message}"
        );
    }
}
