//! The command line.

use std::path::PathBuf;

use burn_zero::Stage;
use clap::Parser;
use examples::backend::BackendName;
use examples::gpt::options::Options;
use examples::training::precision::Amp;
use examples::training::recompute::Checkpoint;

fn parse(arguments: &str) -> Result<Options, String> {
    let arguments = ["gpt"].into_iter().chain(arguments.split_whitespace());
    let options = Options::try_parse_from(arguments).map_err(|error| error.to_string())?;
    options.validate().map_err(|error| error.to_string())?;
    Ok(options)
}

#[test]
fn defaults_are_valid() {
    let options = parse("").unwrap();
    assert_eq!(options.output, PathBuf::from("artifacts/gpt"));
    assert_eq!(options.memory.backend, BackendName::Flex);
    assert!(options.text.is_empty());
}

#[test]
fn every_option_is_understood() {
    let options = parse(
        "--amp bf16 --steps 30 --batch 2 --context 16 --layers 1 --heads 2 --width 8 --dropout 0.1 --lr 1e-2 \
         --warmup 3 --eval-every 10 --seed 7 --backend vulkan --text a b --resume --output out --zero 2 --ranks 3 \
         --offload --offload-param --config ds_config.json",
    )
    .unwrap();
    assert_eq!(options.memory.amp, Some(Amp::Bf16));
    assert_eq!(
        (options.memory.zero, options.memory.ranks),
        (Some(Stage::Gradients), Some(3))
    );
    assert_eq!(options.text.len(), 2);
    assert_eq!(options.warmup(), 3);
    assert_eq!(options.plan().epochs(), 3);
    assert!(options.resume && options.memory.offload && options.memory.offload_param);
}

#[test]
fn wrong_values_are_refused_with_the_reason() {
    for (arguments, reason) in [
        ("--steps 0", "0 is not in 1.."),
        ("--batch x", "invalid digit"),
        (
            "--heads 3",
            "--heads 3 does not divide --width 128; the nearest width that it divides is 129",
        ),
        ("--dropout 1", "at least 0 and below 1"),
        ("--dropout nan", "at least 0 and below 1"),
        ("--lr 0", "above 0 and at most 1"),
        (
            "--steps 10 --warmup 11",
            "--warmup 11 is longer than the training: --steps is 10",
        ),
        ("--accum 0", "0 is not in 1.."),
        (
            "--effective-batch 8 --accum 2",
            "'--effective-batch <SEQUENCES>' cannot be used with '--accum <ACCUM>'",
        ),
        (
            "--effective-batch 8 --batch 2",
            "'--effective-batch <SEQUENCES>' cannot be used with '--batch <BATCH>'",
        ),
        ("--memory-limit 100", "--effective-batch <SEQUENCES>"),
        (
            "--memory-limit 100 --batch 2",
            "'--memory-limit <MIB>' cannot be used with '--batch <BATCH>'",
        ),
        (
            "--checkpoint units --layers 1",
            "--checkpoint units needs two blocks or more: --layers is 1",
        ),
        (
            "--checkpoint budget=0",
            "expected none, block, units, keep-compute, offload, budget=MIB or budget=1% to budget=100%",
        ),
        ("--amp fp8", "[possible values: off, bf16, f16]"),
        ("--zero 4", "ZeRO stage 4, but there are 0, 1, 2 and 3"),
        ("--zero two", "must be 0, 1, 2 or 3"),
        ("--ranks 0", "0 is not in 1.."),
        (
            "--backend tpu",
            "[possible values: flex, cuda, tch, vulkan]",
        ),
    ] {
        let error = parse(arguments).unwrap_err();
        assert!(error.contains(reason), "{arguments}: {error}");
    }
}

#[test]
fn what_becomes_of_activations_is_written_as_it_is_read() {
    for text in [
        "none",
        "block",
        "units",
        "keep-compute",
        "offload",
        "budget=300",
        "budget=40%",
    ] {
        let checkpoint: Checkpoint = text.parse().unwrap();
        assert_eq!(checkpoint.to_string(), text);
    }
    for text in [
        "",
        "budget",
        "budget=",
        "budget=0",
        "budget=0%",
        "budget=101%",
        "budget=1.5",
        "blocks",
    ] {
        let error = text.parse::<Checkpoint>().unwrap_err();
        assert!(error.contains("budget=MIB"), "{text}: {error}");
    }
}
