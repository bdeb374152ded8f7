//! The update of a published model: `--model DIR|config.json`.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use burn_estimate::{DeviceMemory, Plan, Planned};
use examples::llm::{LlmConfig, LlmError};
use examples::training::plan::Setting;

use super::{write_end, write_plan};

/// What [`Fit::run_published`](super::Fit::run_published) finds.
#[derive(Clone, Debug)]
pub struct Published {
    /// The model.
    pub config: LlmConfig,
    /// Its trained numbers.
    pub trained: usize,
    /// The setting of the options.
    pub asked: Planned<Setting>,
    /// All settings of the same update.
    pub plan: Plan<Setting>,
    /// Tokens of a sequence.
    pub context: usize,
    /// The device's memory.
    pub memory: DeviceMemory,
    /// Whether this build cannot estimate the Fusion that the device has.
    pub lacks_fusion: bool,
    /// The time that it took.
    pub took: Duration,
}

/// Reads the configuration of a directory, or a file of it.
///
/// # Errors
///
/// It cannot be read, or is of another family.
pub fn read_config(path: &Path) -> Result<LlmConfig, LlmError> {
    if path.is_dir() {
        LlmConfig::read(path)
    } else {
        LlmConfig::read_file(path)
    }
}

impl fmt::Display for Published {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LlmConfig {
            layers,
            width,
            heads,
            ..
        } = self.config;
        writeln!(
            f,
            "{} parameters, {} trained: {layers} blocks of width {width} with {heads} heads, {} tokens a sequence\n",
            self.config.parameters(),
            self.trained,
            self.context
        )?;
        write_plan(f, &self.asked, &self.plan, self.memory.bytes)?;
        write_end(f, self.lacks_fusion, self.took)
    }
}
