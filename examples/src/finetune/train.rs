//! The training: a loop of its own, because every update is reported.

use std::sync::Mutex;

use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::Interrupter;
use burn_accum::{AccumConfig, Counted, GradNorm, MultiSteps};
use burn_amp::GradScaler;
use burn_checkpoint::MemoryBudget;
use burn_zero::{Memory, offload_parameters};

use super::options::{Options, Packing};
use super::order::Order;
use super::progress::ProgressLines;
use super::report::Report;
use super::text::{Sequence, Text, batch};
use crate::llm::{Llm, LlmConfig};
use crate::pools::peak_bytes;
use crate::training::error::TrainingError;
use crate::training::optimizer::of_rank;
use crate::training::ranks::{Rank, device_of, number_of_ranks, run_ranks};

/// Trains, and reports where rank 0 is; the device is one of the backend that the options name.
///
/// # Errors
///
/// Anything that [`TrainingError`] lists, the first of it before the first step wherever that is
/// possible.
pub fn train<B: AutodiffBackend>(
    options: &Options,
    device: B::Device,
) -> Result<Option<Report>, TrainingError> {
    options.validate()?;
    let ranks = number_of_ranks(options.memory.ranks, "finetune")?;
    let (policy, scaler) = options.memory.amp().configs();
    policy.check::<B>(&device)?;
    policy.install()?;
    GradScaler::new(&scaler)?;
    let config = LlmConfig::read(&options.model)?;
    if options.context > config.context {
        return Err(TrainingError::Options(format!(
            "--context {} is longer than the {} tokens that the model was made for (max_position_embeddings)",
            options.context, config.context
        )));
    }
    let text = Text::load(options, config.vocabulary)?;
    // Drawn once for the ranks of this process, which share its generator of random numbers.
    B::seed(&device, options.seed);
    let model = config.init::<B>(&device).read_weights(&options.model)?;
    let model = options.tuning.tuned(model)?;
    fs_err::create_dir_all(&options.output)?;
    let update_sequences = options.batch * options.accum * ranks;
    let of_one_epoch = (text.train.len() / update_sequences).max(1);
    let run = Run {
        steps: options.steps.unwrap_or(of_one_epoch),
        update_sequences,
        model: Mutex::new(model.with_checkpoint(options.memory.checkpoint)),
        options,
        text,
        device,
    };
    run_ranks(ranks, |rank| run.train(&rank))
}

/// The values that the ranks of a process share.
struct Run<'a, B: AutodiffBackend> {
    options: &'a Options,
    steps: usize,
    /// Sequences in an update, of all ranks.
    update_sequences: usize,
    text: Text,
    model: Mutex<Llm<B>>,
    device: B::Device,
}

/// What makes a rank's updates, and what it has found.
struct Updates<'a, B: AutodiffBackend, O> {
    rank: &'a Rank,
    device: B::Device,
    optimizer: O,
    scaler: GradScaler,
    norm: GradNorm,
    losses: Vec<f64>,
    gradient_norms: Vec<f64>,
}

