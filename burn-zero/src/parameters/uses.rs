//! How steps use the parameters of a model: in which order, and in which types.

use std::collections::HashMap;

use burn::tensor::DType;
use burn_decorator::UseOrder;
use burn_ranks::ProcessGroup;

use crate::error::ZeroError;
use crate::host::exchanged;

/// How the steps of a model use its parameters, from version to version. A clone of the model that
/// stays as it is, such as the reference model of DPO, is used in another order, and has its own as
/// soon as an update has made the model another one.
#[derive(Default)]
pub(super) struct UnitUses {
    /// The units that the current step has used.
    units: Vec<usize>,
    /// The units that the step before has used.
    expected: UseOrder<usize>,
    /// By parameter, of the first two steps.
    types: HashMap<usize, UsedType>,
    /// Steps that have used a unit.
    steps: usize,
    /// The number of the last step of the trained model.
    last_step: usize,
}

/// The type in which a parameter is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UsedType {
    /// In this one: the first step has cast it.
    Low(DType),
    /// In its own: the second step has used it without a cast, too.
    Own,
}

/// More than those of a step.
const MOST_USES: usize = 1 << 16;

impl UnitUses {
    /// A step of the trained model has ended, the one of this number.
    pub(super) fn end_step(&mut self, number: usize) {
        self.last_step = number;
        if !self.units.is_empty() {
            self.expected.expect(std::mem::take(&mut self.units));
            self.steps += 1;
        }
        self.expected.begin();
    }

    /// A step begins again, of other versions.
    pub(super) fn begin_again(&mut self) {
        self.units.clear();
        self.expected.begin();
    }

    /// Notes the use of a unit, after `steps` of the trained model, and returns the unit that is
    /// expected next. It depends on uses alone, which are the same on all ranks: each is a
    /// collective.
    pub(super) fn next(&mut self, unit: usize, steps: usize) -> Option<usize> {
        if self.last_step != steps {
            self.end_step(steps);
        }
        // A program without steps uses units without end.
        if self.units.len() < MOST_USES {
            self.units.push(unit);
        }
        self.expected.next(unit)
    }

    /// The lower type in which a parameter is used.
    pub(super) fn low_type(&self, parameter: usize) -> Option<DType> {
        match self.types.get(&parameter)? {
            UsedType::Low(dtype) => Some(*dtype),
            UsedType::Own => None,
        }
    }

    /// Notes that a parameter is cast to a type, if it can be sent in that.
    pub(super) fn is_cast(&mut self, parameter: usize, dtype: DType) {
        if self.steps == 0 && exchanged(dtype).is_some() {
            let known = self.types.entry(parameter);
            known.or_insert(UsedType::Low(dtype));
        }
    }

    /// Notes that a parameter is used in its own type, without a cast. Uses after the second step
    /// are exceptions, such as reads.
    pub(super) fn is_used_whole(&mut self, parameter: usize) {
        if self.steps == 1 {
            self.types.insert(parameter, UsedType::Own);
        }
    }

    /// After the first step and after the second: the types of so many parameters become those of
    /// all ranks. A rank may have used parameters that others have not, of units that all of them
    /// have gathered. Returns whether it is such a step. All ranks call it.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(super) fn agree_on_types(
        &mut self,
        parameters: usize,
        group: &dyn ProcessGroup,
    ) -> Result<bool, ZeroError> {
        if self.steps == 0 || self.steps > 2 {
            return Ok(false);
        }
        let own = (0..parameters).map(|parameter| to_byte(self.types.get(&parameter)));
        let label = "types in which a step has used parameters";
        let ranks = group.gather_bytes(label, own.collect())?;
        let types = (0..parameters).filter_map(|parameter| {
            let mut used = ranks.iter().filter_map(|rank| from_byte(rank[parameter]));
            let first = used.next()?;
            let agreed = if used.all(|other| other == first) {
                first
            } else {
                UsedType::Own
            };
            Some((parameter, agreed))
        });
        self.types = types.collect();
        Ok(true)
    }
}

/// The types as bytes, from 1; 0 stands for no use.
const BYTES: [UsedType; 4] = [
    UsedType::Own,
    UsedType::Low(DType::BF16),
    UsedType::Low(DType::F16),
    UsedType::Low(DType::F32),
];

fn to_byte(used: Option<&UsedType>) -> u8 {
    let place = BYTES.iter().position(|known| Some(known) == used);
    place.map_or(0, |place| place as u8 + 1)
}

fn from_byte(byte: u8) -> Option<UsedType> {
    BYTES.get(usize::from(byte).checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_without_a_step_is_not_remembered_without_end() {
        let mut uses = UnitUses::default();
        (0..3 * MOST_USES).for_each(|use_| assert_eq!(uses.next(use_ % 2, 0), None));
        assert_eq!(uses.units.len(), MOST_USES);
    }

    #[test]
    fn a_step_expects_the_order_of_the_step_before() {
        let mut uses = UnitUses::default();
        for (step, units) in [[0, 1, 2], [2, 0, 1], [2, 0, 1]].into_iter().enumerate() {
            let found = units.map(|unit| uses.next(unit, step));
            if step == 2 {
                assert_eq!(found, [Some(0), Some(1), None]);
            }
        }
    }
}
