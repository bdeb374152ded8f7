//! The training: a loop of its own, because every update is reported.

use std::sync::{Mutex, OnceLock};
use std::time::Instant;

use burn::module::AutodiffModule;
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn_accum::{AccumConfig, Accumulation, Counted, GradNorm};
use burn_amp::GradScaler;
use burn_checkpoint::{InstalledBudget, MemoryBudget, end_step};
use burn_decorator::split_mix;
use burn_estimate::DeviceProfile;
use burn_update::Update;
use burn_zero::{DeepSpeedConfig, DeepSpeedParts, Memory, RankReduction, offload_parameters};

use super::options::{Options, Packing, check_context};
use super::order::Order;
use super::plan;
use super::progress::ProgressLines;
use super::records::{History, Records, Settings};
use super::report::Report;
use super::text::{Sequence, Text, batch};
use crate::llm::{Llm, LlmConfig};
use crate::pools::peak_bytes;
use crate::training::error::TrainingError;
use crate::training::ranks::{Rank, device_of, number_of_ranks, run_ranks};

/// Trains, and reports where rank 0 is; the device is one of the backend that the options name, and
/// `profile` measures its speed, which `--memory` asks for.
///
/// # Errors
///
/// Anything that [`TrainingError`] lists, the first of it before the first step wherever that is
/// possible.
pub fn train<B: AutodiffBackend>(
    options: &Options,
    device: B::Device,
    profile: impl Fn() -> DeviceProfile + Sync,
) -> Result<Option<Report>, TrainingError> {
    options.validate()?;
    let ranks = number_of_ranks(options.memory.ranks, "finetune")?;
    let policy = options.memory.amp().precision().amp();
    policy.check::<B>(&device)?;
    policy.install()?;
    let config = LlmConfig::read(&options.model)?;
    check_context(options.context, &config)?;
    let text = Text::load(options, config.vocabulary)?;
    // New adapters are drawn alike in all processes.
    B::seed(&device, options.seed);
    let model = config.init::<B>(&device).read_weights(&options.model)?;
    let model = options.tuning.tuned(model)?;
    let update_sequences = options.batch * options.accum * ranks;
    let of_one_epoch = (text.train.len() / update_sequences).max(1);
    let run = Run {
        steps: options.steps.unwrap_or(of_one_epoch),
        update_sequences,
        model: Mutex::new(model),
        budget: OnceLock::new(),
        text,
    };
    run_ranks(ranks, |rank| {
        rank.agree_equal("settings", &format!("{options:?}"))?;
        let options = plan::agreed(options, &config, &rank, &profile)?;
        let training = RankTraining {
            run: &run,
            options: &options,
            device: device_of::<B>(&rank, &device),
            rank: &rank,
        };
        training.train()
    })
}

/// The values that the ranks of a process share.
struct Run<B: AutodiffBackend> {
    steps: usize,
    /// Sequences in an update, of all ranks.
    update_sequences: usize,
    text: Text,
    model: Mutex<Llm<B>>,
    /// In force on all ranks of this process, of which the first one installs it.
    budget: OnceLock<Option<InstalledBudget>>,
}

/// The training of one rank.
struct RankTraining<'a, B: AutodiffBackend> {
    run: &'a Run<B>,
    /// With the settings that `--memory` has chosen.
    options: &'a Options,
    rank: &'a Rank,
    device: B::Device,
}

/// What changes with each update.
pub struct Tuned<B: AutodiffBackend> {
    /// The model.
    pub model: Llm<B>,
    /// What updates it.
    pub update: Update<Llm<B>, B>,
}

/// What tells of an update.
struct Handles {
    scaler: GradScaler,
    norm: GradNorm,
    reduction: RankReduction,
}

