//! Log lines in fairseq's format: one JSON object per line, with fairseq's keys in its order.
//!
//! As in fairseq, numbers are strings of six significant digits (Python's `{:g}`), except for
//! `epoch` and `update`. Values are over the updates since the previous line, where fairseq
//! averages over a window of its own. As in fairseq, an overflow is not an update and not part of
//! any line.
//!
//! | key | value |
//! |---|---|
//! | `epoch`, `update` | current epoch counted from 1, and number of epochs with a fraction |
//! | `loss`, `ppl` | loss per word piece in base 2, and 2 to the power of it |
//! | `wps`, `ups` | word pieces and updates per second |
//! | `wpb`, `bsz` | word pieces and samples in an update, over all ranks |
//! | `num_updates` | number of updates |
//! | `lr` | learning rate of the next update |
//! | `gnorm` | norm of all gradients before clipping |
//! | `clip` | percentage of updates that were clipped; absent without a bound |
//! | `loss_scale` | loss scale; present in float16 only |
//! | `train_wall` | seconds spent in updates and overflows |
//! | `gb_free` | free GiB of the GPU, or of the host for other devices; absent if not known |
//! | `wall` | seconds since the start |

use std::time::Instant;

use serde::Serialize;

/// Log line.
#[derive(Clone, Debug, Serialize)]
pub struct LogLine {
    epoch: usize,
    update: f64,
    loss: String,
    ppl: String,
    wps: String,
    ups: String,
    wpb: String,
    bsz: String,
    num_updates: String,
    lr: String,
    gnorm: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    clip: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    loss_scale: Option<String>,
    train_wall: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    gb_free: Option<String>,
    wall: String,
}

/// Gradient norm and duration of an update.
#[derive(Clone, Copy, Debug)]
pub struct UpdateStats {
    /// 2-norm of all gradients together, before clipping.
    pub norm: f64,
    /// Duration in seconds.
    pub seconds: f64,
}

/// State of the run at a log line.
#[derive(Clone, Copy, Debug)]
pub struct LogPosition {
    /// Number of updates.
    pub updates: usize,
    /// Number of updates and overflows: each takes the batches of one update from the text.
    pub batches: usize,
    /// Number of updates in an epoch.
    pub per_epoch: usize,
    /// Learning rate of the next update.
    pub lr: f64,
    /// Free memory in bytes, if it is known.
    pub free: Option<usize>,
}

/// Collects the updates since the last log line.
#[derive(Debug)]
pub struct LogWindow {
    start: Instant,
    /// Time of the last line.
    last: Instant,
    samples: usize,
    tokens_per_sample: usize,
    clip_norm: f64,
    updates: Vec<UpdateStats>,
    /// Seconds spent in overflows since the last line.
    overflowed: f64,
}

impl LogWindow {
    /// Starts the log of a run whose updates have `samples` samples over all ranks. A `clip_norm`
    /// of 0 means that gradients are not clipped.
    pub fn new(samples: usize, tokens_per_sample: usize, clip_norm: f64) -> Self {
        let now = Instant::now();
        Self {
            start: now,
            last: now,
            samples,
            tokens_per_sample,
            clip_norm,
            updates: Vec::new(),
            overflowed: 0.0,
        }
    }

    /// Records an update.
    pub fn update(&mut self, update: UpdateStats) {
        self.updates.push(update);
    }

    /// Records an overflow, and its duration in seconds.
    pub fn overflow(&mut self, seconds: f64) {
        self.overflowed += seconds;
    }

    /// Returns the line of the updates since the last line, and starts the next window. `loss` is
    /// their mean over all ranks, in base 2.
    pub fn line(&mut self, position: LogPosition, loss: f64, loss_scale: Option<f32>) -> LogLine {
        let LogPosition { updates, batches, per_epoch, lr, free } = position;
        let count = self.updates.len().max(1) as f64;
        let rate = count / self.last.elapsed().as_secs_f64().max(1e-9);
        let words = (self.samples * self.tokens_per_sample) as f64;
        let norm = self.updates.iter().map(|update| update.norm).sum::<f64>() / count;
        let clipped = self.updates.iter().filter(|update| update.norm > self.clip_norm).count();
        let clip = (self.clip_norm > 0.0).then(|| rounded(100.0 * clipped as f64 / count, 1));
        let seconds: f64 = self.updates.iter().map(|update| update.seconds).sum();
        let line = LogLine {
            epoch: batches.saturating_sub(1) / per_epoch + 1,
            update: (batches as f64 / per_epoch as f64 * 1e3).round() / 1e3,
            loss: rounded(loss, 3),
            ppl: rounded(loss.exp2(), 2),
            wps: rounded(rate * words, 1),
            ups: rounded(rate, 2),
            wpb: rounded(words, 1),
            bsz: rounded(self.samples as f64, 1),
            num_updates: updates.to_string(),
            lr: general(lr),
            gnorm: rounded(norm, 3),
            clip,
            loss_scale: loss_scale.map(|scale| general(f64::from(scale))),
            train_wall: rounded(std::mem::take(&mut self.overflowed) + seconds, 0),
            gb_free: free.map(|free| rounded(free as f64 / f64::from(1 << 30), 1)),
            wall: rounded(self.start.elapsed().as_secs_f64(), 0),
        };
        self.updates.clear();
        self.last = Instant::now();
        line
    }
}

