//! The directory in which programs cache what they derive from data.

use std::path::{Path, PathBuf};

/// Returns the directory to cache in: the given one, none for `none`, or by default `fsdp-burn` in the
/// user's cache directory.
pub fn cache_folder(given: Option<&Path>) -> Option<PathBuf> {
    let home = || std::env::home_dir().map(|home| home.join(".cache"));
    match given {
        Some(none) if none.as_os_str() == "none" => None,
        Some(folder) => Some(folder.to_path_buf()),
        None => {
            let cache = std::env::var_os("XDG_CACHE_HOME").filter(|folder| !folder.is_empty());
            Some(cache.map(PathBuf::from).or_else(home)?.join("fsdp-burn"))
        }
    }
}
