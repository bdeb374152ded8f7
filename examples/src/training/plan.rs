//! Which settings of an update fit into some memory, and which of them is the fastest.

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZero;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, available_parallelism};
use std::time::Duration;

use burn_accum::{AccumConfig, Normalization};
use burn_estimate::{
    DeviceMemory, DeviceProfile, Estimate, LinkedMemory, MetaDevice, Plan, Planned, Shares, plan,
};
use burn_ranks::thread::model_thread;
use burn_zero::{Memory, Stage, ZeroConfig, ZeroSettings};

use super::error::TrainingError;
use super::options::MemoryOptions;
use super::precision::Amp;
use super::recompute::Checkpoint;
use super::without_data::Stack;

/// What changes the memory and the time of an update, and (in f32) not what it computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    /// Sequences in memory at once.
    pub batch: usize,
    /// Micro-batches of a rank in an update.
    pub accum: usize,
    /// Precision.
    pub amp: Amp,
    /// What becomes of activations until backward.
    pub checkpoint: Checkpoint,
    /// Ranks.
    pub ranks: usize,
    /// What is sharded over them.
    pub stage: Stage,
    /// Whether the optimizer's state is in host memory.
    pub offload: bool,
    /// Whether the parameters are in host memory.
    pub offload_param: bool,
    /// Whether a rank's shards of the parameters are on the device, at [`Stage::Parameters`] of
    /// several ranks; otherwise they are in host memory.
    pub shards_on_device: bool,
}

impl Setting {
    /// That of some options.
    pub fn new(batch: usize, accum: usize, memory: &MemoryOptions) -> Self {
        Self {
            batch,
            accum,
            amp: memory.amp(),
            checkpoint: memory.checkpoint,
            ranks: memory.ranks.unwrap_or(1),
            stage: memory.zero(),
            offload: memory.offload,
            offload_param: memory.offload_param,
            shards_on_device: memory.shards_on_device,
        }
    }

    /// Sets the options to it.
    pub fn set(&self, memory: &mut MemoryOptions) {
        memory.amp = Some(self.amp);
        memory.checkpoint = self.checkpoint;
        memory.zero = Some(self.stage);
        memory.offload = self.offload;
        memory.offload_param = self.offload_param;
        memory.shards_on_device = self.shards_on_device;
    }

    /// Whether something of the device is in host memory.
    pub fn uses_host(&self) -> bool {
        let is_alone = self.ranks == 1;
        let has_parameters = self.parameters_come_and_go() && (is_alone || !self.shards_on_device);
        self.offload || has_parameters || self.checkpoint == Checkpoint::Offload
    }

    /// Whether parameters are on the device only while they are used.
    fn parameters_come_and_go(&self) -> bool {
        self.offload_param || (self.ranks > 1 && self.stage == Stage::Parameters)
    }

    /// Whether it is the other one but for a micro-batch that is no larger, so that it takes no more
    /// memory.
    fn takes_no_more_than(&self, other: &Self) -> bool {
        let but = |setting: &Self| Self {
            batch: 0,
            accum: 0,
            ..*setting
        };
        // Without accumulation there are no sums of gradients.
        let has_sums = other.accum > 1 || self.accum == 1;
        but(self) == but(other) && self.batch <= other.batch && has_sums
    }

    /// The settings of the same update in each of these precisions: micro-batches that are powers
    /// of two, the one that is asked for, and the whole. Those that keep most activations come
    /// first, each with the smallest micro-batch first. A policy for activations, a stage and places
    /// on the host stay if they are asked for.
    pub fn others(&self, precisions: &[Amp]) -> Vec<Self> {
        let effective = self.batch * self.accum;
        let micro = (0..usize::BITS).map(|power| 1 << power);
        let micro: BTreeSet<usize> = micro
            .take_while(|batch| *batch <= effective)
            .chain([self.batch, effective])
            .filter(|batch| effective.is_multiple_of(*batch))
            .collect();
        let checkpoints = match self.checkpoint {
            Checkpoint::None => vec![
                Checkpoint::None,
                Checkpoint::KeepCompute,
                Checkpoint::Block,
                Checkpoint::Offload,
            ],
            asked => vec![asked],
        };
        let mut settings = Vec::new();
        for &amp in precisions {
            for &checkpoint in &checkpoints {
                for &batch in &micro {
                    settings.extend(self.shared_out().into_iter().map(|shared| Self {
                        batch,
                        accum: effective / batch,
                        amp,
                        checkpoint,
                        ..shared
                    }));
                }
            }
        }
        settings
    }

