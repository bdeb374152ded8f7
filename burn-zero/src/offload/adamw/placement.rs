//! Which parameters keep their state on the device.

use std::collections::HashSet;

use burn::module::ParamId;

/// The parameters that are updated on the device: decided once, by the first step. The same model at the same ratio is placed
/// the same way, in every process, so that a record need not say.
#[derive(Clone, Debug)]
pub(super) struct Placement {
    on_device: HashSet<ParamId>,
}

/// A parameter to place.
pub(super) struct Candidate {
    pub(super) id: ParamId,
    pub(super) elements: usize,
    /// Of a lower precision it has a master, which is on the host.
    pub(super) is_full_precision: bool,
}

impl Placement {
    /// Of parameters in the order of the module.
    pub(super) fn new(parameters: &[Candidate], ratio: f64) -> Self {
        let stay = stay(parameters, ratio);
        let placed = parameters.iter().zip(stay);
        Self {
            on_device: placed
                .filter(|(_, stays)| *stays)
                .map(|(parameter, _)| parameter.id)
                .collect(),
        }
    }

    pub(super) fn is_on_device(&self, id: ParamId) -> bool {
        self.on_device.contains(&id)
    }
}

/// Which parameters stay: the first ones that fit into the device's part, which is never exceeded.
fn stay(parameters: &[Candidate], ratio: f64) -> Vec<bool> {
    let total: usize = parameters.iter().map(|parameter| parameter.elements).sum();
    let mut room = ((1.0 - ratio) * total as f64) as usize;
    let fits = parameters.iter().map(|parameter| {
        let fits = parameter.elements <= room && parameter.is_full_precision && ratio < 1.0;
        if fits {
            room -= parameter.elements;
        }
        fits
    });
    fits.collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidates(elements: &[usize]) -> Vec<Candidate> {
        let candidates = elements.iter().map(|&elements| Candidate {
            id: ParamId::new(),
            elements,
            is_full_precision: true,
        });
        candidates.collect()
    }

    #[test]
    fn the_first_that_fit_stay() {
        let stay = |elements: &[usize], ratio| stay(&candidates(elements), ratio);
        assert_eq!(stay(&[4, 8, 3, 1], 0.5), [true, false, true, true]);
        assert_eq!(stay(&[4, 8], 1.0), [false, false]);
        assert_eq!(stay(&[4, 0, 8], 0.0), [true, true, true]);
        assert!(stay(&[], 0.5).is_empty());
    }

    #[test]
    fn what_has_a_master_goes_to_the_host() {
        let mut all = candidates(&[4, 8, 3]);
        all[0].is_full_precision = false;
        assert_eq!(stay(&all, 0.0), [false, true, true]);
    }

    proptest! {
        #[test]
        fn the_device_gets_no_more_than_its_part_and_misses_less_than_one_parameter(
            elements in prop::collection::vec(0_usize..1000, 0..20),
            ratio in 0.0_f64..=1.0,
        ) {
            let total: usize = elements.iter().sum();
            let part = ((1.0 - ratio) * total as f64) as usize;
            let stays = stay(&candidates(&elements), ratio);
            let held: usize = elements.iter().zip(&stays).filter(|(_, stays)| **stays).map(|(e, _)| e).sum();
            prop_assert!(held <= part);
            let smallest_left = elements.iter().zip(&stays).filter(|(_, stays)| !**stays).map(|(e, _)| *e).min();
            if let Some(left) = smallest_left && ratio < 1.0 {
                prop_assert!(held + left > part);
            }
        }
    }
}
