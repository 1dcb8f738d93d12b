//! Time of the function `strftime_now` of chat templates.

use std::time::{SystemTime, UNIX_EPOCH};

use chrono::format::{Fixed, Item, StrftimeItems};
use chrono::{DateTime, NaiveDateTime};
use minijinja::{Error, ErrorKind};

/// A moment, in UTC. Python's `datetime.now()` is in local time, so that the date may differ from
/// transformers' in the hours around midnight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment(NaiveDateTime);

impl Moment {
    /// Returns the present.
    pub fn now() -> Self {
        let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::from_unix(i64::try_from(elapsed.as_secs()).unwrap_or(0))
    }

    /// Returns the moment that is this many seconds after 1970-01-01, in UTC.
    pub fn from_unix(seconds: i64) -> Self {
        Self(DateTime::from_timestamp(seconds, 0).unwrap_or_default().naive_utc())
    }

    /// Formats the moment as `strftime` in English. The time zone is empty, as Python's `datetime.now()` has
    /// none.
    ///
    /// # Errors
    ///
    /// If the format has an unknown directive.
    pub fn format(self, format: &str) -> Result<String, Error> {
        let of_zone = |item: &Item<'_>| {
            matches!(item, Item::Fixed(Fixed::TimezoneName | Fixed::TimezoneOffset))
        };
        let items: Vec<_> = StrftimeItems::new(format).filter(|item| !of_zone(item)).collect();
        if items.contains(&Item::Error) {
            let message = format!("strftime_now: unknown directive in {format:?}");
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
        Ok(self.0.format_with_items(items.into_iter()).to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // The expected texts are those of Python's `datetime.fromtimestamp(.., UTC).strftime`.
    #[test]
    fn dates_are_those_of_python() {
        let format = "%Y-%m-%d %H:%M:%S %I%p %j %A %B %-d %e %y %a %b %%";
        for (seconds, expected) in [
            (0, "1970-01-01 00:00:00 12AM 001 Thursday January 1  1 70 Thu Jan %"),
            (951_786_061, "2000-02-29 01:01:01 01AM 060 Tuesday February 29 29 00 Tue Feb %"),
            (1_735_689_599, "2024-12-31 23:59:59 11PM 366 Tuesday December 31 31 24 Tue Dec %"),
            (1_796_000_400, "2026-11-30 01:00:00 01AM 334 Monday November 30 30 26 Mon Nov %"),
        ] {
            assert_eq!(Moment::from_unix(seconds).format(format).unwrap(), expected);
        }
        assert!(Moment::from_unix(0).format("%Q").is_err());
        assert!(Moment::from_unix(0).format("%").is_err());
    }
}
