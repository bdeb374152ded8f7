//! The rule: which type the float operands of an operation are brought to.

use std::cell::Cell;
use std::fmt;

use burn_backend::FloatDType;
use serde::{Deserialize, Serialize};

/// What autocast does to the float operands of an operation.
///
/// The classes of
/// [`torch.autocast`](https://pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior). None of
/// them touches f64, integer, boolean or quantized operands, and in every class operands of
/// different types are brought to one type before the inner backend sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cast {
    /// To the policy's low type: operations whose cost is arithmetic and that tolerate it (matmul,
    /// convolution).
    Lower,
    /// To f32: operations that lose range or digits in a low type (exponentials, reductions, norms,
    /// losses).
    Full,
    /// To the widest type among the operands: f16 with bf16 gives f32.
    Promote,
    /// No cast: the types stay as they are.
    Keep,
}

impl Cast {
    /// The class that a row of the table names.
    pub(crate) const fn of(name: &str) -> Self {
        match name.as_bytes() {
            b"lower" => Cast::Lower,
            b"full" => Cast::Full,
            b"promote" => Cast::Promote,
            b"keep" => Cast::Keep,
            _ => panic!("not a cast class"),
        }
    }

    /// The name used in the table, in the documentation and in [`AmpConfig`](crate::AmpConfig).
    pub const fn name(self) -> &'static str {
        match self {
            Cast::Lower => "lower",
            Cast::Full => "full",
            Cast::Promote => "promote",
            Cast::Keep => "keep",
        }
    }
}

impl fmt::Display for Cast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which type an operation computes in where its class leaves the choice to the policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Arithmetic {
    /// The type of the operands: autocast is off.
    #[default]
    AsGiven,
    /// f32: low operands of every operation that computes are raised.
    F32,
    /// The low type, for operations of class [`Cast::Lower`].
    Low(FloatDType),
}

/// What a float tensor is computed from: a gradient, parameters that a loss scaler's update has
/// updated, or neither.
///
/// An optimizer runs on the same backend as `model.valid()`, and only the latter may be lowered. So
/// gradients are marked where they are read, or [loaded](burn_decorator::gradient::load) from the
/// host. Results of marked tensors are marked too (momentum, Muon's orthogonalised update), and
/// operations on them are never lowered. `from_inner`, which makes the updated parameter a training
/// tensor again, clears the mark.
///
/// A parameter that an update with a [`GradScaler`](crate::GradScaler) has updated is marked with
/// its scaler, and so is the loss that is computed from it: a scaler scales the losses of its own
/// model, not those of another training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lineage {
    /// Part of a forward pass: data, parameters, activations.
    #[default]
    Forward,
    /// Likewise, and computed from a parameter that a scaler's update has updated.
    Trained(Owner),
    /// A gradient, or computed from one.
    Gradient,
}

impl Lineage {
    /// The lineage of a result of two operands.
    #[inline]
    pub fn join(self, other: Self) -> Self {
        match (self, other) {
            (Lineage::Forward, other) => other,
            (Lineage::Gradient, _) | (_, Lineage::Gradient) => Lineage::Gradient,
            (Lineage::Trained(owner), Lineage::Trained(other)) if owner != other => {
                Lineage::Trained(Owner::Several)
            }
            (Lineage::Trained(owner), _) => Lineage::Trained(owner),
        }
    }
}

/// Whose update has updated the parameters that a tensor is computed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// That of the scaler with this number.
    Scaler(u32),
    /// Those of several scalers.
    Several,
}

/// A step of a scaler's update, while it is taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnderWay {
    /// The scaler.
    pub(crate) owner: Owner,
    /// Whether the step has made a tensor of autodiff: an updated parameter.
    pub(crate) updated: bool,
}

thread_local! {
    /// The step that this thread takes. Burn's `from_inner`, which makes the updated parameters,
    /// has no argument for it.
    pub(crate) static UNDER_WAY: Cell<Option<UnderWay>> = const { Cell::new(None) };
}

/// What the float operands of one call have in common.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Operands {
    first: Option<FloatDType>,
    widest: Option<FloatDType>,
    mixed: bool,
    lineage: Lineage,
}

impl Operands {
    /// Adds an operand.
    #[inline]
    pub fn see(&mut self, dtype: FloatDType, lineage: Lineage) {
        self.mark(lineage);
        match self.widest {
            None => {
                self.first = Some(dtype);
                self.widest = Some(dtype);
            }
            Some(widest) if widest == dtype => {}
            Some(widest) => {
                self.mixed = true;
                self.widest = Some(wider(widest, dtype));
            }
        }
    }

    /// Adds the lineage of an operand whose type does not matter.
    #[inline]
    pub fn mark(&mut self, lineage: Lineage) {
        self.lineage = self.lineage.join(lineage);
    }

