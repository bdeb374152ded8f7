//! The few statistics that a table of times needs.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Middle half of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Quartiles {
    /// A quarter of the sample lies below.
    pub lower: f64,
    /// Half of the sample lies below.
    pub median: f64,
    /// A quarter of the sample lies above.
    pub upper: f64,
}

impl Quartiles {
    /// Between two values of the sample, the quartiles are interpolated linearly (type 7 of Hyndman
    /// and Fan 1996, as numpy's and R's).
    ///
    /// # Panics
    ///
    /// If the sample is empty.
    pub fn of(sample: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = sample.into_iter().collect();
        assert!(!sorted.is_empty(), "an empty sample has no quartiles");
        sorted.sort_by(f64::total_cmp);
        let at = |part: f64| {
            let position = part * (sorted.len() - 1) as f64;
            let below = sorted[position.floor() as usize];
            let above = sorted[position.ceil() as usize];
            below + position.fract() * (above - below)
        };
        Self {
            lower: at(0.25),
            median: at(0.5),
            upper: at(0.75),
        }
    }

    /// Of the ratios `sample[i] / reference[i]`: what both measured in the same round.
    ///
    /// # Panics
    ///
    /// If one of them is empty.
    pub fn of_ratios(sample: &[f64], reference: &[f64]) -> Self {
        Self::of(sample.iter().zip(reference).map(|(x, y)| x / y))
    }
}

impl fmt::Display for Quartiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            lower,
            median,
            upper,
        } = self;
        write!(f, "{median:.3} ({lower:.3} to {upper:.3})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_lie_between_values() {
        let quartiles = Quartiles::of([4.0, 1.0, 3.0, 2.0]);
        let expected = Quartiles {
            lower: 1.75,
            median: 2.5,
            upper: 3.25,
        };
        assert_eq!(quartiles, expected);
        assert_eq!(Quartiles::of([5.0, 1.0, 9.0]).median, 5.0);
        let one = Quartiles::of([7.0]);
        assert_eq!((one.lower, one.median, one.upper), (7.0, 7.0, 7.0));
    }

    #[test]
    fn ratios_are_those_of_a_round() {
        // Twice as slow in every round, whatever else the machine did.
        let reference = [1.0, 2.0, 100.0];
        let sample = [2.0, 4.0, 200.0];
        let ratios = Quartiles::of_ratios(&sample, &reference);
        assert_eq!((ratios.lower, ratios.median, ratios.upper), (2.0, 2.0, 2.0));
    }

    #[test]
    fn one_disturbed_round_does_not_move_the_median() {
        let ratios = Quartiles::of_ratios(&[1.0, 1.0, 50.0, 1.0, 1.0], &[1.0; 5]);
        assert_eq!(ratios.median, 1.0);
    }

    #[test]
    #[should_panic(expected = "an empty sample")]
    fn an_empty_sample_has_none() {
        Quartiles::of([]);
    }
}
