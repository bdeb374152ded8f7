//! A scope around a backend without `Remat` says so, once. A process of its own, for the logger is the process's.

use std::sync::Mutex;

use burn::backend::Autodiff;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_checkpoint::{MemoryBudget, Policy, Remat, checkpoint, checkpoint_with};
use burn_flex::Flex;
use log::{Level, LevelFilter, Log, Metadata, Record};

struct Lines(Mutex<Vec<(Level, String)>>);

static LINES: Lines = Lines(Mutex::new(Vec::new()));

impl Log for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("burn_checkpoint")
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let line = (record.level(), record.args().to_string());
            self.0.lock().expect("no panic").push(line);
        }
    }

    fn flush(&self) {}
}

fn lines() -> Vec<(Level, String)> {
    std::mem::take(&mut *LINES.0.lock().expect("no panic"))
}

fn scope<B: Backend>(policy: Policy) {
    let x = Tensor::<B, 2>::ones([4, 4], &Default::default());
    let _ = checkpoint_with(policy, || x.clone().exp().sin());
}

#[test]
fn no_remat_in_the_stack_is_said_once() {
    log::set_logger(&LINES).expect("no other logger");
    log::set_max_level(LevelFilter::Trace);

    // Nothing to be said where there is one, or where no tensor is returned.
    scope::<Remat<Flex>>(Policy::Recompute);
    scope::<Autodiff<Remat<Flex>>>(Policy::Offload);
    checkpoint(|| checkpoint(|| scope::<Autodiff<Remat<Flex>>>(Policy::KeepCompute)));
    let budget = MemoryBudget::bytes(1 << 20).install();
    scope::<Autodiff<Remat<Flex>>>(Policy::Recompute);
    drop(budget);
    checkpoint(|| 1.0f32);
    assert_eq!(lines(), []);

    scope::<Autodiff<Flex>>(Policy::Recompute);
    let said = lines();
    let [(Level::Warn, line)] = said.as_slice() else {
        panic!("one warning, not {said:?}");
    };
    assert!(
        line.contains("Autodiff<Remat<B>>") && line.contains("no memory"),
        "{line}"
    );

    // Once for the process: not at every block of every step, and not on every thread.
    for policy in [Policy::Recompute, Policy::KeepCompute, Policy::Offload] {
        scope::<Autodiff<Flex>>(policy.clone());
        std::thread::spawn(|| scope::<Flex>(policy))
            .join()
            .expect("no panic");
    }
    assert_eq!(lines(), []);
}
