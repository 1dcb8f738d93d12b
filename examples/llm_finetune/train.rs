//! Training loop of one rank.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData};
use fsdp_runtime::Mesh;
use fsdp_runtime::nn::AttentionOptions;
use fsdp_runtime::optim::{AdamWConfig, GradScalerConfig};
use fsdp_runtime::prelude::*;

use crate::common::progress::{Progress, Step};
use crate::common::saver::{Position, Saver, TrainingState, resume};
use crate::common::training::{adamw, median, read_loss, scale_loss, unscale_gradients};
use crate::data::{Cursor, HostBatch, IGNORED, Order, PADDING, share, steps_per_epoch};
use crate::generate::generate;
use crate::job::Job;
use crate::learning_rate::schedule;
use crate::model::{CausalLm, Labels, Rows};
use crate::sharding::{forecast, shard_model};
use crate::summary::Summary;

/// Name of the lowest loss of an evaluation in a checkpoint.
const BEST_LOSS: &str = "best_eval_loss";
/// Name of the number of evaluations since then in a checkpoint.
const WORSE: &str = "evals_without_improvement";

/// Trains and evaluates the model on one rank. Every rank calls it within [`launch`]. Returns the summary,
/// in which only durations, memory and answers differ between ranks, or `None` if Ctrl-C ended the run.
///
/// # Errors
///
/// If the hyperparameters do not fit the data, the weights or the checkpoint do not fit the model, a file
/// cannot be written, a peer fails, or the loss is not finite.
pub fn train(job: &Job, worker: &Worker) -> Result<Option<Summary>> {
    let trainer = Trainer::new(job, worker)?;
    let expected = job.memory.is_on().then(|| forecast(job, worker)).transpose()?;
    let memory = job.memory.record(&trainer.state.model, worker, expected)?;
    let outcome = trainer.run();
    memory.finish(&outcome)?;
    outcome
}

/// One rank's part of a run.
struct Trainer<'a> {
    job: &'a Job,
    worker: &'a Worker,
    /// Rows of a step, over all ranks and micro-batches.
    global_rows: usize,
    /// Step after which the run ends.
    last_step: usize,

    state: TrainingState<CausalLm>,
    position: Position,
    /// Current epoch, and its rows in the order in which they are trained on.
    order: Option<(usize, Vec<usize>)>,
    saver: Saver,

    progress: Progress,
    /// Loss of every step: the mean over the counted tokens of all ranks.
    losses: Vec<f64>,
    /// Duration of every step.
    seconds: Vec<f64>,
    /// Tokens trained on by this process, over all ranks, without padding.
    tokens: f64,
    /// Mean loss of the last evaluation, with the step before it.
    evaluation: Option<(usize, f64)>,
    /// Mean loss before the first step.
    first_evaluation: Option<f64>,
}

/// What ends the loop over steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Another step follows.
    No,
    /// Evaluations have not improved for a while.
    Patience,
    /// Ctrl-C was pressed.
    Interrupted,
}

impl<'a> Trainer<'a> {
    /// Shards the model, builds the optimizer, and loads the checkpoint to resume from, if any.
    fn new(job: &'a Job, worker: &'a Worker) -> Result<Self> {
        let recipe = &job.recipe;
        let data_ranks = worker.world().size() / job.tensor_parallel / job.context_parallel;
        let global_rows = recipe.args.batch_size * data_ranks * recipe.args.accumulate;
        let steps_per_epoch = steps_per_epoch(job.train.rows.len(), global_rows);
        let total_steps = recipe.total_steps(steps_per_epoch);
        let progress = match worker.rank().index() {
            0 => Progress::new(total_steps, job.quiet, job.log_file.clone(), job.board.clone()),
            _ => Progress::silent(),
        };
        job.description.lines().for_each(|line| progress.note(line));

        let from = job.checkpoints.find(worker)?;
        let mut state = TrainingState {
            name: "llm",
            model: shard_model(job, worker, from.is_some())?,
            optimizer: adamw(AdamWConfig::new().with_weight_decay(recipe.args.weight_decay as f32)),
            schedule: schedule(recipe, total_steps)?,
            scaler: job.scaler.as_ref().map(GradScalerConfig::init).transpose()?,
            values: BTreeMap::from([(BEST_LOSS, f64::INFINITY), (WORSE, 0.0)]),
        };
        let mut position = Position::default();
        if let Some(folder) = &from {
            position = resume(worker, folder, &mut state)?;
            progress.note(&format!("resumed after step {}", position.step));
        }
        let last_step = recipe.args.stop_after.map_or(total_steps, |step| step.min(total_steps));
        Ok(Self {
            job,
            worker,
            global_rows,
            last_step,
            state,
            position,
            order: None,
            saver: Saver::new(&job.checkpoints, worker),
            progress,
            losses: Vec::new(),
            seconds: Vec::new(),
            tokens: 0.0,
            evaluation: None,
            first_evaluation: None,
        })
    }