    /// Whether there is no float operand.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.widest.is_none()
    }

    /// The lineage of the results: that of the operands, or where there are none, that of the host
    /// data they are made from.
    #[inline]
    pub fn lineage(&self) -> Lineage {
        if !self.is_empty() {
            return self.lineage;
        }
        if burn_decorator::gradient::is_loading() {
            return Lineage::Gradient;
        }
        // A parameter that was updated on the host.
        let under_way = UNDER_WAY.get();
        under_way.map_or(self.lineage, |step| Lineage::Trained(step.owner))
    }

    /// The type of the operand that the others are written into (kind `Follow`), after the others
    /// were brought to `target`.
    #[inline]
    pub fn destination(&self, target: Option<FloatDType>) -> Option<FloatDType> {
        target.or(self.first)
    }

    /// The type that every float operand is brought to, or `None` to leave them as they are.
    ///
    /// Operands of different types are promoted in any case: the inner backend would reject them
    /// or, on CubeCL, silently miscompute.
    #[inline]
    pub fn target(&self, class: Cast, arithmetic: Arithmetic) -> Option<FloatDType> {
        let widest = self.widest?;
        let promoted = self.mixed.then_some(widest);
        match (arithmetic, class) {
            _ if widest == FloatDType::F64 => promoted,
            (Arithmetic::F32, _) | (Arithmetic::Low(_), Cast::Full) if is_low(widest) => {
                Some(FloatDType::F32)
            }
            (Arithmetic::Low(low), Cast::Lower) if self.lineage != Lineage::Gradient => {
                (self.mixed || widest != low).then_some(low)
            }
            _ => promoted,
        }
    }
}

/// Whether the type has 16 bits.
pub(crate) fn is_low(dtype: FloatDType) -> bool {
    matches!(dtype, FloatDType::F16 | FloatDType::BF16)
}

/// The smallest type that holds the values of both: neither of f16 and bf16 holds the other.
fn wider(a: FloatDType, b: FloatDType) -> FloatDType {
    fn rank(dtype: FloatDType) -> u8 {
        match dtype {
            FloatDType::F16 | FloatDType::BF16 => 0,
            FloatDType::Flex32 => 1,
            FloatDType::F32 => 2,
            FloatDType::F64 => 3,
        }
    }
    match rank(a).cmp(&rank(b)) {
        std::cmp::Ordering::Greater => a,
        std::cmp::Ordering::Less => b,
        std::cmp::Ordering::Equal if a == b => a,
        std::cmp::Ordering::Equal => FloatDType::F32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use FloatDType::{BF16, F16, F32, F64, Flex32};

    const CLASSES: [Cast; 4] = [Cast::Lower, Cast::Full, Cast::Promote, Cast::Keep];

    fn target(class: Cast, arithmetic: Arithmetic, seen: &[FloatDType]) -> Option<FloatDType> {
        of(class, arithmetic, seen, Lineage::Forward)
    }

    fn of(
        class: Cast,
        arithmetic: Arithmetic,
        seen: &[FloatDType],
        lineage: Lineage,
    ) -> Option<FloatDType> {
        let mut operands = Operands::default();
        seen.iter().for_each(|dtype| operands.see(*dtype, lineage));
        operands.target(class, arithmetic)
    }

    #[test]
    fn each_class_has_its_target() {
        for (class, low, seen, expected) in [
            (Cast::Lower, BF16, &[F32, F32][..], Some(BF16)),
            (Cast::Lower, BF16, &[BF16, F32], Some(BF16)),
            (Cast::Lower, BF16, &[F16, F16], Some(BF16)),
            (Cast::Lower, BF16, &[BF16, BF16], None),
            (Cast::Lower, BF16, &[Flex32], Some(BF16)),
            (Cast::Full, F16, &[F16], Some(F32)),
            (Cast::Full, F16, &[BF16, F16], Some(F32)),
            (Cast::Full, F16, &[F32], None),
            (Cast::Full, F16, &[F16, F32], Some(F32)),
            (Cast::Full, F16, &[Flex32], None),
            (Cast::Promote, F16, &[F16, F32], Some(F32)),
            (Cast::Promote, F16, &[F16, BF16], Some(F32)),
            (Cast::Promote, F16, &[Flex32, F32], Some(F32)),
            (Cast::Promote, F16, &[F16, F16], None),
        ] {
            let found = target(class, Arithmetic::Low(low), seen);
            assert_eq!(found, expected, "{class} {seen:?}");
        }
        let full = of(Cast::Full, Arithmetic::Low(F16), &[F16], Lineage::Gradient);
        assert_eq!(full, Some(F32));
    }

    #[test]
    fn every_class_leaves_f64_and_gradients_alone_and_operands_unmixed() {
        let all = [F64, F32, Flex32, F16, BF16];
        let low = Arithmetic::Low(BF16);
        for class in CLASSES {
            assert_eq!(target(class, low, &[F64, F64]), None);
            assert_eq!(target(class, low, &[F64, BF16]), Some(F64));
            assert_eq!(of(class, low, &[F32, F32], Lineage::Gradient), None);
            for a in all {
                for b in all.into_iter().filter(|b| *b != a) {
                    for arithmetic in [Arithmetic::AsGiven, low, Arithmetic::Low(F16)] {
                        let found = target(class, arithmetic, &[a, b]);
                        assert!(found.is_some(), "{class} {a:?} {b:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn off_only_promotes_and_f32_raises_in_every_class() {
        for class in CLASSES {
            for lineage in [Lineage::Forward, Lineage::Gradient] {
                for (seen, off, raised) in [
                    (&[F32, F32][..], None, None),
                    (&[BF16, BF16], None, Some(F32)),
                    (&[BF16, F32], Some(F32), Some(F32)),
                    (&[F64, BF16], Some(F64), Some(F64)),
                ] {
                    assert_eq!(of(class, Arithmetic::AsGiven, seen, lineage), off);
                    assert_eq!(of(class, Arithmetic::F32, seen, lineage), raised);
                }
            }
        }
    }
}
