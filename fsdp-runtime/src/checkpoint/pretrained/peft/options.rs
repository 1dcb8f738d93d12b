//! Options of saving adapters.

use super::super::options::{SaveDtype, SavePretrained};

/// Options of [`State::save_adapters`](crate::checkpoint::State::save_adapters).
#[derive(Clone, Debug)]
#[must_use]
pub struct SaveAdapters {
    /// Element type and additional files.
    pub(super) files: SavePretrained,
    pub(super) base_model: Option<String>,
    pub(super) task_type: Option<String>,
}

impl Default for SaveAdapters {
    fn default() -> Self {
        Self::new()
    }
}

impl SaveAdapters {
    /// Returns the default options: f32, no task type, no name of a base model, and no additional
    /// files.
    pub fn new() -> Self {
        Self { files: SavePretrained::new(), base_model: None, task_type: None }
    }

    /// Sets `base_model_name_or_path`, from which PEFT loads the base model.
    pub fn with_base_model(mut self, name: impl Into<String>) -> Self {
        self.base_model = Some(name.into());
        self
    }

    /// Sets `task_type`, which chooses PEFT's class of the model: `SEQ_CLS`, `CAUSAL_LM` and so on.
    pub fn with_task_type(mut self, task: impl Into<String>) -> Self {
        self.task_type = Some(task.into());
        self
    }

    /// Sets the element type to write.
    pub fn with_dtype(mut self, dtype: SaveDtype) -> Self {
        self.files = self.files.with_dtype(dtype);
        self
    }

    /// Adds a file to write next to the adapters, such as `tokenizer.json`. Rank 0's contents are
    /// written.
    pub fn with_file(mut self, name: impl Into<String>, contents: impl Into<Vec<u8>>) -> Self {
        self.files = self.files.with_file(name, contents);
        self
    }
}