impl<B: AutodiffBackend> RankTraining<'_, B> {
    fn train(&self) -> Result<Option<Report>, TrainingError> {
        let Run { text, steps, .. } = self.run;
        let settings = Settings::checked(self.options, text, *steps, self.run.update_sequences)?;
        let config = self.options.config();
        let (mut update, handles) = self.update(&config)?;
        let model = self.placed_model(config.zero.offload_param);
        let (model, _) = self.options.memory.checkpoint.with_units::<B, _>(model)?;
        let parameters = model.trained_parameters();
        if self.is_first() {
            self.announce(parameters, model.config().parameters());
        }
        let model = update.prepare(model)?;
        if self.is_first() {
            settings.begin()?;
        }
        let checkpoint = self.options.memory.checkpoint;
        // It comes into force on all ranks of this process at the same place of their programs.
        self.rank.barrier("prepared")?;
        let install = || checkpoint.budget().map(MemoryBudget::install);
        self.run.budget.get_or_init(install);
        // It does not count what was made so far.
        end_step();

        let records = Records::new(self.options, &handles.reduction)?;
        let tuned = Tuned { model, update };
        let (tuned, history) = if self.options.resume {
            let (tuned, history) = records.load(tuned, self.run.steps)?;
            if self.is_first() {
                println!("resumes after update {}", history.losses.len());
                if self.options.save_every.is_none() {
                    println!("no further records are written: --save-every is not given");
                }
            }
            (tuned, history)
        } else {
            let loss = self.of_rank_0("validation loss", self.validate(&tuned.model))?;
            if self.is_first() {
                println!("validation loss {loss:.4}");
            }
            let history = History {
                valid_loss_before: finite(loss),
                ..History::default()
            };
            (tuned, history)
        };
        let (tuned, history) = self.train_on(tuned, history, &handles, &records)?;
        let valid_loss = self.validate(&tuned.model);
        self.options.write(&tuned.model, self.is_first())?;
        if !self.is_first() {
            return Ok(None);
        }
        let skipped_steps = handles.scaler.skipped_steps();
        let report = self.report(history, valid_loss, skipped_steps, parameters);
        report.write(self.options)?;
        Ok(Some(report))
    }

    /// The update, over the ranks.
    fn update(
        &self,
        config: &DeepSpeedConfig,
    ) -> Result<(Update<Llm<B>, B>, Handles), TrainingError> {
        let mut parts = DeepSpeedParts::new(config, self.rank.clone())?;
        // Ranks that are threads share the generator of their process otherwise.
        parts.reduction = parts.reduction.with_seed(self.options.seed);
        parts.windows = Accumulation::new(AccumConfig::tokens(self.options.accum))?;
        let handles = Handles {
            scaler: parts.scaler.clone(),
            norm: parts.clip.as_ref().expect("--clip is a norm").norm(),
            reduction: parts.reduction.clone(),
        };
        Ok((parts.into_update()?, handles))
    }

    fn report(
        &self,
        history: History,
        valid_loss: f64,
        skipped_steps: u64,
        parameters: usize,
    ) -> Report {
        let options = self.options;
        Report {
            valid_loss_before: history.valid_loss_before.unwrap_or(f64::NAN),
            valid_loss,
            tokens_per_second: history.tokens as f64 / history.seconds.iter().sum::<f64>(),
            losses: history.losses,
            gradient_norms: history
                .gradient_norms
                .into_iter()
                .map(|norm| norm.unwrap_or(f64::NAN))
                .collect(),
            update_seconds: history.seconds,
            peak_bytes: peak_bytes(),
            skipped_steps,
            steps: self.run.steps,
            micro_batch: options.batch,
            window: options.accum,
            ranks: self.rank.world_size(),
            context: options.context,
            precision: options.memory.amp().dtype().into(),
            stage: options.memory.zero().number(),
            parameters,
            sequences: self.run.text.train.len(),
        }
    }

    /// A number as rank 0 has it: a record has one history.
    fn of_rank_0(&self, label: &str, number: f64) -> Result<f64, TrainingError> {
        Ok(self.rank.gather_f64(label, number)?[0])
    }

    fn is_first(&self) -> bool {
        self.rank.rank() == 0
    }

    /// A copy of the model for this rank, on its device or in host memory.
    fn placed_model(&self, place: Memory) -> Llm<B> {
        let model = self.run.model.lock().expect("no holder panics").clone();
        let model = model.with_checkpoint(self.options.memory.checkpoint);
        match place {
            Memory::Device => model.fork(&self.device),
            Memory::Host => offload_parameters::<B, _>(model.fork(&self.device))
                .expect("the backend that trains has a `Remat`"),
        }
    }

    /// Makes the updates that `history` has not.
    fn train_on(
        &self,
        mut tuned: Tuned<B>,
        mut history: History,
        handles: &Handles,
        records: &Records<'_>,
    ) -> Result<(Tuned<B>, History), TrainingError> {
        let Self {
            options,
            run: Run { text, steps, .. },
            ..
        } = self;
        let lengths = text.train.iter().map(|sequence| sequence.tokens.len());
        let seed = (!options.no_shuffle).then_some(options.seed);
        let mut order = Order::new(lengths.collect(), self.run.update_sequences, seed);
        let mut progress = ProgressLines::new(*steps, history.losses.len());
        let tokens_before = history.tokens;
        for update in history.losses.len()..*steps {
            let began = Instant::now();
            let numbers = order.update(update);
            let loss;
            (tuned, loss) = self.step(tuned, update, &numbers)?;
            let norm = handles.norm.last().map_or(f64::NAN, f64::from);
            let skips = handles.scaler.skipped_steps() > 0;
            if !loss.is_finite() || !(norm.is_finite() || skips) {
                let update = update + 1;
                return Err(TrainingError::Diverged { update, loss, norm });
            }
            history.losses.push(loss);
            history.gradient_norms.push(finite(norm));
            let own_seconds = began.elapsed().as_secs_f64();
            let seconds = self.of_rank_0("seconds of an update", own_seconds)?;
            history.seconds.push(seconds);
            history.tokens += self.tokens(&numbers);
            if self.is_first() {
                progress.update(update + 1, loss, norm, history.tokens - tokens_before);
            }
            records.save_if_due(&tuned, &history)?;
        }
        Ok((tuned, history))
    }

    /// Makes one update, counted from 0, of some sequences. Returns the mean loss of their tokens
    /// before it.
    fn step(
        &self,
        tuned: Tuned<B>,
        number: usize,
        numbers: &[usize],
    ) -> Result<(Tuned<B>, f64), TrainingError> {
        let Tuned {
            mut model,
            mut update,
        } = tuned;
        let options = self.options;
        let lr = options.schedule.lr(options.lr, number, self.run.steps);
        // Masks are those of the update and the rank, whatever was drawn before.
        let of_update = split_mix::output(options.seed, number as u64);
        let seed = split_mix::output(of_update, self.rank.rank() as u64);
        B::seed(&self.device, seed);
        let mut sums = LossSums::default();
        for sequences in self.micro_batches(numbers) {
            let output = model.loss(&batch::<B>(&sequences, &self.device));
            let (loss, items) = (output.loss, output.items);
            sums.add(
                loss.clone().inner() * items.clone().inner(),
                items.clone().inner(),
            );
            let loss = Counted::mean(loss, items);
            let gradients = update.backward(&model, loss);
            model = update.step(lr, model, gradients)?;
        }
        Ok((Tuned { model, update }, sums.mean_of_all_ranks(self.rank)?))
    }

    /// The tokens of some sequences.
    fn tokens(&self, numbers: &[usize]) -> usize {
        let sequences = numbers.iter().map(|number| self.sequence(*number));
        sequences.map(|sequence| sequence.tokens.len()).sum()
    }

    fn sequence(&self, number: usize) -> &Sequence {
        &self.run.text.train[number]
    }

    fn announce(&self, trained: usize, of_model: usize) {
        let (options, text) = (self.options, &self.run.text);
        let (train, valid, context) = (text.train.len(), text.valid.len(), options.context);
        let at_most = if options.packing() == Packing::None {
            "at most "
        } else {
            ""
        };
        if text.cut > 0 {
            println!(
                "{} conversations are longer than --context {context}, and are cut there",
                text.cut
            );
        }
        println!(
            "{}: {of_model} parameters, {trained} trained\ntext: {train} sequences of {at_most}{context} tokens, {valid} held out\n\
             {} updates of {} sequences in {}, with a learning rate of {}, into {}",
            options.model.display(),
            self.run.steps,
            self.run.update_sequences,
            options.memory.amp().dtype(),
            options.lr,
            options.output.display(),
        );
        let ignored = options.file.iter().flat_map(|file| &file.zero.ignored);
        for (key, reason) in ignored {
            println!("ignored: {key}: {reason}");
        }
    }

    /// The rank's micro-batches of an update: those of all ranks are assigned in turn.
    fn micro_batches(&self, numbers: &[usize]) -> Vec<Vec<&Sequence>> {
        let (rank, ranks) = (self.rank.rank(), self.rank.world_size());
        let of_rank = numbers.chunks(self.options.batch).skip(rank).step_by(ranks);
        let sequences = |micro_batch: &[usize]| {
            let sequences = micro_batch.iter();
            sequences.map(|number| self.sequence(*number)).collect()
        };
        of_rank.map(sequences).collect()
    }

    /// The mean loss of the held-out tokens. Every rank computes it: at stage 3 none has the model
    /// without the others.
    fn validate(&self, model: &Llm<B>) -> f64 {
        let model = model.valid();
        let held_out: Vec<_> = self.run.text.valid.iter().collect();
        let mut sums = LossSums::default();
        for sequences in held_out.chunks(self.options.batch) {
            let output = model.loss(&batch(sequences, &self.device));
            sums.add(output.loss * output.items.clone(), output.items);
        }
        sums.mean()
    }
}

