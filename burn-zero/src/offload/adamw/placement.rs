//! Which parameters keep their state on the device.

use std::collections::HashSet;

use burn::module::ParamId;

/// The parameters that are updated on the device: decided once, by the first step. The same model at the same ratio is placed
/// the same way, in every process, so that a record need not say.
#[derive(Clone, Debug)]
pub(super) struct Placement {
    on_device: HashSet<ParamId>,
}

impl Placement {
    /// Of parameters with their elements, in the order of the module.
    pub(super) fn new(parameters: &[(ParamId, usize)], ratio: f64) -> Self {
        let elements: Vec<_> = parameters.iter().map(|(_, elements)| *elements).collect();
        let stay = stay(&elements, ratio);
        let ids = parameters.iter().map(|(id, _)| *id).zip(stay);
        Self {
            on_device: ids.filter(|(_, stays)| *stays).map(|(id, _)| id).collect(),
        }
    }

    pub(super) fn is_on_device(&self, id: ParamId) -> bool {
        self.on_device.contains(&id)
    }
}

/// Which parameters stay: the first ones that fit into the device's part, which is never exceeded.
fn stay(elements: &[usize], ratio: f64) -> Vec<bool> {
    let total: usize = elements.iter().sum();
    let mut room = ((1.0 - ratio) * total as f64) as usize;
    let fits = elements.iter().map(|&elements| {
        let fits = elements <= room && ratio < 1.0;
        if fits {
            room -= elements;
        }
        fits
    });
    fits.collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_first_that_fit_stay() {
        assert_eq!(stay(&[4, 8, 3, 1], 0.5), [true, false, true, true]);
        assert_eq!(stay(&[4, 8], 1.0), [false, false]);
        assert_eq!(stay(&[4, 0, 8], 0.0), [true, true, true]);
        assert!(stay(&[], 0.5).is_empty());
    }

    proptest! {
        #[test]
        fn the_device_gets_no_more_than_its_part_and_misses_less_than_one_parameter(
            elements in prop::collection::vec(0_usize..1000, 0..20),
            ratio in 0.0_f64..=1.0,
        ) {
            let total: usize = elements.iter().sum();
            let part = ((1.0 - ratio) * total as f64) as usize;
            let stays = stay(&elements, ratio);
            let held: usize = elements.iter().zip(&stays).filter(|(_, stays)| **stays).map(|(e, _)| e).sum();
            prop_assert!(held <= part);
            let smallest_left = elements.iter().zip(&stays).filter(|(_, stays)| !**stays).map(|(e, _)| *e).min();
            if let Some(left) = smallest_left && ratio < 1.0 {
                prop_assert!(held + left > part);
            }
        }
    }
}
