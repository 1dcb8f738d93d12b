//! When the run saves, from where it resumes, and what Ctrl-C does.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::ModuleOptimizer;
use fsdp_runtime::GradScaler;
use fsdp_runtime::checkpoint::{Checkpoint, CheckpointManager, Restore};
use fsdp_runtime::prelude::*;

use crate::model::BertForSequenceClassification;

/// What the flags say of checkpoints.
#[derive(Clone, Debug, Default)]
pub struct SavePlan {
    /// Where to save.
    pub directory: Option<PathBuf>,
    /// Steps between two saves; the end of a run is always saved.
    pub every: Option<usize>,
    /// How many checkpoints to keep.
    pub keep_last: Option<usize>,
    /// Where to resume from: a folder of checkpoints, or one of them.
    pub resume: Option<PathBuf>,
}

impl SavePlan {
    /// A plan that saves where it resumes from, unless told where: beside the checkpoint, where that
    /// is one.
    pub fn new(directory: Option<PathBuf>, resume: Option<PathBuf>) -> Self {
        let beside = |folder: &PathBuf| match (is_checkpoint(folder), folder.canonicalize()) {
            (true, Ok(checkpoint)) => checkpoint.parent().map_or(checkpoint.clone(), PathBuf::from),
            _ => folder.clone(),
        };
        let directory = directory.or_else(|| resume.as_ref().map(beside));
        Self { directory, resume, ..Self::default() }
    }
}

/// Whether a folder is a checkpoint, and not one that holds some.
fn is_checkpoint(folder: &Path) -> bool {
    folder.join(fsdp_runtime::checkpoint::MANIFEST).is_file()
}

/// How far a run has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Steps taken, over all processes.
    pub step: usize,
    /// The epoch under way.
    pub epoch: usize,
    /// Examples taken of it, over all ranks: the same whatever the number of ranks.
    pub examples: usize,
}

/// What is saved and resumed.
pub struct Training<'a> {
    /// The model.
    pub model: &'a mut Fsdp<BertForSequenceClassification>,
    /// Its optimizer.
    pub optimizer: &'a mut ModuleOptimizer,
    /// Its learning rate.
    pub schedule: &'a mut ModuleLrScheduler,
    /// Its loss scale, in float16.
    pub scaler: Option<&'a mut GradScaler>,
}

/// The checkpoints of a run, on one rank.
pub struct Saver {
    manager: Option<CheckpointManager>,
    every: Option<usize>,
    saved: Option<usize>,
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// From now on, Ctrl-C asks the run to save and end; a second one ends it at once.
///
/// # Errors
///
/// If the system does not let the program handle it.
pub fn handle_interrupts() -> Result<()> {
    let handle = || {
        if INTERRUPTED.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        eprintln!("saving, then ending; Ctrl-C again ends at once");
    };
    ctrlc::set_handler(handle).context("cannot handle Ctrl-C")
}

impl Saver {
    /// A saver as the flags say. Saves run beside the training.
    pub fn new(plan: &SavePlan, worker: &Worker) -> Self {
        let manager = plan.directory.as_ref().map(|directory| {
            let manager = CheckpointManager::new(directory, worker).with_background(true);
            match plan.keep_last {
                Some(count) => manager.with_keep_last(count),
                None => manager,
            }
        });
        Self { manager, every: plan.every, saved: None }
    }

    /// Saves if it is time to, or if Ctrl-C was pressed on any rank; says whether it was.
    ///
    /// # Errors
    ///
    /// If the checkpoint, or the one before it, cannot be written.
    pub fn after_step(
        &mut self,
        worker: &Worker,
        position: Position,
        training: &Training<'_>,
    ) -> Result<bool> {
        if self.manager.is_none() {
            return Ok(false);
        }
        let mut interrupted = [f64::from(u8::from(INTERRUPTED.load(Ordering::Relaxed)))];
        worker.all_reduce_sum(&mut interrupted)?;
        let interrupted = interrupted[0] > 0.0;
        let due = self.every.is_some_and(|every| position.step.is_multiple_of(every));
        if due || interrupted {
            self.save(position, training)?;
        }
        Ok(interrupted)
    }