    /// Trains for the steps that are left. Returns `None` if Ctrl-C ended the run.
    fn run(self) -> Result<Option<Summary>> {
        let mut trainer = self;
        if !trainer.job.generate.no_training {
            if trainer.position.step == 0 {
                trainer.first_evaluation = trainer.evaluate()?;
            }
            while trainer.position.step < trainer.last_step {
                trainer = trainer.step()?;
                match trainer.after_step()? {
                    End::No => {}
                    End::Patience => break,
                    End::Interrupted => return Ok(None),
                }
            }
            trainer.saver.finish(trainer.worker, trainer.position, &trainer.state)?;
        }
        trainer.finish().map(Some)
    }

    /// Returns this rank's number among those that take different rows, and their number.
    fn data_rank(&self) -> (usize, usize) {
        let mesh = self.state.model.stats().mesh();
        (mesh.batch_rank().index(), mesh.batch_ranks().size())
    }

    /// Returns the rows of this rank in a micro-batch of the current step.
    fn rows(&mut self, micro_batch: usize) -> Vec<usize> {
        let Position { epoch, examples, .. } = self.position;
        if self.order.as_ref().is_none_or(|(of, _)| *of != epoch) {
            let rows = self.job.train.rows.len();
            let order = match self.job.shuffles {
                true => Order::new(self.job.recipe.args.seed),
                false => Order::of_data(),
            };
            let order = order.epoch(rows, epoch as u64);
            self.order = Some((epoch, order));
        }
        let order = self.order.as_ref().map_or(&[][..], |(_, order)| order);
        let (rank, world) = self.data_rank();
        let rows = self.job.recipe.args.batch_size * world;
        share(&order[examples.min(order.len())..], micro_batch, rows, rank, world)
    }

    /// Trains on one global batch: forward and backward of each micro-batch, clipping and update.
    ///
    /// The trainer is passed by value because Burn's optimizers take the model by value.
    fn step(mut self) -> Result<Self> {
        let begin = Instant::now();
        let micro_batches = self.job.recipe.args.accumulate;
        // Sums of the losses, of the counted tokens, and of all tokens.
        let mut sums = [0.0; 3];
        let (mut values, mut gradients) = (Vec::new(), None);
        for micro_batch in 0..micro_batches {
            let rows = self.rows(micro_batch);
            let batch = self.job.train.batch(&rows)?;
            let model = &self.state.model;
            let OnDevice { rows, labels, counted, tokens } =
                on_device(&batch, model.stats().mesh(), self.worker.device())?;
            let sum = model.forward_loss(rows, labels);
            values.push(sum.clone().inner());
            let scaled = scale_loss(sum, self.state.scaler.as_ref());
            if micro_batch + 1 < micro_batches {
                model.accumulate_sum(scaled, counted)?;
            } else {
                gradients = Some(model.backward_sum(scaled, counted)?);
            }
            sums[1] += counted;
            sums[2] += tokens;
        }
        let rate = self.state.schedule.step();
        if let Some(gradients) = gradients {
            let TrainingState { model, scaler, .. } = &mut self.state;
            // A step whose gradients overflow in float16 changes no parameter.
            if let Unscaled::Finite(mut gradients) =
                unscale_gradients(model, gradients, scaler.as_mut())?
            {
                let bound = self.job.recipe.args.clip_norm;
                if bound > 0.0 {
                    model.clip_grad_norm(&mut gradients, bound)?;
                }
                self.state.model =
                    self.state.optimizer.step(rate.clone(), self.state.model, gradients);
            }
        }
        // Reading a loss waits for the device, so that all of them are read after the update was begun.
        for value in values {
            sums[0] += read_loss(value)?;
        }
        self.worker.all_reduce_sum(&mut sums)?;
        // Tensor parallel ranks have the same rows.
        let [sum, counted, tokens] = sums.map(|sum| sum / self.job.tensor_parallel as f64);
        self.position.step += 1;
        self.record(sum / counted, tokens, rate.base(), begin.elapsed())?;
        Ok(self)
    }

