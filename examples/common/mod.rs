//! Code that the examples share: memory allocator, devices by name, shared command-line arguments,
//! adapters, memory over time, checkpoints and Ctrl-C, a note about a configuration file, report format, TensorBoard's event files, and the steps of a training loop that do not depend on the model.
//!
//! Each example includes this module with `#[path = "../common/mod.rs"]`.

pub mod allocator;
pub mod args;
#[allow(dead_code, reason = "`mnist` and `bert_finetune` cache nothing")]
pub mod cache_folder;
#[allow(dead_code, reason = "`mnist` saves no checkpoints")]
pub mod checkpoints;
#[allow(dead_code, reason = "most examples read the file")]
pub mod config_file;
pub mod device;
#[allow(dead_code, reason = "`mnist` and `gpt_pretrain` have settings of their own")]
pub mod launch_settings;
#[allow(dead_code, reason = "`mnist` and `gpt_pretrain` have schedules of their own")]
pub mod learning_rate;
#[allow(dead_code, reason = "`mnist` has no log file")]
pub mod log_file;
#[allow(dead_code, reason = "`mnist` has no adapters")]
pub mod lora;
#[allow(dead_code, reason = "`mnist` draws its own pictures")]
pub mod memory;
pub mod parse;
#[allow(dead_code, reason = "`mnist` has no plan")]
pub mod plan;
#[allow(dead_code, reason = "`mnist` and `gpt_pretrain` have log lines of their own")]
pub mod progress;
#[cfg(test)]
#[allow(dead_code, reason = "`mnist` is compared with no program")]
pub mod python;
pub mod report;
#[allow(dead_code, reason = "`mnist` and `bert_finetune` generate no text")]
pub mod sampling;
#[allow(dead_code, reason = "`mnist` and `gpt_pretrain` have checkpoints of their own")]
pub mod saver;
#[allow(dead_code, reason = "`mnist` has no event files")]
pub mod tensorboard;
#[allow(dead_code, reason = "`mnist` has no tokenizer")]
pub mod tokenizers;
#[allow(dead_code, reason = "`mnist` has no trace")]
pub mod trace;
pub mod training;