    /// The setting with state, gradients and parameters in each place that is not ruled out by what
    /// is asked for. On several ranks parameters are in host memory at stage 3, and at no other one:
    /// ranks that do not share them hold them whole, and a run of it would compute in this machine's
    /// memory.
    fn shared_out(&self) -> Vec<Self> {
        let stages = Stage::ALL.into_iter().filter(|stage| {
            let is_more = stage.number() >= self.stage.number();
            let is_possible = if self.ranks > 1 {
                !self.offload_param || *stage == Stage::Parameters
            } else {
                *stage == self.stage
            };
            is_more && is_possible
        });
        let offload_params: &[bool] = match (self.offload_param, self.ranks) {
            (true, _) => &[true],
            (false, 1) => &[false, true],
            (false, _) => &[false],
        };
        let offloads: &[bool] = if self.offload {
            &[true]
        } else {
            &[false, true]
        };
        let mut settings = Vec::new();
        for stage in stages {
            for &offload_param in offload_params {
                settings.extend(offloads.iter().map(|&offload| Self {
                    stage,
                    offload,
                    offload_param,
                    shards_on_device: self.shards_on_device && !offload_param,
                    ..*self
                }));
            }
        }
        settings
    }

    /// The stack of such an update.
    pub fn stack(&self, normalization: Normalization, max_norm: Option<f64>) -> Stack {
        let place = |is_on_host| {
            if is_on_host {
                Memory::Host
            } else {
                Memory::Device
            }
        };
        Stack {
            amp: self.amp,
            checkpoint: self.checkpoint,
            zero: ZeroConfig {
                stage: self.stage,
                gradient_clipping: max_norm,
                offload_optimizer: place(self.offload),
                offload_param: place(self.offload_param),
                shards: place(!self.shards_on_device),
                ..ZeroConfig::default()
            },
            ranks: self.ranks,
            window: AccumConfig {
                steps: self.accum,
                normalization,
            },
        }
    }

    /// The setting that is run for the estimate of this one, with at most two micro-batches, because
    /// larger windows hold what those of two hold.
    #[must_use]
    pub fn run(&self) -> Self {
        match self.shares() {
            Some(_) => self.alone(),
            None => Self {
                accum: self.accum.min(2),
                ..*self
            },
        }
    }

    /// The setting from whose run the estimate of this one is derived: with all of it on the device
    /// of one rank, and at most two micro-batches. Parameters of one rank stay in host memory where that changes what is run: how often
    /// casts of them, and activations in host memory, come to the device.
    #[must_use]
    pub fn alone(&self) -> Self {
        Self {
            accum: self.accum.min(2),
            ranks: 1,
            stage: Stage::DataParallel,
            offload: false,
            offload_param: self.runs_with_parameters_on_host(),
            shards_on_device: false,
            ..*self
        }
    }

    fn runs_with_parameters_on_host(&self) -> bool {
        let changes = self.amp != Amp::Off || self.checkpoint == Checkpoint::Offload;
        self.offload_param && self.ranks == 1 && changes
    }

    /// Where the estimate of [`alone`](Self::alone) moves state, gradients and parameters for this
    /// setting. `None` where the setting is run itself: in a low precision with all of it on the
    /// host, when casts come and go with each gradient; and with parameters in the host memory of
    /// ranks that do not share them.
    pub fn shares(&self) -> Option<Shares> {
        let is_known = match (self.offload_param, self.ranks) {
            (false, _) => true,
            (true, 1) => self.amp == Amp::Off || !self.offload,
            (true, _) => self.stage == Stage::Parameters,
        };
        is_known.then(|| Shares {
            ranks: self.ranks as u64,
            optimizer_state: self.stage.shards_optimizer_state(),
            gradients: self.stage.shards_gradients(),
            parameters: self.parameters_come_and_go() && !self.runs_with_parameters_on_host(),
            shards_on_device: self.shards_on_device,
            offload: self.offload,
            bucket_bytes: 4 * ZeroSettings::default().bucket_elements as u64,
        })
    }
}

/// As on the command line.
impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            batch,
            accum,
            amp,
            checkpoint,
            ..
        } = self;
        write!(
            f,
            "--batch {batch} --accum {accum} --amp {amp} --checkpoint {checkpoint}"
        )?;
        if self.ranks > 1 {
            write!(f, " --ranks {} --zero {}", self.ranks, self.stage.number())?;
        }
        if self.offload {
            f.write_str(" --offload")?;
        }
        if self.offload_param {
            f.write_str(" --offload-param")?;
        }
        if self.shards_on_device {
            f.write_str(" --shards-on-device")?;
        }
        Ok(())
    }
}

/// Runs an update of a setting on a device without data.
type Update<'a> =
    dyn Fn(&Setting, MetaDevice) -> Result<Estimate, TrainingError> + Send + Sync + 'a;

/// Estimates of one model's updates on one device. Settings that differ in what is shared out only,
/// or in the number of micro-batches beyond two, are one run of the step.
pub struct Planner<'a> {
    runs: Runs<'a>,
    memory: DeviceMemory,
}

impl<'a> Planner<'a> {
    /// `update` runs a setting's whole stack on a device without data: on `device`, and while a plan
    /// is made on those with the numbers behind it too, on a thread for each core.
    pub fn new(
        profile: DeviceProfile,
        memory: DeviceMemory,
        device: MetaDevice,
        update: impl Fn(&Setting, MetaDevice) -> Result<Estimate, TrainingError> + Send + Sync + 'a,
    ) -> Self {
        Self {
            runs: Runs {
                update: Arc::new(update),
                device,
                profile,
                last: None,
            },
            memory,
        }
    }

