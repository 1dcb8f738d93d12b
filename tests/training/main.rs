//! Sharded training has the results of unsharded training under every option, or ends with a typed
//! error.

#[path = "../support/mod.rs"]
mod support;

mod activation_checkpointing;
mod adadelta;
mod buffer_dtype;
mod config;
mod context_parallel;
mod exchange;
mod failures;
mod gather_in_place;
mod language_model;
mod linear;
mod llama;
mod lora;
mod mean_over_tokens;
mod memory_file;
mod memory_timeline;
mod mixed_dtypes;
mod mixed_precision;
mod offload;
mod optimizer_check;
mod parity;
mod quantized;
mod saved_activations;
mod split_llama;
mod storage;
mod strategies;
mod tensor_parallel;
mod unshard;
mod whole_param;
mod wrong_loss;
