//! PyTorch's training as a contender: a process of torch_gpt.py that takes a step when it is told
//! to.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use burn::module::{Module, ModuleVisitor, Param};
use burn::prelude::*;
use burn_amp::AmpError;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::memory::Watched;
use super::setting::{Setting, Stack};
use super::trainer::{Contender, Look, Task, tokens};
use examples::training::recompute::Checkpoint;

/// PyTorch's name of a setting; `None` where it has none of the kind.
pub fn name(setting: Setting) -> Option<String> {
    let precision = match setting.stack {
        Stack::Bare | Stack::Off => "f32",
        Stack::Bf16 => "bf16",
        Stack::F16 => "f16",
        Stack::Balanced => return None,
    };
    match setting.checkpoint {
        Checkpoint::None => Some(precision.to_owned()),
        Checkpoint::Units | Checkpoint::BudgetMib(_) | Checkpoint::BudgetPercent(_) => None,
        checkpoint => Some(format!("{precision}+{checkpoint}")),
    }
}

/// A process of torch_gpt.py with the training of one setting.
pub struct Torch {
    process: Child,
    questions: ChildStdin,
    answers: BufReader<ChildStdout>,
    parameters: usize,
}

#[derive(Deserialize)]
struct Ready {
    parameters: usize,
}

#[derive(Deserialize)]
struct Step {
    loss: f64,
}

#[derive(Deserialize)]
struct Memory {
    step_bytes: u64,
}

impl Torch {
    /// Starts `script` with the `python3` of the path, with the weights and the tokens of the task.
    ///
    /// # Panics
    ///
    /// If it does not start.
    pub fn start<B: Backend>(script: &Path, setting: &str, task: &Task<B>) -> Self {
        let start = env::temp_dir().join(format!("bench-{}-{setting}.bin", std::process::id()));
        fs::write(&start, weights_and_tokens(task))
            .expect("the temporary directory can be written");
        let workload = &task.workload;
        let mut process = Command::new("python3")
            .arg(script)
            .args(["--settings", setting, "--serve"])
            .arg(&start)
            .args(["--layers", &workload.layers.to_string()])
            .args(["--heads", &workload.heads.to_string()])
            .args(["--width", &workload.width.to_string()])
            .args(["--context", &workload.context.to_string()])
            .args(["--batch", &workload.batch.to_string()])
            .args(["--vocabulary", &workload.vocabulary.to_string()])
            .args(["--dropout", &workload.dropout.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 can be started");
        let questions = process.stdin.take().expect("piped");
        let answers = BufReader::new(process.stdout.take().expect("piped"));
        let mut this = Self {
            process,
            questions,
            answers,
            parameters: 0,
        };
        this.parameters = this.answer::<Ready>().parameters;
        fs::remove_file(&start).expect("it was written");
        this
    }

    fn ask<T: DeserializeOwned>(&mut self, question: &str) -> T {
        writeln!(self.questions, "{question}").expect("torch_gpt.py listens");
        self.answer()
    }

    fn answer<T: DeserializeOwned>(&mut self) -> T {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("UTF-8");
        assert!(!line.is_empty(), "torch_gpt.py ended, see above");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line}: {error}"))
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Contender for Torch {
    fn enter(&self) {}

    fn step(&mut self) -> Result<f64, AmpError> {
        Ok(self.ask::<Step>("step").loss)
    }

    fn look(&mut self) -> Result<Look, AmpError> {
        let watched = Watched {
            most: None,
            added_bytes: Some(self.ask::<Memory>("memory").step_bytes),
        };
        Ok(Look {
            watched,
            ..Look::default()
        })
    }

    fn skipped_steps(&self) -> u64 {
        0
    }

    fn parameters(&self) -> usize {
        self.parameters
    }
}

/// The parameters in the order of the module as f32, then the batch's tokens as i32.
fn weights_and_tokens<B: Backend>(task: &Task<B>) -> Vec<u8> {
    struct Collect(Vec<u8>);
    impl<B: Backend> ModuleVisitor<B> for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let data = param.val().into_data().convert::<f32>();
            self.0.extend_from_slice(&data.bytes);
        }
    }
    B::seed(&task.device, task.seed);
    let model = task.workload.model().init::<B>(&task.device);
    let mut bytes = Collect(Vec::new());
    model.visit(&mut bytes);
    let tokens = tokens(&task.workload, task.seed);
    bytes
        .0
        .extend(tokens.into_iter().flat_map(i32::to_le_bytes));
    bytes.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pytorch_has_a_name_for_what_it_can_do() {
        for (ours, theirs) in [
            ("bare", Some("f32")),
            ("off", Some("f32")),
            ("block", Some("f32+block")),
            ("bf16+keep-compute", Some("bf16+keep-compute")),
            ("f16", Some("f16")),
            ("balanced", None),
            ("bf16+budget=40%", None),
        ] {
            assert_eq!(name(ours.parse().unwrap()).as_deref(), theirs, "{ours}");
        }
    }
}
