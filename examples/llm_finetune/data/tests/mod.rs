//! Tests across modules.

mod caching;
mod encoding;
mod layout;
mod transformers;
