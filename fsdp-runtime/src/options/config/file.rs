//! Reading and writing a [`Config`] as a file.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::error::{ConfigError, Note};
use super::overrides::{OVERRIDES_VARIABLE, Overrides};
use super::types::{CONFIG_VARIABLE, Config};
use super::{read, write};
use crate::launch::env::RankEnv;

impl Config {
    /// Reads a configuration file. The notes are the keys of the file that have no effect.
    ///
    /// # Errors
    ///
    /// - [`ConfigError::Read`] if the file cannot be read.
    /// - [`ConfigError::Syntax`] if it is not YAML.
    /// - [`ConfigError::Invalid`] with every unknown key, unknown value and contradiction.
    pub fn read(path: impl AsRef<Path>) -> Result<(Self, Vec<Note>), ConfigError> {
        Self::read_with(Some(path.as_ref()), &Overrides::default())
    }

    /// Reads a configuration file, or none, and replaces its values by `overrides`. The notes are
    /// the keys that have no effect, those that are replaced included.
    ///
    /// # Errors
    ///
    /// Those of [`read`](Self::read).
    pub fn read_with(
        path: Option<&Path>,
        overrides: &Overrides,
    ) -> Result<(Self, Vec<Note>), ConfigError> {
        let Some(path) = path else { return read::read("", Path::new(""), overrides) };
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.into(), source })?;
        read::read(&text, path, overrides)
    }

    /// Reads the text of a file. Errors name the file as `path`.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Syntax`] or [`ConfigError::Invalid`], as [`read`](Self::read).
    pub fn parse(text: &str, path: impl AsRef<Path>) -> Result<(Self, Vec<Note>), ConfigError> {
        read::read(text, path.as_ref(), &Overrides::default())
    }

    /// Reads the configuration of `fsdp launch`: the file that [`CONFIG_VARIABLE`] names, with the
    /// values of the command line in [`OVERRIDES_VARIABLE`]. Returns `None` if neither variable is
    /// set. If this process is a rank, `num_processes` is the number of ranks that were started.
    ///
    /// # Errors
    ///
    /// Those of [`read`](Self::read).
    pub fn from_env() -> Result<Option<(Self, Vec<Note>)>, ConfigError> {
        Self::from_variables(|name| std::env::var_os(name))
    }

    pub(super) fn from_variables(
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Option<(Self, Vec<Note>)>, ConfigError> {
        let set = |name| variable(name).filter(|value| !value.is_empty());
        let (path, flags) = (set(CONFIG_VARIABLE).map(PathBuf::from), set(OVERRIDES_VARIABLE));
        if path.is_none() && flags.is_none() {
            return Ok(None);
        }
        let overrides = flags.map(|text| Overrides::from_variable(&text.to_string_lossy()));
        let overrides = overrides.transpose()?.unwrap_or_default();
        let (mut config, notes) = Self::read_with(path.as_deref(), &overrides)?;
        // Errors in the rank's variables are left to `RankEnv::read`, which the program calls too.
        if let Ok(Some(env)) = RankEnv::from_variables(variable) {
            config.num_processes = Some(env.world.size());
        }
        Ok(Some((config, notes)))
    }

    /// Writes a file that Accelerate reads too. Creates its directory if it does not exist.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Write`].
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), ConfigError> {
        let path = path.as_ref();
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        directory
            .map_or(Ok(()), std::fs::create_dir_all)
            .and_then(|()| std::fs::write(path, self.to_yaml()))
            .map_err(|source| ConfigError::Write { path: path.into(), source })
    }

    /// Returns the text of a file that Accelerate reads too.
    pub fn to_yaml(&self) -> String {
        write::to_yaml(self)
    }
}