    /// Saves the end of the run, and waits until it is on the disk.
    ///
    /// # Errors
    ///
    /// As [`after_step`](Self::after_step).
    pub fn finish(&mut self, position: Position, training: &Training<'_>) -> Result<()> {
        if self.saved != Some(position.step) {
            self.save(position, training)?;
        }
        match &mut self.manager {
            Some(manager) => manager.finish().context("cannot save"),
            None => Ok(()),
        }
    }

    fn save(&mut self, position: Position, training: &Training<'_>) -> Result<()> {
        let Some(manager) = &mut self.manager else { return Ok(()) };
        let Position { step, epoch, examples } = position;
        let checkpoint = Checkpoint::new(step as u64)
            .with_data_position(epoch as u64, examples as u64)
            .with_model("bert", training.model)
            .with_optimizer("adamw", training.optimizer)
            .with_scheduler("learning_rate", training.schedule);
        let checkpoint = match &training.scaler {
            Some(scaler) => checkpoint.with_grad_scaler("loss_scale", scaler),
            None => checkpoint,
        };
        manager.save(&checkpoint).context("cannot save")?;
        self.saved = Some(step);
        Ok(())
    }
}

/// Goes on where the newest complete checkpoint in a folder was saved.
///
/// # Errors
///
/// If there is none, or it does not fit the model.
pub fn resume(worker: &Worker, folder: &Path, training: Training<'_>) -> Result<Position> {
    let folder = match is_checkpoint(folder) {
        true => folder.to_path_buf(),
        false => match CheckpointManager::new(folder, worker).latest()? {
            Some(folder) => folder,
            None => bail!("--resume: {} holds no complete checkpoint", folder.display()),
        },
    };
    let restore = Restore::new()
        .with_model("bert", training.model)
        .with_optimizer("adamw", training.optimizer)
        .with_scheduler("learning_rate", training.schedule);
    let restore = match training.scaler {
        Some(scaler) => restore.with_grad_scaler("loss_scale", scaler),
        None => restore,
    };
    let restored = restore
        .load(worker, &folder)
        .with_context(|| format!("cannot resume from {}", folder.display()))?;
    let progress = restored.progress;
    Ok(Position {
        step: usize::try_from(progress.step)?,
        epoch: usize::try_from(progress.epoch)?,
        examples: usize::try_from(progress.position)?,
    })
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use clap::Parser;
    use fsdp_runtime::GradScalerConfig;
    use fsdp_runtime::checkpoint::Manifest;

    use super::*;
    use crate::cli::Cli;
    use crate::config::BertConfig;
    use crate::report::Summary;
    use crate::tokenize::Encoded;
    use crate::train::{Job, train};

    /// Examples in a step, over all ranks.
    const GLOBAL: usize = 12;

    /// Sentences of made-up words.
    fn examples(count: usize) -> Vec<Encoded> {
        let example = |row: usize| {
            let ids = (0..6 + row % 9).map(|at| ((row * 31 + at * 7) % 60) as u32 + 4).collect();
            Encoded { ids, types: vec![0; 6 + row % 9], label: row % 2 }
        };
        (0..count).map(example).collect()
    }

    fn job(world: usize, strategy: ShardingStrategy, flags: &[&str]) -> Job {
        let batch = (GLOBAL / world).to_string();
        let flags = [&["bert_finetune", "--steps", "9", "--batch-size", &batch], flags].concat();
        let cli = Cli::parse_from(flags);
        let config = BertConfig {
            hidden_size: 24,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            intermediate_size: 32,
            ..BertConfig::small(64, 16)
        };
        Job {
            about: String::new(),
            config: config.with_dropout(Some(0.0)),
            weights: None,
            export: None,
            classes: 2,
            pad: 0,
            // Nine steps end in the third epoch.
            train: examples(4 * GLOBAL + 5),
            test: examples(7),
            options: FsdpOptions::new(),
            scaler: None,
            strategy,
            saving: cli.save_plan(),
            recipe: cli.recipe(),
            quiet: true,
        }
    }

    fn run(world: usize, job: Job) -> Summary {
        let options = LaunchOptions::new(world).with_device(Device::flex());
        let mut ranks = launch(options, move |worker| train(&job, &worker)).unwrap();
        ranks.swap_remove(0).expect("nobody pressed Ctrl-C")
    }

    #[test]
    fn a_run_goes_on_at_another_world_size_and_strategy() {
        use ShardingStrategy::{FullShard, NoShard, ShardGradOp};
        let all = run(2, job(2, FullShard, &[])).losses;
        assert_eq!(all.len(), 9);
        for (world, strategy) in
            [(2, FullShard), (3, FullShard), (1, FullShard), (4, ShardGradOp), (2, NoShard)]
        {
            let home = tempfile::tempdir().unwrap();
            let folder = home.path().to_str().unwrap();
            let first = ["--save-dir", folder, "--save-every", "2", "--stop-after", "5"];
            let first = run(2, job(2, FullShard, &first)).losses;
            assert_eq!(first, all[..5]);
            // The folder of checkpoints, of which the newest is taken.
            let rest = run(world, job(world, strategy, &["--resume", folder])).losses;
            assert_eq!(rest.len(), 4, "{world} {strategy}");
            for (found, expected) in rest.iter().zip(&all[5..]) {
                let what = format!("{world} {strategy}: {rest:?} {all:?}");
                assert!((found - expected).abs() <= 1e-6, "{what}");
            }
        }
    }

    #[test]
    fn a_run_that_resumes_from_one_checkpoint_saves_beside_it() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().to_str().unwrap();
        run(1, job(1, ShardingStrategy::FullShard, &["--save-dir", folder, "--stop-after", "3"]));
        let first = home.path().join("step-00000003");
        let flags = ["--resume", first.to_str().unwrap(), "--save-every", "1", "--stop-after", "5"];
        let flags = [&flags[..], &["--keep-last", "1"]].concat();
        run(1, job(1, ShardingStrategy::FullShard, &flags));
        let names = std::fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.collect();
        names.sort();
        assert_eq!(names, ["step-00000005"]);
    }

