//! One run: a stack of decorators, and what is installed around the steps.

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn::backend::Autodiff;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{Autocast, F16, GradScaler, GradScalerConfig, Off};
use burn_checkpoint::{MemoryBudget, Remat, RematStats};
use burn_estimate::{Meta, MetaDevice, estimate_run};
use burn_flex::Flex;
use burn_zero::{GroupOptions, ProcessGroup, Sharded, Stage, ThreadGroup, ZeroSettings};

use crate::{Dropout, Ended, NotTrained, Project, Steps, Training};

/// Ranks of the runs with several.
const RANKS: usize = 2;
/// Small enough that a small model has several buckets.
const BUCKET_ELEMENTS: usize = 1 << 16;
/// So small that no step of these models overflows: a skipped step has no loss to compare.
const INIT_SCALE: f32 = 1024.0;

/// What lines of a run without a report begin with.
pub(crate) const IMPOSSIBLE: &str = "impossible ";
pub(crate) const FAILED: &str = "failed ";

/// One training of a project's model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// Without these crates.
    Plain,
    /// Without these crates and without dropout: what ranks are compared with.
    WithoutDropout,
    Budget,
    /// With scopes of the model's blocks.
    Units,
    /// With scopes that are written into a copy of the project.
    ByHand,
    Bf16,
    F16,
    Stage2,
    Stage3,
    /// On a backend without data.
    Estimate,
}

impl Run {
    pub const ALL: [Self; 10] = [
        Self::Plain,
        Self::WithoutDropout,
        Self::Budget,
        Self::Units,
        Self::ByHand,
        Self::Bf16,
        Self::F16,
        Self::Stage2,
        Self::Stage3,
        Self::Estimate,
    ];
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain",
            Self::WithoutDropout => "without-dropout",
            Self::Budget => "budget",
            Self::Units => "units",
            Self::ByHand => "by-hand",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Stage2 => "stage-2",
            Self::Stage3 => "stage-3",
            Self::Estimate => "estimate",
        })
    }
}

/// What a run reports.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    pub parameters: usize,
    pub losses: Vec<f32>,
    /// The median step after the first one.
    pub step: Duration,
    /// The heap's peak in all steps and in the last one, beyond what was there before the model.
    pub peak_bytes: u64,
    pub last_peak_bytes: u64,
    /// Of the parameters' bits.
    pub checksum: u32,
    /// Operations that ran again.
    pub replayed: u64,
}

impl Report {
    fn new(parameters: usize, steps: &Steps, checksum: u32) -> Self {
        let mut times: Vec<_> = steps.times.iter().skip(1).copied().collect();
        times.sort();
        let peaks = &steps.peak_bytes;
        eprintln!("losses {:?}, peaks {peaks:?}", steps.losses);
        Self {
            parameters,
            losses: steps.losses.clone(),
            step: times.get(times.len() / 2).copied().unwrap_or_default(),
            peak_bytes: peaks.iter().max().map_or(0, |&bytes| bytes as u64),
            last_peak_bytes: peaks.last().map_or(0, |&bytes| bytes as u64),
            checksum,
            replayed: 0,
        }
    }
}

/// As text, for the process that started this one.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            parameters,
            step,
            peak_bytes,
            last_peak_bytes,
            checksum,
            replayed,
            ..
        } = self;
        let micros = step.as_micros();
        write!(
            f,
            "report {parameters} {micros} {peak_bytes} {last_peak_bytes} {checksum} {replayed}"
        )?;
        self.losses
            .iter()
            .try_for_each(|loss| write!(f, " {}", loss.to_bits()))
    }
}

impl FromStr for Report {
    type Err = std::num::ParseIntError;

    fn from_str(line: &str) -> Result<Self, Self::Err> {
        let numbers: Vec<u64> = line
            .split_whitespace()
            .skip(1)
            .map(str::parse)
            .collect::<Result<_, _>>()?;
        let number = |index: usize| numbers.get(index).copied().unwrap_or_default();
        let bits = numbers.iter().skip(6);
        Ok(Self {
            parameters: number(0) as usize,
            step: Duration::from_micros(number(1)),
            peak_bytes: number(2),
            last_peak_bytes: number(3),
            checksum: number(4) as u32,
            replayed: number(5),
            losses: bits.map(|&bits| f32::from_bits(bits as u32)).collect(),
        })
    }
}

/// Does the run of this name and prints its report, or why it is refused.
pub fn start<P: Project>(name: &str) {
    let run = Run::ALL
        .into_iter()
        .find(|run| run.to_string() == name)
        .unwrap_or_else(|| panic!("no run is called {name}"));
    warm_up();
    let report = match run {
        Run::Plain => alone::<P, Autodiff<Flex>>(Dropout::OfTheProject),
        Run::WithoutDropout => alone::<P, Autodiff<Flex>>(Dropout::Off),
        Run::Budget => within_budget::<P>(),
        Run::Units => with_units::<P>(),
        Run::ByHand => by_hand::<P>(),
        Run::Bf16 => alone::<P, Autocast<Autodiff<Flex>>>(Dropout::OfTheProject),
        Run::F16 => scaled::<P>(),
        Run::Stage2 => on_ranks::<P>(Stage::Gradients),
        Run::Stage3 => on_ranks::<P>(Stage::Parameters),
        Run::Estimate => estimated::<P>(),
    };
    match report {
        Ok(report) => println!("{report}"),
        Err(NotTrained::ByProject(reason)) => println!("{IMPOSSIBLE}{reason}"),
        Err(NotTrained::ByCrates(error)) => println!("{FAILED}{error}"),
    }
}

