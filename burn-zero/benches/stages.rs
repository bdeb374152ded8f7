//! A training step by stage: its time beside stage 2, and the heap over it. Ranks are threads, or
//! processes:
//!
//! ```text
//! cargo bench --workspace --bench stages -- [--plot stages.svg]
//! cargo bench --workspace --features burn-zero/mpi --bench stages --no-run
//! mpirun --allow-run-as-root --oversubscribe -n 4 target/release/deps/stages-<hash>
//! ```
//!
//! All stages train in one run, a step of each in turn; a time is the median over rounds, a ratio
//! that of the ratios within a round. Each rank has the same batch size, so on a machine with fewer
//! cores than ranks a step takes longer with every rank. `--plot` draws the heap of four threads in
//! a step of stages 2 and 3.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::optim::AdamWConfig;
use burn::tensor::{Distribution, Tensor};
use burn_checkpoint::Remat;
use burn_flex::Flex;
use burn_update::Update;
use burn_zero::{
    GroupOptions, Memory, ProcessGroup, ReduceOverRanks, Sharded, SingleRank, Stage, ThreadGroup,
    ZeroSettings,
};
use peak_alloc::PeakAlloc;
use plotters::prelude::*;

type B = Sharded<Autodiff<Remat<Flex>>>;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const ROUNDS: usize = 9;
const STAGES: [Stage; 4] = [
    Stage::DataParallel,
    Stage::OptimizerState,
    Stage::Gradients,
    Stage::Parameters,
];

/// Eight blocks of width 256: 6.3 million parameters, 25 MB in f32.
fn model() -> TransformerEncoder<B> {
    let config = TransformerEncoderConfig::new(256, 1024, 4, 8).with_dropout(0.0);
    config.init(&Default::default())
}

/// One training on one rank.
struct Training {
    model: TransformerEncoder<B>,
    update: Update<TransformerEncoder<B>, B>,
    batch: Tensor<B, 3>,
}

impl Training {
    fn step(mut self) -> Self {
        let output = self
            .model
            .forward(TransformerEncoderInput::new(self.batch.clone()));
        let loss = output.square().mean();
        let gradients = self.update.backward(&self.model, loss);
        let updated = self.update.step(1e-4, self.model, gradients);
        self.model = updated.expect("no rank fails");
        self
    }
}

fn training(group: &Arc<dyn ProcessGroup>, settings: ZeroSettings) -> Training {
    let update = Update::new(AdamWConfig::new().init()).reduce(settings, group.clone());
    let mut update = update.expect("valid settings");
    let model = update.prepare(model()).expect("ranks agree");
    let batch = Tensor::random([4, 64, 256], Distribution::Default, &Default::default());
    Training {
        model,
        update,
        batch,
    }
}