    /// The loss scale goes along; an overflow is a step without an update.
    #[test]
    fn a_run_in_float16_goes_on_with_its_loss_scale() {
        // Gradients overflow for some steps, and then no more.
        const LOSS_SCALE: f32 = 1e7;
        let policy = MixedPrecisionPolicy::new().with_param_dtype(burn::tensor::FloatDType::F16);
        let half = |flags: &[&str]| {
            let job = job(2, ShardingStrategy::FullShard, flags);
            let policy = policy.with_output_dtype(burn::tensor::FloatDType::F32);
            let options = FsdpOptions::new().with_mixed_precision(policy);
            let scaler = Some(GradScalerConfig::new().with_init_scale(LOSS_SCALE));
            Job { options, scaler, ..job }
        };
        let all = run(2, half(&[])).losses;
        assert!(all.len() == 9 && all.iter().all(|loss| loss.is_finite()), "{all:?}");
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().to_str().unwrap();
        run(2, half(&["--save-dir", folder, "--stop-after", "5"]));
        let manifest = home.path().join("step-00000005").join("manifest.json");
        let manifest = std::fs::read(manifest).unwrap();
        let manifest = Manifest::parse(&manifest, "manifest.json").unwrap();
        let scale = manifest.progress.loss_scale.expect("a scale");
        assert!(scale < LOSS_SCALE, "some steps overflowed: {scale}");
        assert_eq!(run(2, half(&["--resume", folder])).losses, all[5..]);
    }
}
