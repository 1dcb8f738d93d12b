//! The file in which CubeCL keeps compiled kernels and tuned products from one process to the next.
//!
//! CubeCL opens one file by name, `default.db` in most cases, in every process. It is not safe to share:
//! processes that tune into one file at a time leave it in a state in which CubeCL panics on the thread of
//! a device, in this run and in later ones. So each process takes a file of its own, which a lock reserves
//! until the process ends: the file that CubeCL names, or the first of `default-1.db`, `default-2.db` and so
//! on that no other process has. The ranks of a later run take the same files, in any order. A file that
//! cannot be read is set aside.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl_environment::environment;

/// Most files of one folder.
const MOST_FILES: usize = 1024;

/// Takes a file for this process. Later calls have no effect.
///
/// Without a folder that can be written, CubeCL's own choice stays.
pub(super) fn claim() {
    static LOCK: OnceLock<Option<File>> = OnceLock::new();
    LOCK.get_or_init(|| {
        // Names the file, and the folder.
        let _ = CubeClRuntimeConfig::get();
        match claim_from(&environment::path()) {
            Ok((path, lock)) => {
                environment::load(path);
                Some(lock)
            }
            Err(error) => {
                tracing::debug!("no file for compiled kernels: {error}");
                None
            }
        }
    });
}

/// Reserves the first file that no other process has, and sets it aside if it is broken. The lock holds as
/// long as the returned file is open.
fn claim_from(first: &Path) -> io::Result<(PathBuf, File)> {
    if let Some(folder) = first.parent() {
        fs::create_dir_all(folder)?;
    }
    for number in 0..MOST_FILES {
        let path = numbered(first, number);
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(with_suffix(&path, ".lock"))?;
        match lock.try_lock() {
            Ok(()) => {
                set_aside_if_broken(&path);
                return Ok((path, lock));
            }
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Err(io::Error::other(format!("{MOST_FILES} processes have a file beside {}", first.display())))
}

/// Returns the path with a number after its stem; number 0 is the path itself.
fn numbered(path: &Path, number: usize) -> PathBuf {
    let part =
        |part: Option<&std::ffi::OsStr>| part.unwrap_or_default().to_string_lossy().into_owned();
    match number {
        0 => path.to_path_buf(),
        _ => {
            let (stem, extension) = (part(path.file_stem()), part(path.extension()));
            path.with_file_name(format!("{stem}-{number}.{extension}"))
        }
    }
}

/// Returns the path with more at its end.
fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Renames a file that cannot be read, with its log, and warns. The kernels are compiled again.
fn set_aside_if_broken(path: &Path) {
    let Err(reason) = check(path) else { return };
    let aside = with_suffix(path, ".broken");
    let renamed = fs::rename(path, &aside);
    for log in ["-wal", "-shm"] {
        // Most files have none.
        let _ = fs::remove_file(with_suffix(path, log));
    }
    match renamed {
        Ok(()) => tracing::warn!(
            "the file of compiled kernels {} cannot be read ({reason}): it is now {}, and kernels are \
             compiled again",
            path.display(),
            aside.display()
        ),
        Err(error) => tracing::warn!(
            "the file of compiled kernels {} cannot be read ({reason}) or renamed ({error}): remove it",
            path.display()
        ),
    }
}

/// First bytes of a database in SQLite's format.
const MAGIC: &[u8] = b"SQLite format 3\0";

/// Returns why a file that exists is no whole database.
fn check(path: &Path) -> Result<(), String> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error.to_string()),
    };
    let size = file.metadata().map_err(|error| error.to_string())?.len();
    if size == 0 {
        return Ok(());
    }
    let mut header = [0; 32];
    file.read_exact(&mut header).map_err(|_| format!("it has {size} bytes only"))?;
    if !header.starts_with(MAGIC) {
        return Err("it is no database".into());
    }
    // Two bytes from 16 on are the length of a page, of which 1 stands for 65,536; four from 28 on are the
    // number of pages.
    let page = match u16::from_be_bytes([header[16], header[17]]) {
        1 => 65_536,
        page => u64::from(page),
    };
    let pages = u64::from(u32::from_be_bytes([header[28], header[29], header[30], header[31]]));
    if size < page * pages {
        return Err(format!("it has {size} bytes of {}", page * pages));
    }
    drop(file);
    read_all(path)
}

/// Reads all entries. CubeCL's database panics at some broken files.
#[cfg(feature = "persistence")]
fn read_all(path: &Path) -> Result<(), String> {
    use cubecl_environment::persistence::{Access, Database};
    let read = || {
        let database = Database::open_at(path, Access::ReadOnly)?;
        for namespace in database.namespaces() {
            database.scan(&namespace, &mut |_, _| {});
        }
        Ok(())
    };
    std::panic::catch_unwind(read).unwrap_or_else(|_| Err("a panic while it was read".into()))
}

#[cfg(not(feature = "persistence"))]
fn read_all(_: &Path) -> Result<(), String> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Header of a database of three pages.
    fn database() -> Vec<u8> {
        let mut bytes = vec![0; 3 * 4096];
        bytes[..16].copy_from_slice(MAGIC);
        bytes[16..18].copy_from_slice(&4096u16.to_be_bytes());
        bytes[28..32].copy_from_slice(&3u32.to_be_bytes());
        bytes
    }

    #[test]
    fn each_claim_has_a_file_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let first = folder.path().join("deep/default.db");
        let claims: Vec<_> = (0..3).map(|_| claim_from(&first).unwrap()).collect();
        let names: Vec<_> = claims.iter().map(|(path, _)| path.file_name().unwrap()).collect();
        assert_eq!(names, ["default.db", "default-1.db", "default-2.db"]);
        // A file whose process has ended is free again.
        let mut claims = claims;
        claims.remove(1);
        assert_eq!(claim_from(&first).unwrap().0.file_name().unwrap(), "default-1.db");
    }

    #[test]
    fn a_file_that_is_cut_or_overwritten_is_set_aside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("default.db");
        let [mut cut, mut overwritten, short] = [database(), database(), vec![7; 5]];
        cut.truncate(2 * 4096 + 100);
        overwritten[..100].fill(0x5a);
        for (content, reason) in
            [(cut, "8292 bytes of 12288"), (overwritten, "no database"), (short, "5 bytes only")]
        {
            fs::write(&path, &content).unwrap();
            assert!(check(&path).unwrap_err().contains(reason));
            let (claimed, _lock) = claim_from(&path).unwrap();
            assert_eq!((claimed.exists(), claimed), (false, path.clone()));
            assert_eq!(fs::read(with_suffix(&path, ".broken")).unwrap(), content);
        }
    }

    #[test]
    fn a_missing_and_an_empty_file_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("default.db");
        assert_eq!(check(&path), Ok(()));
        fs::write(&path, []).unwrap();
        assert_eq!(check(&path), Ok(()));
    }
}
