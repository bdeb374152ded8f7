//! A contender on its own thread.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use burn_amp::AmpError;
use burn_checkpoint::apart;
use burn_ranks::thread::model_thread;

use super::trainer::{Contender, Look};

/// Something to do with the contender.
type Task = Box<dyn FnOnce(&mut dyn Contender) + Send>;

/// A contender on its own thread, which runs every task there: state of a thread, such as a policy or
/// a budget apart from the process's, then belongs to this contender alone. A panic of a task is
/// passed on to the caller.
pub struct OwnThread {
    /// `None` tells the thread to end.
    tasks: Option<Sender<Task>>,
    thread: Option<JoinHandle<()>>,
}

impl OwnThread {
    /// Starts the thread, and makes the contender there.
    ///
    /// # Errors
    ///
    /// The errors of `make`.
    ///
    /// # Panics
    ///
    /// If `make` does.
    pub fn start(
        make: impl FnOnce() -> Result<Box<dyn Contender>, AmpError> + Send + 'static,
    ) -> Result<Self, AmpError> {
        let (tasks, asked) = channel::<Task>();
        let (made, is_made) = channel();
        let thread = model_thread("bench").spawn(move || {
            let _apart = apart();
            let mut contender = match catch_unwind(AssertUnwindSafe(make)) {
                Ok(Ok(contender)) => {
                    let _ = made.send(Ok(Ok(())));
                    contender
                }
                Ok(Err(error)) => return drop(made.send(Ok(Err(error)))),
                Err(panic) => return drop(made.send(Err(panic))),
            };
            for task in asked {
                task(&mut *contender);
            }
        });
        let thread = thread.expect("the system starts a thread");
        let this = Self {
            tasks: Some(tasks),
            thread: Some(thread),
        };
        match is_made.recv().expect("the thread tells how it went") {
            Ok(result) => result.map(|()| this),
            Err(panic) => resume_unwind(panic),
        }
    }

    fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut dyn Contender) -> T + Send + 'static,
    ) -> T {
        let (answer, answered) = channel();
        let task: Task = Box::new(move |contender| {
            let result = catch_unwind(AssertUnwindSafe(|| question(contender)));
            let _ = answer.send(result);
        });
        let tasks = self.tasks.as_ref().expect("there until dropped");
        tasks.send(task).expect("the thread waits for tasks");
        match answered.recv().expect("every task is answered") {
            Ok(answer) => answer,
            Err(panic) => resume_unwind(panic),
        }
    }
}

impl Drop for OwnThread {
    fn drop(&mut self) {
        self.tasks = None;
        if let Some(thread) = self.thread.take() {
            // Its memory is freed before the next contender starts.
            let _ = thread.join();
        }
    }
}

impl Contender for OwnThread {
    fn enter(&self) {
        self.ask(|contender| contender.enter());
    }

    fn step(&mut self) -> Result<f64, AmpError> {
        self.ask(|contender| contender.step())
    }

    fn look(&mut self) -> Result<Look, AmpError> {
        self.ask(|contender| contender.look())
    }

    fn skipped_steps(&self) -> u64 {
        self.ask(|contender| contender.skipped_steps())
    }

    fn parameters(&self) -> usize {
        self.ask(|contender| contender.parameters())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::turn;
    use std::cell::Cell;

    thread_local! {
        static STEPS: Cell<usize> = const { Cell::new(0) };
    }

    /// Counts on its thread, and stumbles at the third step.
    struct Counts;

    impl Contender for Counts {
        fn enter(&self) {}

        fn step(&mut self) -> Result<f64, AmpError> {
            STEPS.set(STEPS.get() + 1);
            assert_ne!(STEPS.get(), 3, "the third");
            Ok(STEPS.get() as f64)
        }

        fn look(&mut self) -> Result<Look, AmpError> {
            Ok(Look::default())
        }

        fn skipped_steps(&self) -> u64 {
            0
        }

        fn parameters(&self) -> usize {
            STEPS.get()
        }
    }

    #[test]
    fn what_is_a_threads_is_the_contenders() {
        let mut two = [0, 1].map(|_| OwnThread::start(|| Ok(Box::new(Counts))).unwrap());
        assert_eq!(two[0].step().unwrap(), 1.0);
        assert_eq!(two[1].step().unwrap(), 1.0);
        assert_eq!(two[0].step().unwrap(), 2.0);
        assert_eq!(STEPS.get(), 0);
    }

    #[test]
    fn a_panic_arrives_and_is_not_the_end() {
        let _turn = turn();
        let mut apart = OwnThread::start(|| Ok(Box::new(Counts))).unwrap();
        let panics = (0..3).map(|_| catch_unwind(AssertUnwindSafe(|| drop(apart.step()))).is_err());
        assert_eq!(panics.collect::<Vec<_>>(), [false, false, true]);
        assert_eq!(apart.parameters(), 3);
        let panic = catch_unwind(|| OwnThread::start(|| panic!("at the start")).map(drop));
        assert!(panic.is_err());
    }
}
