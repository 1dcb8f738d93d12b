//! The forms of a file of memory over time, by its extension.

use std::path::{Path, PathBuf};

use crate::param_group::memory::{MemoryForecast, MemoryTimeline};

/// A file of memory over time that cannot be written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryFileError {
    /// A name that does not say which form the file has.
    #[error(
        "memory over time is written as .svg, .html or .json, and {} has none of these extensions",
        path.display()
    )]
    UnknownForm {
        /// Path of the file.
        path: PathBuf,
    },
    /// A picture, in a build without the feature `plot`.
    #[error(
        "{} is a picture, and this build has no feature `plot`; add the feature, or write .json",
        path.display()
    )]
    NoPictures {
        /// Path of the file.
        path: PathBuf,
    },
    /// A record that was ended before the file was written.
    #[error(
        "the record of memory over time for {} was ended with `stop_memory_timeline`; leave that to the \
         `MemoryFile`",
        path.display()
    )]
    NotRecorded {
        /// Path of the file.
        path: PathBuf,
    },
    /// An error of the operating system.
    #[error("cannot write the memory over time to {}: {reason}", path.display())]
    Write {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        reason: String,
    },
}

/// Form of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Svg,
    Html,
    Json,
}

impl Form {
    /// Returns the form that the extension of a path asks for.
    pub(super) fn of(path: &Path) -> Result<Self, MemoryFileError> {
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or("");
        let form = match extension.to_ascii_lowercase().as_str() {
            "svg" => Self::Svg,
            "html" | "htm" => Self::Html,
            "json" => return Ok(Self::Json),
            _ => return Err(MemoryFileError::UnknownForm { path: path.into() }),
        };
        if !cfg!(feature = "plot") {
            return Err(MemoryFileError::NoPictures { path: path.into() });
        }
        Ok(form)
    }
}

impl MemoryTimeline {
    /// Checks that [`write`](Self::write) knows the form of a file, by its extension.
    ///
    /// # Errors
    ///
    /// [`MemoryFileError`] for an unknown extension, and for a picture without the feature `plot`.
    pub fn check_path(path: impl AsRef<Path>) -> Result<(), MemoryFileError> {
        Form::of(path.as_ref()).map(|_| ())
    }

    /// Writes the record to a file: a picture as [`to_svg`](Self::to_svg) for `.svg`, a page as
    /// [`to_html`](Self::to_html) for `.html`, data as [`to_json`](Self::to_json) for `.json`.
    ///
    /// # Errors
    ///
    /// [`MemoryFileError`] for another extension, for a picture without the feature `plot`, or if the
    /// file cannot be written.
    pub fn write(
        &self,
        path: impl AsRef<Path>,
        title: &str,
        forecast: Option<&MemoryForecast>,
    ) -> Result<(), MemoryFileError> {
        let path = path.as_ref();
        let text = match Form::of(path)? {
            Form::Json => self.to_json(title, forecast),
            #[cfg(feature = "plot")]
            Form::Svg => self.to_svg(title, forecast),
            #[cfg(feature = "plot")]
            Form::Html => self.to_html(title, forecast),
            #[cfg(not(feature = "plot"))]
            Form::Svg | Form::Html => unreachable!("`Form::of` refuses pictures"),
        };
        std::fs::write(path, text).map_err(|error| MemoryFileError::Write {
            path: path.into(),
            reason: error.to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_extension_names_the_form() {
        assert_eq!(Form::of(Path::new("a.b.json")), Ok(Form::Json));
        for name in ["memory", "memory.png", ".svg", "svg"] {
            let error = Form::of(Path::new(name)).unwrap_err();
            assert_eq!(error, MemoryFileError::UnknownForm { path: name.into() });
            assert!(error.to_string().contains(name) && error.to_string().contains(".html"));
        }
        let pictures = [Form::of(Path::new("a.SVG")), Form::of(Path::new("a/b.html"))];
        match cfg!(feature = "plot") {
            true => assert_eq!(pictures, [Ok(Form::Svg), Ok(Form::Html)]),
            false => assert!(pictures.iter().all(Result::is_err)),
        }
    }
}
