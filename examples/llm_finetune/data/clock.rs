//! Time of the function `strftime_now` of chat templates.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// 1970-01-01 was a Thursday.
const DAYS: [&str; 7] =
    ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// A moment, in UTC. Python's `datetime.now()` is in local time, so that the date may differ from
/// transformers' in the hours around midnight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Seconds since 1970-01-01.
    seconds: i64,
}

/// Parts of a date and a time.
#[derive(Clone, Copy, Debug)]
struct Parts {
    year: i64,
    /// From 1.
    month: i64,
    /// From 1.
    day: i64,
    /// From 1.
    day_of_year: i64,
    /// From 0, Thursday.
    weekday: i64,
    hour: i64,
    minute: i64,
    second: i64,
}

impl Moment {
    /// Returns the present.
    pub fn now() -> Self {
        let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::from_unix(i64::try_from(elapsed.as_secs()).unwrap_or(0))
    }

    /// Returns the moment that is this many seconds after 1970-01-01, in UTC.
    pub fn from_unix(seconds: i64) -> Self {
        Self { seconds }
    }

    /// Formats the moment as `strftime` in English.
    ///
    /// # Errors
    ///
    /// If the format has an unknown directive.
    pub fn format(self, format: &str) -> Result<String, Error> {
        let parts = self.parts();
        let mut text = String::new();
        let mut rest = format.chars();
        while let Some(character) = rest.next() {
            if character != '%' {
                text.push(character);
                continue;
            }
            let directive = rest.next();
            // `%-d` is `%d` without padding.
            let padded = directive != Some('-');
            let directive = if padded { directive } else { rest.next() };
            let piece = directive.and_then(|directive| parts.directive(directive));
            let piece = piece.ok_or_else(|| {
                let message = format!("strftime_now: unknown directive in {format:?}");
                Error::new(ErrorKind::InvalidOperation, message)
            })?;
            let bare = piece.trim_start_matches(['0', ' ']);
            let bare = if bare.is_empty() { "0" } else { bare };
            text.push_str(if padded { &piece } else { bare });
        }
        Ok(text)
    }

    /// Converts days to a date. Source: Howard Hinnant, *chrono-Compatible Low-Level Date
    /// Algorithms*, `civil_from_days`.
    fn parts(self) -> Parts {
        let (days, second) = (self.seconds.div_euclid(86400), self.seconds.rem_euclid(86400));
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
        let year_of_era =
            (day_of_era - day_of_era / 1460 + day_of_era / 36524 - day_of_era / 146_096) / 365;
        // Years begin in March here, so that the leap day is the last.
        let from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * from_march + 2) / 153;
        let month = (month_from_march + 2) % 12 + 1;
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let first_of_march = 60 + i64::from(is_leap);
        let day_of_year = if month <= 2 { from_march - 305 } else { from_march + first_of_march };
        Parts {
            year,
            month,
            day: from_march - (153 * month_from_march + 2) / 5 + 1,
            day_of_year,
            weekday: days.rem_euclid(7),
            hour: second / 3600,
            minute: second / 60 % 60,
            second: second % 60,
        }
    }
}

impl Parts {
    fn directive(&self, directive: char) -> Option<String> {
        let two = |number: i64| format!("{number:02}");
        let name = |names: &[&str], at: i64| names[at as usize].to_string();
        let short = |name: String| name[..3].to_string();
        let hour = (self.hour + 11) % 12 + 1;
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => two(self.year.rem_euclid(100)),
            'm' => two(self.month),
            'd' => two(self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year),
            'H' => two(self.hour),
            'I' => two(hour),
            'M' => two(self.minute),
            'S' => two(self.second),
            'p' => if self.hour < 12 { "AM" } else { "PM" }.into(),
            'B' => name(&MONTHS, self.month - 1),
            'b' | 'h' => short(name(&MONTHS, self.month - 1)),
            'A' => name(&DAYS, self.weekday),
            'a' => short(name(&DAYS, self.weekday)),
            'F' => format!("{}-{}-{}", self.year, two(self.month), two(self.day)),
            'T' => format!("{}:{}:{}", two(self.hour), two(self.minute), two(self.second)),
            'Z' | 'z' => String::new(),
            '%' => "%".into(),
            _ => return None,
        })
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
