//! Data for fine-tuning: from files of conversations to batches in host memory.
//!
//! Modules import only those above them in this list:
//!
//! | module | content |
//! |---|---|
//! | `prefix`, `reason`, `report` | what is wrong with a row, and the counts of it |
//! | `message`, `row` | conversations, prompts with completions, and texts |
//! | `record`, `json_lines`, `parquet_rows`, `source` | rows of files |
//! | `clock`, `python_text`, `python_json`, `python_methods` | functions of chat templates |
//! | `special_tokens`, `template` | chat templates |
//! | `tokenizer`, `spans`, `encode` | tokens, and which of them count for the loss |
//! | `cache_file`, `prepare`, `dataset` | tokens in a file that is mapped into memory |
//! | `shuffle`, `split`, `packing`, `order`, `batch` | rows of a step on a rank |
//! | `bigram` | baseline for the perplexity |

pub mod batch;
pub mod bigram;
pub mod cache_file;
pub mod clock;
pub mod dataset;
pub mod encode;
#[cfg(test)]
mod fixture;
pub mod json_lines;
pub mod message;
pub mod order;
pub mod packing;
pub mod parquet_rows;
pub mod prefix;
pub mod prepare;
pub mod python_json;
pub mod python_methods;
pub mod python_text;
pub mod reason;
pub mod record;
pub mod report;
pub mod row;
pub mod shuffle;
pub mod source;
pub mod spans;
pub mod special_tokens;
pub mod split;
pub mod template;
#[cfg(test)]
mod tests;
pub mod tokenizer;

pub use batch::{HostBatch, IGNORED, PADDING, RowLength};
pub use bigram::bigram_perplexity;
pub use dataset::Dataset;
pub use encode::EncodeOptions;
pub use message::{Message, Role};
pub use order::{Cursor, Order, share, steps_per_epoch};
pub use packing::{Packing, Rows};
pub use prepare::{CacheUse, PrepareOptions};
pub use source::Source;
pub use split::split;
pub use tokenizer::ChatTokenizer;