impl<B: AutodiffBackend> Run<'_, B> {
    /// Trains one rank.
    fn train(&self, rank: &Rank) -> Result<Option<Report>, TrainingError> {
        let (options, is_first) = (self.options, rank.rank() == 0);
        rank.agree_equal("settings", &format!("{options:?}"))?;
        let device = device_of::<B>(rank, &self.device);
        let zero_config = options.zero();
        let mut zero = of_rank::<B>(&options.adamw(), &zero_config, rank)?;
        let model = self.placed_model(&device, zero_config.offload_param);
        let parameters = model.trained_parameters();
        if is_first {
            self.announce(parameters, model.config().parameters());
        }
        let model = zero.prepare::<B, _>(model)?;
        let norm = zero.inner().norm();
        let items_of_all_ranks = zero.items_of_all_ranks();
        let window = MultiSteps::new(zero, AccumConfig::tokens(options.accum))
            .expect("a window has steps")
            .with_items_of_all_ranks(items_of_all_ranks);
        let (_, scale) = options.memory.amp().configs();
        let scaler = GradScaler::new(&scale)?.with_interrupter(Interrupter::new());
        let _budget = options
            .memory
            .checkpoint
            .budget()
            .map(MemoryBudget::install);

        let valid_loss_before = self.validate(&model, &device);
        if is_first {
            println!("validation loss {valid_loss_before:.4}");
        }
        let mut updates = Updates {
            rank,
            device,
            optimizer: scaler.wrap(window),
            scaler,
            norm,
            losses: Vec::new(),
            gradient_norms: Vec::new(),
        };
        let (model, tokens_per_second) = self.train_on(&mut updates, model)?;
        let valid_loss = self.validate(&model, &updates.device);
        options.write(&model, is_first)?;
        if !is_first {
            return Ok(None);
        }
        let report = Report {
            losses: updates.losses,
            gradient_norms: updates.gradient_norms,
            valid_loss_before,
            valid_loss,
            tokens_per_second,
            peak_bytes: peak_bytes(),
            skipped_steps: updates.scaler.skipped_steps(),
            steps: self.steps,
            micro_batch: options.batch,
            window: options.accum,
            ranks: rank.world_size(),
            context: options.context,
            precision: options.memory.amp().dtype().into(),
            stage: options.memory.zero().number(),
            parameters,
            sequences: self.text.train.len(),
        };
        report.write(options)?;
        Ok(Some(report))
    }

    /// A copy of the model for a rank, on its device or in host memory.
    fn placed_model(&self, device: &B::Device, place: Memory) -> Llm<B> {
        let model = self.model.lock().expect("no holder panics").clone();
        match place {
            Memory::Device => model.fork(device),
            Memory::Host => offload_parameters::<B, _>(model.fork(device))
                .expect("the backend that trains has a `Remat`"),
        }
    }

    /// Makes all updates. Returns the model and the tokens that were read in a second, on all
    /// ranks.
    fn train_on<O: Optimizer<Llm<B>, B>>(
        &self,
        updates: &mut Updates<'_, B, O>,
        mut model: Llm<B>,
    ) -> Result<(Llm<B>, f64), TrainingError> {
        let (options, rank) = (self.options, updates.rank);
        B::seed(&updates.device, options.seed);
        let lengths = self.text.train.iter().map(|sequence| sequence.tokens.len());
        let seed = (!options.no_shuffle).then_some(options.seed);
        let mut order = Order::new(lengths.collect(), self.update_sequences, seed);
        let mut tokens = 0;
        let mut progress = ProgressLines::new(self.steps);
        for update in 0..self.steps {
            let lr = options.schedule.lr(options.lr, update, self.steps);
            let mut sums = LossSums::default();
            let numbers = order.update(update);
            tokens += self.tokens(&numbers);
            for sequences in self.micro_batches(&numbers, rank) {
                let output = model.loss(&batch::<B>(&sequences, &updates.device));
                let (loss, items) = (output.loss, output.items);
                sums.add(
                    loss.clone().inner() * items.clone().inner(),
                    items.clone().inner(),
                );
                let gradients = Counted::mean(loss, items).backward(&model);
                model = updates.optimizer.step(lr, model, gradients);
                if let Some(error) = updates.scaler.error() {
                    return Err(error.into());
                }
            }
            let loss = sums.mean_of_all_ranks(rank)?;
            let norm = updates.norm.last().map_or(f64::NAN, f64::from);
            let skips = updates.scaler.skipped_steps() > 0;
            if !loss.is_finite() || !(norm.is_finite() || skips) {
                let update = update + 1;
                return Err(TrainingError::Diverged { update, loss, norm });
            }
            updates.losses.push(loss);
            updates.gradient_norms.push(norm);
            if rank.rank() == 0 {
                progress.update(update + 1, loss, norm, tokens);
            }
        }
        Ok((model, tokens as f64 / progress.seconds()))
    }

    /// The tokens of some sequences.
    fn tokens(&self, numbers: &[usize]) -> usize {
        let sequences = numbers.iter().map(|number| &self.text.train[*number]);
        sequences.map(|sequence| sequence.tokens.len()).sum()
    }

    fn announce(&self, trained: usize, of_model: usize) {
        let (options, text) = (self.options, &self.text);
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
             {} updates of {} sequences in {}, into {}",
            options.model.display(),
            self.steps,
            self.update_sequences,
            options.memory.amp().dtype(),
            options.output.display(),
        );
    }

    /// The rank's micro-batches of an update: those of all ranks are assigned in turn.
    fn micro_batches(&self, numbers: &[usize], rank: &Rank) -> Vec<Vec<&Sequence>> {
        let micro_batches = numbers.chunks(self.options.batch);
        let of_rank = micro_batches.skip(rank.rank()).step_by(rank.world_size());
        let sequences = |micro_batch: &[usize]| {
            let sequences = micro_batch.iter();
            sequences.map(|number| &self.text.train[*number]).collect()
        };
        of_rank.map(sequences).collect()
    }

    /// The mean loss of the held-out tokens. Every rank computes it: at stage 3 none has the model
    /// without the others.
    fn validate(&self, model: &Llm<B>, device: &B::Device) -> f64 {
        let model = model.valid();
        let held_out: Vec<_> = self.text.valid.iter().collect();
        let mut sums = LossSums::default();
        for sequences in held_out.chunks(self.options.batch) {
            let output = model.loss(&batch(sequences, device));
            sums.add(output.loss * output.items.clone(), output.items);
        }
        sums.mean()
    }
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