    /// The device's memory.
    pub fn memory(&self) -> DeviceMemory {
        self.memory
    }

    /// What an update takes: its peak and its time.
    ///
    /// # Errors
    ///
    /// What the training would refuse too.
    pub fn planned(&mut self, setting: Setting) -> Result<Planned<Setting>, TrainingError> {
        let (estimate, time) = self.runs.estimate(setting)?;
        Ok(Planned {
            setting,
            needed_bytes: self.memory.needed(&estimate),
            estimate,
            time,
        })
    }

    /// The settings of the same update in each of these precisions, by whether they fit. Nothing
    /// more is moved to the host where that is the device's memory.
    ///
    /// # Errors
    ///
    /// What the training would refuse too.
    pub fn plan(
        &mut self,
        asked: Setting,
        precisions: &[Amp],
    ) -> Result<Plan<Setting>, TrainingError> {
        let mut settings = asked.others(precisions);
        if self.runs.profile.link.memory == LinkedMemory::Shared {
            settings.retain(|setting| !setting.uses_host() || asked.uses_host());
        }
        let groups = by_run(settings);
        let threads = available_parallelism()
            .map_or(1, NonZero::get)
            .min(groups.len());
        let next = AtomicUsize::new(0);
        let work = &|thread: usize| {
            let mut runs = self.runs.on_thread(thread);
            let mut plans = Vec::new();
            loop {
                let group = next.fetch_add(1, Ordering::Relaxed);
                let Some(settings) = groups.get(group) else {
                    return plans;
                };
                plans.push((group, runs.plan(settings, self.memory)));
            }
        };
        let mut plans = thread::scope(|scope| {
            // What threads do not start, this one does.
            let others = (1..threads).filter_map(|thread| {
                let other = model_thread(format!("plan {thread}"));
                other.spawn_scoped(scope, move || work(thread)).ok()
            });
            let others: Vec<_> = others.collect();
            let mut plans = work(0);
            for other in others {
                plans.extend(other.join().unwrap_or_else(|panic| resume_unwind(panic)));
            }
            plans
        });
        plans.sort_by_key(|(group, _)| *group);
        let mut all = Plan {
            fitting: Vec::new(),
            too_large: Vec::new(),
        };
        for (_, plan) in plans {
            let Plan { fitting, too_large } = plan?;
            for planned in fitting.into_iter().chain(too_large) {
                all.add(planned, self.memory);
            }
        }
        Ok(all)
    }
}

/// Settings in groups of those that are runs of one stack, but for the size of micro-batches: no
/// group needs what another one has found. In each they keep their order.
fn by_run(settings: Vec<Setting>) -> Vec<Vec<Setting>> {
    let stack = |setting: &Setting| Setting {
        batch: 0,
        accum: 0,
        ..setting.run()
    };
    let mut groups: Vec<Vec<Setting>> = Vec::new();
    for setting in settings {
        let is_same = |group: &&mut Vec<Setting>| stack(&group[0]) == stack(&setting);
        match groups.iter_mut().find(is_same) {
            Some(group) => group.push(setting),
            None => groups.push(vec![setting]),
        }
    }
    groups
}

/// Runs of updates on one device, of which the last one is kept.
#[derive(Clone)]
struct Runs<'a> {
    update: Arc<Update<'a>>,
    device: MetaDevice,
    profile: DeviceProfile,
    last: Option<(Setting, Estimate)>,
}

impl Runs<'_> {
    /// On a device that no other thread has.
    fn on_thread(&self, thread: usize) -> Self {
        let mut runs = self.clone();
        runs.device.index += thread as u16;
        runs
    }

    /// These settings by whether they fit. One that is no smaller than one that does not fit is
    /// left out.
    fn plan(
        &mut self,
        settings: &[Setting],
        memory: DeviceMemory,
    ) -> Result<Plan<Setting>, TrainingError> {
        let mut failed = None;
        let plan = plan(settings.iter().copied(), memory, |setting, too_large| {
            let mut smaller = too_large.iter();
            if failed.is_some()
                || smaller.any(|planned| planned.setting.takes_no_more_than(setting))
            {
                return None;
            }
            match self.estimate(*setting) {
                Ok(found) => Some(found),
                Err(error) => {
                    failed = Some(error);
                    None
                }
            }
        });
        failed.map_or(Ok(plan), Err)
    }

    fn estimate(&mut self, setting: Setting) -> Result<(Estimate, Duration), TrainingError> {
        let run = setting.run();
        let estimate = match setting.shares() {
            Some(shares) => self.kept(run)?.shared(shares),
            None => (self.update)(&run, self.device)?,
        };
        let more = setting.accum - run.accum;
        let time = estimate.time_with_more(&self.profile, more as u32);
        Ok((estimate, time))
    }

    fn kept(&mut self, run: Setting) -> Result<&Estimate, TrainingError> {
        let last = self.last.take().filter(|(last, _)| *last == run);
        let last = match last {
            Some(last) => last,
            None => (run, (self.update)(&run, self.device)?),
        };
        Ok(&self.last.insert(last).1)
    }
}
