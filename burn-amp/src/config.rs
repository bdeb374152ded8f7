//! Autocast from a configuration file, for the whole process.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use burn_backend::{Backend, FloatDType};
use serde::{Deserialize, Serialize};

use crate::cast::{Arithmetic, Cast};
use crate::error::AmpError;
use crate::policy::{self, Mode, Overrides};
use crate::table;

/// The policies that a configuration can name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyName {
    /// As [`Off`](crate::Off).
    Off,
    /// As [`Bf16`](crate::Bf16).
    #[default]
    Bf16,
    /// As [`F16`](crate::F16).
    F16,
}

impl PolicyName {
    /// Every policy, in the order in which errors list them.
    pub const ALL: [Self; 3] = [Self::Off, Self::Bf16, Self::F16];

    /// The name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// The low type, `None` for [`PolicyName::Off`].
    pub const fn low(self) -> Option<FloatDType> {
        match self {
            Self::Off => None,
            Self::Bf16 => Some(FloatDType::BF16),
            Self::F16 => Some(FloatDType::F16),
        }
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PolicyName {
    type Err = AmpError;

    fn from_str(name: &str) -> Result<Self, AmpError> {
        Self::ALL
            .into_iter()
            .find(|policy| policy.name() == name)
            .ok_or_else(|| AmpError::UnknownPolicy {
                name: name.to_owned(),
                valid: Self::ALL.map(Self::name).join(", "),
            })
    }
}

/// Autocast for the process: what policy [`Configured`](crate::Configured) does.
///
/// ```
/// use burn_amp::{AmpConfig, Cast};
///
/// let config: AmpConfig = serde_json::from_str(r#"{"policy": "f16", "ops": {"softmax": "lower"}}"#).unwrap();
/// assert_eq!(config.ops["softmax"], Cast::Lower);
/// config.install().unwrap();
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct AmpConfig {
    /// The policy, bf16 by default.
    pub policy: PolicyName,
    /// Classes that replace those of the table, by operation: `{"softmax": "lower"}`. Names are
    /// those of [`op_table`](crate::op_table), with or without `float_`.
    pub ops: BTreeMap<String, Cast>,
}

/// [`AmpConfig`] as it is written, with names that may not exist.
#[derive(Default, Deserialize)]
#[serde(default, rename = "AmpConfig", deny_unknown_fields)]
struct Unchecked {
    policy: PolicyName,
    ops: BTreeMap<String, Cast>,
}

impl TryFrom<Unchecked> for AmpConfig {
    type Error = AmpError;

    fn try_from(Unchecked { policy, ops }: Unchecked) -> Result<Self, AmpError> {
        let config = Self { policy, ops };
        config.overrides()?;
        Ok(config)
    }
}

impl From<PolicyName> for AmpConfig {
    fn from(policy: PolicyName) -> Self {
        Self {
            policy,
            ops: BTreeMap::new(),
        }
    }
}

burn_decorator::config!(AmpConfig {
    policy: PolicyName = with_policy,
    ops: BTreeMap<String, Cast> = with_ops,
});

impl AmpConfig {
    /// Matmuls and convolutions in bf16.
    pub fn bf16() -> Self {
        PolicyName::Bf16.into()
    }

    /// Matmuls and convolutions in f16.
    pub fn f16() -> Self {
        PolicyName::F16.into()
    }

    /// No autocast.
    pub fn off() -> Self {
        PolicyName::Off.into()
    }

    /// Replaces the class of one operation.
    pub fn with_op(mut self, op: impl Into<String>, cast: Cast) -> Self {
        self.ops.insert(op.into(), cast);
        self
    }

    /// Makes this the process's configuration: every backend with policy
    /// [`Configured`](crate::Configured) follows it from its next operation on, on every thread.
    ///
    /// # Errors
    ///
    /// [`AmpError::UnknownOp`] where `ops` names something that does not compute with float
    /// tensors, [`AmpError::DuplicateOp`] where it names an operation twice; nothing is installed
    /// then.
    pub fn install(&self) -> Result<(), AmpError> {
        policy::configure(self.mode()?);
        Ok(())
    }

    /// Whether the device can run this policy: call it before anything else runs.
    ///
    /// # Errors
    ///
    /// [`AmpError::UnsupportedDtype`] with the device, the backend, the type and what the device
    /// can do, and [`AmpError::UnknownOp`] as [`install`](Self::install).
    pub fn check<B: Backend>(&self, device: &B::Device) -> Result<(), AmpError> {
        self.overrides()?;
        match self.policy.low() {
            Some(low) => crate::decorator::check_dtype::<B>(device, low),
            None => Ok(()),
        }
    }

    fn overrides(&self) -> Result<Overrides, AmpError> {
        let mut overrides = Overrides::new();
        for (name, cast) in &self.ops {
            let row = table::castable(name).ok_or_else(|| AmpError::unknown_op(name))?;
            if overrides.insert(row.op, *cast).is_some() {
                return Err(AmpError::DuplicateOp { op: row.op });
            }
        }
        Ok(overrides)
    }

    fn mode(&self) -> Result<Mode, AmpError> {
        let overrides = self.overrides()?;
        Ok(Mode {
            arithmetic: self
                .policy
                .low()
                .map_or(Arithmetic::AsGiven, Arithmetic::Low),
            // Leaked, so that every operation reads it through a plain reference; a process
            // installs only a few.
            overrides: (!overrides.is_empty()).then(|| &*Box::leak(Box::new(overrides))),
        })
    }
}
