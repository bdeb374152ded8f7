//! What is compared.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;

use examples::training::precision::Amp;
use examples::training::recompute::Checkpoint;

/// What `--settings` lists: decorators over the backend, and what becomes of activations.
///
/// Written as the stack, the activations, or both: `bf16`, `block`, `bf16+block`. Activations alone
/// are those of the stack `off`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    /// What is over the backend.
    pub stack: Stack,
    /// What becomes of activations until backward.
    pub checkpoint: Checkpoint,
}

/// What is over the backend.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stack {
    /// Autodiff, without a type of burn-amp or burn-checkpoint
    Bare,
    /// Autodiff with Burn's own BalancedCheckpointing, without a type of burn-amp or
    /// burn-checkpoint
    Balanced,
    /// Under burn-amp, with policy Off, and over burn-checkpoint, of which nothing is asked
    Off,
    /// As off, in bfloat16 where it is safe
    Bf16,
    /// As off, in IEEE half precision where it is safe, with dynamic loss scaling
    F16,
}

impl Stack {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Balanced => "balanced",
            Self::Off => "off",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// The precision; nothing where burn-amp and burn-checkpoint have no part in it.
    pub fn amp(self) -> Option<Amp> {
        match self {
            Self::Bare | Self::Balanced => None,
            Self::Off => Some(Amp::Off),
            Self::Bf16 => Some(Amp::Bf16),
            Self::F16 => Some(Amp::F16),
        }
    }
}

impl From<Stack> for Setting {
    fn from(stack: Stack) -> Self {
        Self {
            stack,
            checkpoint: Checkpoint::None,
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.stack, self.checkpoint) {
            (stack, Checkpoint::None) => f.write_str(stack.name()),
            (Stack::Off, checkpoint) => checkpoint.fmt(f),
            (stack, checkpoint) => write!(f, "{}+{checkpoint}", stack.name()),
        }
    }
}

impl FromStr for Setting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let stack = |name: &str| {
            let stacks = Stack::value_variants().iter().copied();
            stacks.into_iter().find(|stack| stack.name() == name)
        };
        let names = || {
            let names = Stack::value_variants().iter().map(|stack| stack.name());
            names.collect::<Vec<_>>().join(", ")
        };
        if let Some(stack) = stack(text) {
            return Ok(stack.into());
        }
        let (name, checkpoint) = text.split_once('+').unwrap_or(("off", text));
        let Some(stack) = stack(name) else {
            return Err(format!(
                "no stack is called {name}: expected one of {}",
                names()
            ));
        };
        let checkpoint: Checkpoint = checkpoint.parse().map_err(|error| {
            format!("expected one of {}, what becomes of activations, or both as bf16+block; of activations: {error}", names())
        })?;
        if stack.amp().is_none() && checkpoint != Checkpoint::None {
            return Err(format!(
                "{name} has nothing that could do {checkpoint}: write {checkpoint} alone"
            ));
        }
        Ok(Self { stack, checkpoint })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stack_is_known_by_its_name() {
        for &stack in Stack::value_variants() {
            let value = stack.to_possible_value().unwrap();
            assert_eq!(value.get_name(), stack.name());
            assert_eq!(stack.name().parse(), Ok(Setting::from(stack)));
        }
    }

    #[test]
    fn it_is_written_as_it_is_read() {
        for text in [
            "bare",
            "balanced",
            "off",
            "block",
            "units",
            "budget=40%",
            "bf16+block",
            "f16+budget=300",
        ] {
            let setting: Setting = text.parse().unwrap();
            assert_eq!(setting.to_string(), text);
        }
        assert_eq!("off+block".parse::<Setting>().unwrap().to_string(), "block");
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_the_reason() {
        for (text, reason) in [
            ("fp8", "bf16, f16, what becomes"),
            ("fp8+block", "no stack is called fp8"),
            ("bf16+blocks", "keep-compute"),
            ("bare+block", "bare has nothing that could do block"),
        ] {
            let error = text.parse::<Setting>().unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
