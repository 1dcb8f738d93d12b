//! The host values that ranks can exchange.

use std::any::Any;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// A value that ranks exchange: by reference between threads, serialised between processes.
pub(crate) trait Message: Any + Send + Sync + Serialize + DeserializeOwned {}

impl<T: Any + Send + Sync + Serialize + DeserializeOwned> Message for T {}
