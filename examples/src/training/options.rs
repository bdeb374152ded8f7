//! Options that all examples that train have: those of memory and speed, and values that are checked
//! while the command line is read.

use burn_zero::{Memory, Stage, ZeroConfig};
use clap::Args;
use clap::builder::RangedU64ValueParser;

use super::precision::Amp;
use super::recompute::Checkpoint;
use crate::backend::BackendName;

/// What changes the memory and the time of a step, and (in f32) none of its numbers.
#[derive(Args, Clone, Debug, PartialEq)]
#[command(next_help_heading = "Memory and speed")]
pub struct MemoryOptions {
    /// Precision of the forward and backward pass; parameters and optimizer stay in f32 [default:
    /// off]
    #[arg(long, value_enum)]
    pub amp: Option<Amp>,

    /// What becomes of activations until backward: none, block, units, keep-compute, offload,
    /// budget=MIB or budget=40%
    #[arg(long, value_name = "HOW", default_value_t = Checkpoint::None)]
    pub checkpoint: Checkpoint,

    /// Keep the optimizer's state in host memory and update parameters there
    #[arg(long)]
    pub offload: bool,

    /// Keep parameters in host memory: the device holds one only while it is used
    #[arg(long)]
    pub offload_param: bool,

    /// Keep each rank's shards of the parameters at --zero 3 on the device, not in host memory
    #[arg(long, conflicts_with = "offload_param")]
    pub shards_on_device: bool,

    /// What is sharded over ranks: 0 nothing (plain data parallel), 1 optimizer state, 2 gradients
    /// too, 3 parameters too [default: 0]
    #[arg(long, value_name = "STAGE", value_parser = stage)]
    pub zero: Option<Stage>,

    /// Ranks, as threads of this process, a device each; under mpirun and srun their processes are
    /// the ranks [default: 1]
    #[arg(long, value_parser = positive())]
    pub ranks: Option<usize>,

    /// Where to compute; cuda, tch and vulkan are features of this package
    #[arg(long, value_enum, default_value_t = BackendName::Flex)]
    pub backend: BackendName,
}

impl MemoryOptions {
    /// The precision.
    pub fn amp(&self) -> Amp {
        self.amp.unwrap_or(Amp::Off)
    }

    /// The stage.
    pub fn zero(&self) -> Stage {
        self.zero.unwrap_or(ZeroConfig::DEFAULT_STAGE)
    }

    /// Sets in a configuration what these options say.
    pub fn set(&self, zero: &mut ZeroConfig) {
        zero.stage = self.zero.unwrap_or(zero.stage);
        if self.offload {
            zero.offload_optimizer = Memory::Host;
        }
        if self.offload_param {
            zero.offload_param = Memory::Host;
            zero.shards = Memory::Host;
        }
        if self.shards_on_device {
            zero.shards = Memory::Device;
        }
    }
}

/// A number of at least 1.
pub fn positive() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}

/// A ZeRO stage.
///
/// # Errors
///
/// What else it must be.
pub fn stage(text: &str) -> Result<Stage, String> {
    let number: u8 = text
        .parse()
        .map_err(|_| "must be 0, 1, 2 or 3".to_owned())?;
    Stage::try_from(number)
}

/// Mebibytes whose number of bytes fits into a `u64`.
pub fn mebibytes() -> RangedU64ValueParser<u64> {
    RangedU64ValueParser::new().range(1..=u64::MAX >> 20)
}

/// A number above 0 and at most 1.
///
/// # Errors
///
/// What else it must be.
pub fn learning_rate(text: &str) -> Result<f64, String> {
    checked_learning_rate(text.parse().unwrap_or(f64::NAN))
}

/// The rate, if it is above 0 and at most 1.
///
/// # Errors
///
/// What else it must be.
pub fn checked_learning_rate(rate: f64) -> Result<f64, String> {
    if rate > 0.0 && rate <= 1.0 {
        Ok(rate)
    } else {
        Err("must be a number above 0 and at most 1".to_owned())
    }
}

/// A number of at least 0 and below 1.
///
/// # Errors
///
/// What else it must be.
pub fn probability(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(probability) if (0.0..1.0).contains(&probability) => Ok(probability),
        _ => Err("must be a number of at least 0 and below 1".into()),
    }
}

/// A number above 0.
///
/// # Errors
///
/// What else it must be.
pub fn above_zero(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if number > 0.0 && f64::is_finite(number) => Ok(number),
        _ => Err("must be a number above 0".into()),
    }
}

/// A number with a unit: 125M, 1.3B.
///
/// # Errors
///
/// What else it must be.
pub fn count(text: &str) -> Result<u64, String> {
    scaled(text, &[('K', 1e3), ('M', 1e6), ('B', 1e9), ('T', 1e12)])
}

/// Bytes with a unit: 900M, 24G.
///
/// # Errors
///
/// What else it must be.
pub fn bytes(text: &str) -> Result<u64, String> {
    let unit = |power: i32| 2f64.powi(power);
    scaled(
        text,
        &[
            ('K', unit(10)),
            ('M', unit(20)),
            ('G', unit(30)),
            ('T', unit(40)),
        ],
    )
}

fn scaled(text: &str, units: &[(char, f64)]) -> Result<u64, String> {
    let found = units
        .iter()
        .find(|(unit, _)| text.to_uppercase().ends_with(*unit));
    let (number, scale) = match found {
        Some((_, scale)) => (&text[..text.len() - 1], *scale),
        None => (text, 1.0),
    };
    match number.parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok((number * scale) as u64),
        _ => Err("must be a positive number, with a unit".into()),
    }
}