    /// Records and shows a step.
    fn record(&mut self, loss: f64, tokens: f64, rate: f64, took: Duration) -> Result<()> {
        let number = self.position.step;
        ensure!(
            loss.is_finite(),
            "the loss of step {number} is {loss}; a lower --learning-rate may help"
        );
        self.losses.push(loss);
        self.seconds.push(took.as_secs_f64());
        self.tokens += tokens;
        if self.seconds.len() == 1 {
            // The first step allocated the optimizer's state.
            self.state.model.stats().record_optimizer(&self.state.optimizer)?;
        }
        let left = median(&self.seconds) * self.last_step.saturating_sub(number) as f64;
        self.progress.step(Step {
            number,
            loss,
            learning_rate: rate,
            tokens_per_second: self.tokens / self.seconds.iter().sum::<f64>(),
            memory: Some(self.state.model.stats().memory().total.peak),
            left: Some(Duration::from_secs_f64(left)),
        });
        Ok(())
    }

    /// Evaluates at the end of an epoch, of the run and of an interval, and saves a checkpoint if one is
    /// due.
    fn after_step(&mut self) -> Result<End> {
        let Position { step, epoch, examples } = self.position;
        let here = Cursor { epoch: epoch as u64, row: examples };
        let next = here.after_step(self.job.train.rows.len(), self.global_rows);
        self.position = Position { step, epoch: next.epoch as usize, examples: next.row };
        let epoch_ends = next.row == 0;
        let every = self.job.recipe.args.eval_every;
        let is_due = every.is_some_and(|every| step.is_multiple_of(every));
        let mut end = End::No;
        if (epoch_ends || is_due || step == self.last_step)
            && let Some(loss) = self.evaluate()?
        {
            end = self.judge(loss);
        }
        if self.saver.after_step(self.worker, self.position, &self.state)? {
            self.saver.finish(self.worker, self.position, &self.state)?;
            self.progress.note(&format!("saved after step {step}"));
            return Ok(End::Interrupted);
        }
        Ok(end)
    }

    /// Compares a loss with the lowest so far. Returns whether `--patience` is at its end.
    fn judge(&mut self, loss: f64) -> End {
        let best = self.state.values.entry(BEST_LOSS).or_insert(f64::INFINITY);
        let improved = loss < *best;
        *best = best.min(loss);
        let worse = self.state.values.entry(WORSE).or_insert(0.0);
        *worse = if improved { 0.0 } else { *worse + 1.0 };
        match self.job.recipe.args.patience {
            Some(patience) if *worse >= patience as f64 => {
                let count = *worse;
                self.progress
                    .note(&format!("{count} evaluations without a lower loss: the run ends"));
                End::Patience
            }
            _ => End::No,
        }
    }

    /// Computes the mean loss over the counted tokens of the held-out conversations, of which each rank
    /// takes a part. Returns `None` if there are none.
    fn evaluate(&mut self) -> Result<Option<f64>> {
        let Some(split) = &self.job.eval else { return Ok(None) };
        let begin = Instant::now();
        let device = self.worker.device().clone().inner();
        let model = self.state.model.valid();
        let (rank, world) = self.data_rank();
        let rows: Vec<usize> = (0..split.rows.len()).collect();
        let mut sums = [0.0; 2];
        // Each rank runs the same number of forwards.
        for chunk in rows.chunks(self.job.recipe.args.batch_size * world) {
            let batch = split.batch(&share(chunk, 0, chunk.len(), rank, world))?;
            let own = on_device(&batch, model.stats().mesh(), &device)?;
            sums[0] += read_loss(model.forward_loss(own.rows, own.labels))?;
            sums[1] += own.counted;
        }
        self.worker.all_reduce_sum(&mut sums)?;
        let loss = sums[0] / sums[1];
        let (step, perplexity) = (self.position.step, loss.exp());
        let line = format!(
            "step {step}  eval loss {loss:.4}  perplexity {perplexity:.3}  {:.1} s",
            begin.elapsed().as_secs_f64()
        );
        let numbers = [("eval/loss", loss), ("eval/perplexity", perplexity)];
        self.progress.result(step, &line, numbers);
        self.evaluation = Some((step, loss));
        Ok(Some(loss))
    }