/// Rounds a number to `digits` decimal digits and formats it.
fn rounded(number: f64, digits: i32) -> String {
    let unit = 10f64.powi(digits);
    general((number * unit).round() / unit)
}

/// Formats a number as Python's `{:g}`: six significant digits without trailing zeros, in
/// scientific notation below 1e-4 and from 1e6.
fn general(number: f64) -> String {
    const DIGITS: i32 = 6;
    if !number.is_finite() {
        return if number.is_nan() { "nan".into() } else { format!("{number}") };
    }
    let trim = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text.to_string(),
    };
    let scientific = format!("{number:.*e}", DIGITS as usize - 1);
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    let power: i32 = exponent.parse().unwrap_or(0);
    if (-4..DIGITS).contains(&power) {
        return trim(&format!("{number:.*}", (DIGITS - 1 - power) as usize));
    }
    let sign = if power < 0 { '-' } else { '+' };
    format!("{}e{sign}{:02}", trim(digits), power.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers are from the log in fairseq's README, and from `'{:g}'.format(..)` in Python.
    #[test]
    fn numbers_look_as_in_python() {
        for (number, expected) in [
            (16.475, "16.475"),
            (91120.8, "91120.8"),
            (3.906_91e7, "3.90691e+07"),
            (1.412_03e6, "1.41203e+06"),
            (16384.0, "16384"),
            (2e-5, "2e-05"),
            (1e-4, "0.0001"),
            (0.0, "0"),
            (-0.5, "-0.5"),
            (999_999.6, "1e+06"),
            (123_456.7, "123457"),
            (1e-10 / 3.0, "3.33333e-11"),
            (f64::NAN, "nan"),
            (f64::INFINITY, "inf"),
        ] {
            assert_eq!(general(number), expected);
        }
    }

    #[test]
    fn a_line_has_fairseqs_keys_in_order() {
        let mut log = LogWindow::new(16, 128, 1.0);
        for norm in [0.5, 2.5] {
            log.update(UpdateStats { norm, seconds: 2.0 });
        }
        log.overflow(3.0);
        let free = Some(3 << 29);
        let place = LogPosition { updates: 11, batches: 12, per_epoch: 8, lr: 2e-5, free };
        let line = log.line(place, 10.0, Some(128.0));
        let json = serde_json::to_string(&line).unwrap();
        let names = [
            "epoch",
            "update",
            "loss",
            "ppl",
            "wps",
            "ups",
            "wpb",
            "bsz",
            "num_updates",
            "lr",
            "gnorm",
            "clip",
            "loss_scale",
            "train_wall",
            "gb_free",
            "wall",
        ];
        let found = |name| json.find(&format!("\"{name}\":")).unwrap();
        let places: Vec<_> = names.into_iter().map(found).collect();
        assert!(places.is_sorted(), "{json}");
        for part in [
            r#""epoch":2,"update":1.5,"loss":"10","ppl":"1024","#,
            r#""wpb":"2048","bsz":"16","num_updates":"11","lr":"2e-05","gnorm":"1.5","clip":"50","#,
            r#""train_wall":"7","gb_free":"1.5","#,
        ] {
            assert!(json.contains(part), "{json}");
        }
        log.clip_norm = 0.0;
        log.update(UpdateStats { norm: 1.0, seconds: 0.0 });
        let json = serde_json::to_string(&log.line(place, 1.0, None)).unwrap();
        assert!(
            !json.contains("clip") && !json.contains("scale") && json.contains(r#""gnorm":"1","#),
            "{json}"
        );
    }
}
