//! A line now and then: where the training is, and when it will be at its end.

use std::time::{Duration, Instant};

/// The time between two lines.
const BETWEEN: Duration = Duration::from_secs(10);

/// Prints the progress of a training.
#[derive(Debug)]
pub struct ProgressLines {
    steps: usize,
    began: Instant,
    printed: Option<Instant>,
}

impl ProgressLines {
    /// A training of so many updates begins now.
    pub fn new(steps: usize) -> Self {
        Self {
            steps,
            began: Instant::now(),
            printed: None,
        }
    }

    /// Seconds since the training began.
    pub fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Prints the first update, the last, and one every ten seconds.
    pub fn update(&mut self, done: usize, loss: f64, norm: f64, tokens: usize) {
        let is_due = self.printed.is_none_or(|last| last.elapsed() >= BETWEEN);
        if is_due || done == self.steps {
            self.printed = Some(Instant::now());
            println!(
                "{}",
                line(done, self.steps, loss, norm, tokens, self.seconds())
            );
        }
    }
}

/// Of an update, counted from 1, after so many tokens and seconds.
fn line(done: usize, steps: usize, loss: f64, norm: f64, tokens: usize, seconds: f64) -> String {
    let left = seconds / done as f64 * (steps - done) as f64;
    format!(
        "update {done:>width$}/{steps}  loss {loss:.4}  gradient norm {norm:.3}  {:.0} tokens/s  {} left",
        tokens as f64 / seconds,
        clock(left.round() as u64),
        width = steps.to_string().len(),
    )
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
    use super::line;

    #[test]
    fn line_has_the_speed_and_the_time_left() {
        assert_eq!(
            line(10, 100, 2.5, 1.25, 5120, 400.0),
            "update  10/100  loss 2.5000  gradient norm 1.250  13 tokens/s  1:00:00 left"
        );
    }
}