    /// Exports the model, answers messages, and returns the summary.
    fn finish(mut self) -> Result<Summary> {
        if !self.job.generate.no_training && self.evaluation.is_none() {
            // The run resumed from a checkpoint of its own end, and took no step.
            self.evaluate()?;
        }
        self.progress.finish();
        if let Some(export) = &self.job.export {
            export.save(&self.state.model)?;
        }
        let answers = generate(self.job, &self.state.model, self.worker)?;
        let stats = self.state.model.stats();
        let seconds = self.seconds.iter().sum::<f64>().max(f64::MIN_POSITIVE);
        let perplexity = |loss: f64| loss.exp();
        Ok(Summary {
            world_size: self.worker.world().size(),
            strategy: self.job.strategy.clone(),
            num_params: stats.num_params(),
            sharded_bytes_per_rank: stats.sharded_bytes(),
            peak_memory_bytes: stats.memory().total.peak,
            steps: self.losses.len(),
            tokens_per_second: self.tokens / seconds,
            step_seconds_median: median(&self.seconds),
            train_loss: self.losses.last().copied(),
            perplexity_before: self.first_evaluation.map(perplexity),
            perplexity: self.evaluation.map(|(_, loss)| perplexity(loss)),
            bigram_perplexity: self.job.bigram_perplexity,
            losses: self.losses,
            step_seconds: self.seconds,
            answers,
        })
    }
}

/// What this rank has of a batch.
struct OnDevice {
    rows: Rows,
    labels: Labels,
    /// Number of labels.
    counted: f64,
    /// Number of tokens without padding.
    tokens: f64,
}

/// Copies a batch to a device: of each row the positions that this rank has.
fn on_device(batch: &HostBatch, mesh: Mesh, device: &Device) -> Result<OnDevice> {
    let part = mesh.context_part(batch.length).context("--cp")?;
    let own = |numbers: &[i32]| -> Vec<i32> {
        let of_row = |row: &[i32]| part.indices().map(|at| row[at]).collect::<Vec<_>>();
        numbers.chunks(batch.length).flat_map(of_row).collect()
    };
    let ints = |numbers: &[i32]| {
        let data = TensorData::new(own(numbers), [batch.rows, part.len()]);
        Tensor::<2, Int>::from_data(data, device)
    };
    let causal = AttentionOptions::new().with_causal(true);
    // Attention takes the segments of whole rows.
    let segments = TensorData::new(batch.segments.clone(), [batch.rows, batch.length]);
    let rows = Rows {
        ids: ints(&batch.ids),
        positions: ints(&batch.positions),
        sight: causal.with_segment_data(&segments),
    };
    let labels = own(&batch.labels).into_iter().enumerate();
    let (mut at, mut ids): (Vec<i32>, Vec<i32>) =
        labels.filter(|(_, label)| *label != IGNORED).map(|(at, label)| (at as i32, label)).unzip();
    let counted = at.len() as f64;
    let tokens = own(&batch.segments).iter().filter(|segment| **segment != PADDING).count() as f64;
    if at.is_empty() {
        // A rank without a counted token runs its passes as well.
        (at, ids) = (vec![0], vec![IGNORED]);
    }
    let list = |numbers: Vec<i32>| {
        let count = numbers.len();
        Tensor::<1, Int>::from_data(TensorData::new(numbers, [count]), device)
    };
    let labels = Labels { at: list(at), ids: list(ids) };
    Ok(OnDevice { rows, labels, counted, tokens })
}
