//! A line now and then: where the training is, and when it will be at its end.

use std::time::{Duration, Instant};

/// The time between two lines.
const BETWEEN: Duration = Duration::from_secs(10);

/// Prints the progress of a training.
#[derive(Debug)]
pub struct ProgressLines {
    steps: usize,
    /// Updates that were made before this process, which a resumed training has.
    before: usize,
    began: Instant,
    printed: Option<Instant>,
}

impl ProgressLines {
    /// A training of so many updates begins, or goes on after those that were made `before`, now.
    pub fn new(steps: usize, before: usize) -> Self {
        Self {
            steps,
            before,
            began: Instant::now(),
            printed: None,
        }
    }

    /// Seconds since the training began.
    pub fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Prints the first update, the last, and one every ten seconds. `tokens` are those of this
    /// process.
    pub fn update(&mut self, done: usize, loss: f64, norm: f64, tokens: usize) {
        let is_due = self.printed.is_none_or(|last| last.elapsed() >= BETWEEN);
        if is_due || done == self.steps {
            self.printed = Some(Instant::now());
            println!("{}", self.line(done, loss, norm, tokens, self.seconds()));
        }
    }

    /// Of an update, counted from 1, after so many tokens and seconds of this process.
    fn line(&self, done: usize, loss: f64, norm: f64, tokens: usize, seconds: f64) -> String {
        let steps = self.steps;
        let left = seconds / (done - self.before) as f64 * (steps - done) as f64;
        format!(
            "update {done:>width$}/{steps}  loss {loss:.4}  gradient norm {norm:.3}  {:.0} tokens/s  {} left",
            tokens as f64 / seconds,
            clock(left.round() as u64),
            width = steps.to_string().len(),
        )
    }
}

/// `1:02:03`
fn clock(seconds: u64) -> String {
    format!(
        "{}:{:02}:{:02}",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60
    )
}

#[cfg(test)]
mod tests {
    use super::ProgressLines;

    #[test]
    fn line_has_the_speed_and_the_time_left() {
        let line = |before| ProgressLines::new(100, before).line(10, 2.5, 1.25, 5120, 400.0);
        assert_eq!(
            line(0),
            "update  10/100  loss 2.5000  gradient norm 1.250  13 tokens/s  1:00:00 left"
        );
        let resumed = line(5);
        assert!(resumed.ends_with("13 tokens/s  2:00:00 left"), "{resumed}");
    }
}