/// Milliseconds of each setting by round.
fn times(group: &Arc<dyn ProcessGroup>, settings: &[ZeroSettings]) -> Vec<Vec<f64>> {
    let trainings = settings
        .iter()
        .map(|settings| training(group, settings.clone()));
    let mut trainings: Vec<_> = trainings.map(Some).collect();
    let mut times = vec![Vec::new(); settings.len()];
    for round in 0..=ROUNDS {
        for (training, times) in trainings.iter_mut().zip(&mut times) {
            group.barrier("a step begins").expect("no rank fails");
            let start = Instant::now();
            *training = training.take().map(Training::step);
            group.barrier("a step ends").expect("no rank fails");
            if round > 0 {
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    times
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints the times, each beside that of the setting at `basis`.
fn print(ranks: usize, names: &[&str], times: &[Vec<f64>], basis: usize) {
    for (name, own) in names.iter().zip(times) {
        let ratios = own
            .iter()
            .zip(&times[basis])
            .map(|(own, basis)| own / basis);
        let (ratio, time) = (median(ratios.collect()), median(own.clone()));
        println!(
            "{ranks} | {name:24} | {time:8.1} ms | {ratio:5.2} of {}",
            names[basis]
        );
    }
}

const NAMES: [&str; 4] = ["stage 0", "stage 1", "stage 2", "stage 3"];

fn compare_stages(group: &Arc<dyn ProcessGroup>) -> Vec<Vec<f64>> {
    times(group, &STAGES.map(ZeroSettings::stage))
}

fn threads() {
    let alone: Arc<dyn ProcessGroup> = Arc::new(SingleRank::new());
    let on_host = ZeroSettings {
        parameters: Memory::Host,
        ..ZeroSettings::stage(Stage::DataParallel)
    };
    let settings = [ZeroSettings::stage(Stage::DataParallel), on_host];
    print(
        1,
        &["stage 0", "parameters on the host"],
        &times(&alone, &settings),
        0,
    );
    for ranks in 1..=4 {
        let times = ThreadGroup::spawn(ranks, GroupOptions::default(), |group| {
            let group: Arc<dyn ProcessGroup> = Arc::new(group);
            compare_stages(&group)
        });
        print(ranks, &NAMES, &times.expect("no rank fails")[0], 2);
    }
}

#[cfg(feature = "mpi")]
fn processes() -> bool {
    if burn_ranks::local_rank().is_none() {
        return false;
    }
    let group: Arc<dyn ProcessGroup> = Arc::new(burn_zero::MpiGroup::init().expect("MPI starts"));
    let times = compare_stages(&group);
    if group.rank() == 0 {
        print(group.world_size(), &NAMES, &times, 2);
    }
    true
}

#[cfg(not(feature = "mpi"))]
fn processes() -> bool {
    false
}

/// The heap over one step of four ranks, by share of the step: MiB a rank.
fn heap(stage: Stage) -> Vec<(f64, f64)> {
    const RANKS: usize = 4;
    let (begun, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let before = HEAP.current_usage();
    let samples = thread::scope(|scope| {
        let sampler = scope.spawn(|| {
            while !begun.load(Ordering::Acquire) {
                thread::yield_now();
            }
            let (start, mut samples) = (Instant::now(), Vec::new());
            while !is_over.load(Ordering::Acquire) {
                let bytes = HEAP.current_usage().saturating_sub(before);
                samples.push((start.elapsed().as_secs_f64(), bytes as f64 / RANKS as f64));
                thread::sleep(Duration::from_micros(200));
            }
            samples
        });
        let trained = ThreadGroup::spawn(RANKS, GroupOptions::default(), |group| {
            let group: Arc<dyn ProcessGroup> = Arc::new(group);
            // State and buckets are made in the first step.
            let trained = training(&group, ZeroSettings::stage(stage)).step();
            group.barrier("a step begins").expect("no rank fails");
            begun.store(true, Ordering::Release);
            let trained = trained.step();
            group.barrier("a step ends").expect("no rank fails");
            is_over.store(true, Ordering::Release);
            drop(trained);
        });
        trained.expect("no rank fails");
        sampler.join().expect("it only samples")
    });
    let end = samples.last().map_or(1.0, |(time, _)| *time);
    let samples = samples.into_iter();
    samples
        .map(|(time, bytes)| (time / end, bytes / 1048576.0))
        .collect()
}

fn plot(file: &str) -> Result<(), Box<dyn std::error::Error>> {
    let curves = [
        ("stage 2", heap(Stage::Gradients), RGBColor(70, 110, 180)),
        ("stage 3", heap(Stage::Parameters), RGBColor(200, 90, 40)),
    ];
    let all = curves.iter().flat_map(|(_, curve, _)| curve);
    let most = all.map(|(_, mebibytes)| *mebibytes).fold(0.0, f64::max);
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (720, 380)).into_drawing_area();
        area.fill(&WHITE)?;
        let megabytes = 4.0 * model().num_params() as f64 / 1048576.0;
        let title =
            format!("The heap of a rank of 4 over a step, {megabytes:.0} MiB of parameters");
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(32)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..1.0, 0.0..1.1 * most)?;
        let mut mesh = chart.configure_mesh();
        let mesh = mesh.disable_x_mesh().light_line_style(TRANSPARENT);
        mesh.x_desc("share of the step").y_desc("MiB").draw()?;
        for (name, curve, color) in curves {
            let series = chart.draw_series(LineSeries::new(curve, color.stroke_width(2)))?;
            let mark = move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2));
            series.label(name).legend(mark);
        }
        let mut legend = chart.configure_series_labels();
        legend
            .border_style(TRANSPARENT)
            .background_style(WHITE.mix(0.8))
            .draw()?;
        area.present()?;
    }
    Ok(fs::write(file, svg)?)
}

fn main() {
    let arguments: Vec<_> = std::env::args().collect();
    let file = arguments.iter().position(|argument| argument == "--plot");
    match file.and_then(|at| arguments.get(at + 1)) {
        Some(file) => plot(file).expect("the picture can be written"),
        None if processes() => {}
        None => threads(),
    }
}