/// JSON has no other numbers.
fn finite(number: f64) -> Option<f64> {
    Some(number).filter(|number| number.is_finite())
}

/// The sums of losses and of the tokens that they are of, on the device until they are read.
struct LossSums<B: Backend> {
    sums: Option<(Tensor<B, 1>, Tensor<B, 1>)>,
}

impl<B: Backend> Default for LossSums<B> {
    fn default() -> Self {
        Self { sums: None }
    }
}

impl<B: Backend> LossSums<B> {
    fn add(&mut self, loss: Tensor<B, 1>, items: Tensor<B, 1>) {
        self.sums = Some(match self.sums.take() {
            Some((losses, all)) => (losses + loss, all + items),
            None => (loss, items),
        });
    }

    /// The sums of losses and of tokens.
    fn read(self) -> (f64, f64) {
        let (losses, items) = self.sums.expect("an update has a micro-batch");
        let data = Tensor::cat(vec![losses, items], 0).into_data();
        let both: Vec<f64> = data.iter().collect();
        (both[0], both[1])
    }

    fn mean(self) -> f64 {
        let (losses, items) = self.read();
        losses / items
    }

    fn mean_of_all_ranks(self, rank: &Rank) -> Result<f64, TrainingError> {
        let (losses, items) = self.read();
        let losses = rank.agree_sum("loss of an update", losses)?;
        Ok(losses / rank.agree_sum("tokens of an update", items)?)
    }
}
