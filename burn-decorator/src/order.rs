//! The order in which something is used, from step to step.

/// What is expected to be used next, as steps use the same things in the same order.
///
/// ```
/// use burn_decorator::UseOrder;
///
/// let mut order = UseOrder::default();
/// order.expect(vec!["first", "second", "third"]);
/// assert_eq!(order.next("first"), Some("second"));
/// // Another order begins.
/// assert_eq!(order.next("third"), None);
/// assert_eq!(order.next("first"), Some("second"));
/// ```
#[derive(Clone, Debug)]
pub struct UseOrder<T> {
    /// The uses of a step.
    uses: Vec<T>,
    /// The uses of the step before, if they were others and then those of `uses`.
    longer: Vec<T>,
    /// The places in `uses` after which the next step may go on otherwise, while `uses` are those
    /// of the first step.
    forks: Vec<usize>,
    /// Where in `uses` the next one is expected.
    at: usize,
    /// The use before.
    last: Option<T>,
}

impl<T> Default for UseOrder<T> {
    fn default() -> Self {
        Self {
            uses: Vec::new(),
            longer: Vec::new(),
            forks: Vec::new(),
            at: 0,
            last: None,
        }
    }
}

impl<T: Copy + PartialEq> UseOrder<T> {
    /// From now on the uses of a step are expected to be these. A step begins.
    ///
    /// If `uses` ends with those that are expected so far and has others before them, the others are
    /// taken to be a validation's: the expectation stays, unless the next step has the same `uses`.
    ///
    /// If the first ones begin with the same uses several times, all but the last may be a
    /// validation's. Until the next step has shown that, nothing is expected where it matters.
    pub fn expect(&mut self, uses: Vec<T>) {
        let is_first = self.uses.is_empty();
        self.forks = if is_first { forks(&uses) } else { Vec::new() };
        let is_longer = !is_first && uses.ends_with(&self.uses);
        if is_longer && uses != self.uses && self.longer != uses {
            self.longer = uses;
        } else {
            self.uses = uses;
            self.longer.clear();
        }
        self.begin();
    }

    /// A step begins.
    pub fn begin(&mut self) {
        (self.at, self.last) = (0, None);
    }

    /// What is expected after this use.
    pub fn next(&mut self, used: T) -> Option<T> {
        let last = self.last.replace(used);
        let (uses, expected) = (&self.uses, self.at);
        // The expected place or, where another order begins (validation, a second micro-batch), one
        // after the same use before.
        let follows = |at: &usize| {
            let before = at.checked_sub(1).map(|before| uses[before]);
            uses[*at] == used && (*at == expected || before == last)
        };
        let mut places = (expected..uses.len()).chain(0..expected);
        let any = || uses.iter().position(|known| *known == used);
        let place = places.find(follows).or_else(any);
        self.at = place.map_or(uses.len(), |place| place + 1);
        let is_fork = place.is_some_and(|place| self.forks.contains(&place));
        uses.get(self.at).copied().filter(|_| !is_fork)
    }
}

/// The places after which it matters which of the repetitions, with which these uses begin, is the
/// first one of a step.
fn forks<T: PartialEq>(uses: &[T]) -> Vec<usize> {
    let repeats = |&period: &usize| uses[..period] == uses[period..2 * period];
    let Some(period) = (1..=uses.len() / 2).find(repeats) else {
        return Vec::new();
    };
    let pairs = uses.iter().zip(&uses[period..]);
    let repeated = period + pairs.take_while(|(use_, later)| use_ == later).count();
    let later = 1..repeated / period;
    later.map(|times| repeated - times * period - 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is expected after each use, when two steps were as `of_step`.
    fn expected(of_step: &[usize], used: &[usize]) -> Vec<Option<usize>> {
        let mut order = UseOrder::default();
        order.expect(of_step.to_vec());
        order.expect(of_step.to_vec());
        used.iter().map(|used| order.next(*used)).collect()
    }

    const STEP: [usize; 6] = [0, 1, 2, 3, 2, 1];

    #[test]
    fn a_step_like_the_expected_one_is_expected_whole() {
        let next = STEP.iter().skip(1).map(|used| Some(*used));
        let next: Vec<_> = next.chain([None]).collect();
        assert_eq!(expected(&STEP, &STEP), next);
        // Scopes use everything once more before backward does.
        let scoped = [0, 1, 2, 3, 2, 3, 3, 2, 0, 1, 1, 0];
        let next = scoped.iter().skip(1).map(|used| Some(*used));
        let next: Vec<_> = next.chain([None]).collect();
        assert_eq!(expected(&scoped, &scoped), next);
    }

    #[test]
    fn so_is_a_second_micro_batch() {
        let twice = [STEP, STEP].concat();
        let found = expected(&STEP, &twice);
        assert_eq!(found[..6], found[6..]);
    }

    #[test]
    fn validation_misses_once_a_batch() {
        let found = expected(&STEP, &[0, 1, 2, 3, 0, 1, 2, 3, 0]);
        let expected = [1, 2, 3, 2, 1, 2, 3, 2, 1].map(Some);
        assert_eq!(found, expected);
    }

    #[test]
    fn a_step_after_one_that_followed_a_validation_is_expected_whole() {
        let mut order = UseOrder::default();
        order.expect(STEP.to_vec());
        let validated = [&[0, 1, 2, 3], &STEP[..]].concat();
        order.expect(validated.clone());
        let found = STEP.map(|used| order.next(used));
        assert_eq!(found.to_vec(), expected(&STEP, &STEP));
        // A validation before each step is a part of it.
        order.expect(validated.clone());
        order.expect(validated.clone());
        let found: Vec<_> = validated.iter().map(|used| order.next(*used)).collect();
        assert_eq!(found, expected(&validated, &validated));
    }

    #[test]
    fn nothing_is_expected_in_vain_after_a_first_step_that_followed_a_validation() {
        const FORWARD: [usize; 4] = [0, 1, 2, 3];
        for batches in 1..4 {
            let mut order = UseOrder::default();
            order.expect([&FORWARD.repeat(batches)[..], &STEP].concat());
            let found = STEP.map(|used| order.next(used));
            assert_eq!(found, [Some(1), Some(2), Some(3), None, Some(1), None]);
            order.expect(STEP.to_vec());
            let found = STEP.map(|used| order.next(used));
            assert_eq!(found.to_vec(), expected(&STEP, &STEP));
        }
        // It may have been a part of the step, such as the first of two forward passes.
        let twice = [&FORWARD[..], &STEP].concat();
        let mut order = UseOrder::default();
        order.expect(twice.clone());
        let found: Vec<_> = twice.iter().map(|used| order.next(*used)).collect();
        let mut all = expected(&twice, &twice);
        all[3] = None;
        assert_eq!(found, all);
        order.expect(twice.clone());
        let found: Vec<_> = twice.iter().map(|used| order.next(*used)).collect();
        all[3] = Some(0);
        assert_eq!(found, all);
    }

    #[test]
    fn what_the_expected_step_did_not_use_is_before_nothing() {
        assert_eq!(expected(&STEP, &[0, 7, 2]), [Some(1), None, Some(3)]);
    }
}