/// Threads and the workspace of kernels are there before the heap is measured.
fn warm_up() {
    let device = Default::default();
    let ones = Tensor::<Flex, 2>::ones([512, 512], &device);
    let _ = ones.clone().matmul(ones).into_data();
}

/// The same weights in each run. The backend's generator is one of the process, so two ranks do not
/// draw at the same time.
fn initial<P: Project, B: AutodiffBackend>(
    device: B::Device,
    dropout: Dropout,
) -> impl Training<B> {
    static DRAWING: Mutex<()> = Mutex::new(());
    let _drawing = DRAWING.lock();
    B::seed(&device, 7);
    P::training::<B>(device, dropout)
}

fn train<P: Project, B: AutodiffBackend, T: Training<B>>(
    begin: impl FnOnce() -> T,
    by: impl FnOnce(T, &mut Steps) -> Ended,
) -> Result<Report, NotTrained> {
    let mut steps = Steps::new(0..P::ROWS);
    let training = begin();
    let parameters = training.parameters();
    let checksum = by(training, &mut steps)?;
    Ok(Report::new(parameters, &steps, checksum))
}

fn alone<P: Project, B: AutodiffBackend>(dropout: Dropout) -> Result<Report, NotTrained> {
    let device = B::Device::default();
    train::<P, B, _>(
        || initial::<P, B>(device, dropout),
        |training, steps| training.with_adamw(steps),
    )
}

fn within_budget<P: Project>() -> Result<Report, NotTrained> {
    let budget = MemoryBudget::fraction(P::BUDGET).expect("a fraction");
    let _budget = budget.install();
    counted(alone::<P, Autodiff<Remat<Flex>>>(Dropout::OfTheProject))
}

/// `Autocast` tells the backward passes, and with the policy `Off` it changes no bit.
type Scoped = Autocast<Autodiff<Remat<Flex>>, Off>;

fn with_units<P: Project>() -> Result<Report, NotTrained> {
    let report = train::<P, Scoped, _>(
        || initial::<P, Scoped>(Default::default(), Dropout::OfTheProject),
        |training, steps| training.with_units(steps),
    );
    counted(report)
}

fn by_hand<P: Project>() -> Result<Report, NotTrained> {
    counted(alone::<P, Scoped>(Dropout::OfTheProject))
}

/// The report with what this thread has run again.
fn counted(report: Result<Report, NotTrained>) -> Result<Report, NotTrained> {
    let replayed = RematStats::of_thread().replayed_operations;
    report.map(|report| Report { replayed, ..report })
}

fn scaled<P: Project>() -> Result<Report, NotTrained> {
    type B = Autocast<Autodiff<Flex>, F16>;
    let device = Default::default();
    let config = GradScalerConfig {
        init_scale: INIT_SCALE,
        ..GradScalerConfig::default()
    };
    let scaler = GradScaler::new(config).expect("a valid configuration");
    let report = train::<P, B, _>(
        || initial::<P, B>(device, Dropout::OfTheProject),
        |training, steps| training.with_scaler(&scaler, steps),
    )?;
    match scaler.skipped_steps() {
        0 => Ok(report),
        skipped => Err(NotTrained::ByCrates(format!(
            "{skipped} steps were skipped"
        ))),
    }
}

fn on_ranks<P: Project>(stage: Stage) -> Result<Report, NotTrained> {
    type B = Sharded<Autodiff<Remat<Flex>>>;
    let rows = P::ROWS / RANKS;
    let reports = ThreadGroup::spawn(RANKS, GroupOptions::default(), |group| {
        let mut steps = Steps::new(group.rank() * rows..(group.rank() + 1) * rows);
        let training = initial::<P, B>(Default::default(), Dropout::Off);
        let parameters = training.parameters();
        let settings = ZeroSettings {
            bucket_elements: BUCKET_ELEMENTS,
            ..ZeroSettings::stage(stage)
        };
        let checksum = training.as_rank(Arc::new(group), settings, &mut steps)?;
        Ok::<_, NotTrained>(Report::new(parameters, &steps, checksum))
    });
    let reports = reports?.into_iter().collect::<Result<Vec<_>, _>>()?;
    assert!(
        reports
            .windows(2)
            .all(|pair| pair[0].checksum == pair[1].checksum),
        "ranks end with other weights"
    );
    let mean = |step: usize| {
        let losses = reports.iter().map(|report| report.losses[step]);
        losses.sum::<f32>() / RANKS as f32
    };
    let losses = (0..reports[0].losses.len()).map(mean).collect();
    Ok(Report {
        losses,
        ..reports[0].clone()
    })
}

/// The peak of the plain run, without its data.
fn estimated<P: Project>() -> Result<Report, NotTrained> {
    type B = Autodiff<Meta>;
    let device = MetaDevice::default();
    let (estimate, report) = estimate_run(device, || alone::<P, B>(Dropout::OfTheProject));
    Ok(Report {
        peak_bytes: estimate.peak_bytes,
        ..report?
    })
}
