//! Log lines with fairseq's keys, in its order.
//!
//! As in fairseq, numbers are strings of six significant digits (Python's `{:g}`), except for
//! `epoch` and `update`. Values of `train_inner` are over the updates since the previous line, where
//! fairseq averages over a window of its own. As in fairseq, an overflow is not an update and not
//! part of any line.
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
//!
//! At the end of an epoch, the line of `train` has the same keys with the prefix `train_`, over the
//! epoch or the part of it since the run resumed, and the line of `valid` those of the evaluation.

use std::time::Instant;

use serde::Serialize;
use serde_json::Value;

/// Numbers of a log line. The keys get the line's prefix.
#[derive(Clone, Debug)]
pub struct LogLine {
    prefix: &'static str,
    numbers: Vec<(&'static str, Value)>,
}

impl Serialize for LogLine {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let name = |name: &str| match name {
            "epoch" => name.to_string(),
            name => format!("{}{name}", self.prefix),
        };
        to.collect_map(self.numbers.iter().map(|(key, value)| (name(key), value)))
    }
}

/// Gradient norm, duration and size of an update.
#[derive(Clone, Copy, Debug)]
pub struct UpdateStats {
    /// 2-norm of all gradients together, before clipping.
    pub norm: f64,
    /// Duration in seconds.
    pub seconds: f64,
    /// Number of samples, over all ranks.
    pub samples: usize,
}

/// State of the run at a log line.
#[derive(Clone, Copy, Debug)]
pub struct LogPosition {
    /// Number of updates.
    pub updates: usize,
    /// Current epoch, counted from 0.
    pub epoch: usize,
    /// Part of the epoch that is done, from 0 to 1.
    pub done: f64,
    /// Learning rate of the next update.
    pub lr: f64,
    /// Loss scale, in float16.
    pub loss_scale: Option<f32>,
    /// Free memory in bytes, if it is known.
    pub free: Option<usize>,
}

/// Result of an evaluation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Evaluation {
    /// Mean loss per word piece, in base e.
    pub loss: f64,
    /// Number of word pieces, over all ranks.
    pub words: f64,
    /// Number of samples, over all ranks.
    pub samples: f64,
    /// Number of steps, in each of which every rank takes a batch.
    pub steps: f64,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Collects the updates since the last log line, or since the start of the epoch.
#[derive(Debug)]
pub struct LogWindow {
    start: Instant,
    /// Time of the last line.
    last: Instant,
    prefix: &'static str,
    tokens_per_sample: usize,
    clip_norm: f64,
    updates: Vec<UpdateStats>,
    /// Seconds spent in overflows since the last line.
    overflowed: f64,
}

impl LogWindow {
    /// Starts the log of a run. A `clip_norm` of 0 means that gradients are not clipped. Keys get
    /// the prefix `prefix`.
    pub fn new(prefix: &'static str, tokens_per_sample: usize, clip_norm: f64) -> Self {
        let now = Instant::now();
        Self {
            start: now,
            last: now,
            prefix,
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
    pub fn line(&mut self, position: LogPosition, loss: f64) -> LogLine {
        let count = self.updates.len().max(1) as f64;
        let elapsed = self.last.elapsed().as_secs_f64().max(1e-9);
        let samples: usize = self.updates.iter().map(|update| update.samples).sum();
        let words = (samples * self.tokens_per_sample) as f64;
        let norm = self.updates.iter().map(|update| update.norm).sum::<f64>() / count;
        let clipped = self.updates.iter().filter(|update| update.norm > self.clip_norm).count();
        let seconds: f64 = self.updates.iter().map(|update| update.seconds).sum();
        let update = position.epoch as f64 + position.done;
        let text = |text: String| Some(Value::from(text));
        let numbers = [
            ("epoch", Some((position.epoch + 1).into())),
            // The line of an epoch has no such key.
            ("update", self.prefix.is_empty().then(|| ((update * 1e3).round() / 1e3).into())),
            ("loss", text(rounded(loss, 3))),
            ("ppl", text(rounded(loss.exp2(), 2))),
            ("wps", text(rounded(words / elapsed, 1))),
            ("ups", text(rounded(self.updates.len() as f64 / elapsed, 2))),
            ("wpb", text(rounded(words / count, 1))),
            ("bsz", text(rounded(samples as f64 / count, 1))),
            ("num_updates", text(position.updates.to_string())),
            ("lr", text(general(position.lr))),
            ("gnorm", text(rounded(norm, 3))),
            (
                "clip",
                (self.clip_norm > 0.0).then(|| rounded(100.0 * clipped as f64 / count, 1).into()),
            ),
            ("loss_scale", position.loss_scale.map(|scale| general(f64::from(scale)).into())),
            ("train_wall", text(rounded(std::mem::take(&mut self.overflowed) + seconds, 0))),
            ("gb_free", position.free.map(|free| rounded(gib(free), 1).into())),
            ("wall", text(rounded(self.start.elapsed().as_secs_f64(), 0))),
        ];
        self.updates.clear();
        self.last = Instant::now();
        let numbers = numbers.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
        LogLine { prefix: self.prefix, numbers }
    }
}

impl Evaluation {
    /// Returns the loss in base 2.
    pub fn loss_base_2(&self) -> f64 {
        self.loss / std::f64::consts::LN_2
    }

    /// Returns the line of an evaluation after the epoch `epoch`, counted from 0.
    pub fn line(&self, epoch: usize, updates: usize) -> LogLine {
        let loss = self.loss_base_2();
        let per_step = |sum: f64| rounded(sum / self.steps.max(1.0), 1).into();
        let numbers = vec![
            ("epoch", (epoch + 1).into()),
            ("loss", rounded(loss, 3).into()),
            ("ppl", rounded(loss.exp2(), 2).into()),
            ("wps", rounded(self.words / self.seconds.max(1e-9), 1).into()),
            ("wpb", per_step(self.words)),
            ("bsz", per_step(self.samples)),
            ("num_updates", updates.to_string().into()),
        ];
        LogLine { prefix: "valid_", numbers }
    }
}

impl LogLine {
    /// Returns the numbers of the line for TensorBoard, with names such as `valid/loss`.
    pub fn scalars(&self, logger: &str) -> Vec<(String, f64)> {
        let number = |value: &Value| match value {
            Value::String(text) => text.parse().ok(),
            value => value.as_f64(),
        };
        let named =
            |(key, value): &(&str, Value)| Some((format!("{logger}/{key}"), number(value)?));
        self.numbers.iter().filter_map(named).collect()
    }
}

fn gib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 30)
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

    /// The keys of a log line in fairseq's README, in its order, and `clip`, which it has with a bound.
    const KEYS: [&str; 16] = [
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

    fn keys(json: &str) -> Vec<String> {
        let bare = json.trim_matches(['{', '}']).split(',');
        bare.map(|part| part.split(':').next().unwrap().trim_matches('"').to_string()).collect()
    }

    fn place() -> LogPosition {
        let (lr, loss_scale, free) = (2e-5, Some(128.0), Some(3 << 29));
        LogPosition { updates: 11, epoch: 1, done: 0.5, lr, loss_scale, free }
    }

    #[test]
    fn a_line_has_fairseqs_keys_in_order() {
        let mut log = LogWindow::new("", 128, 1.0);
        for norm in [0.5, 2.5] {
            log.update(UpdateStats { norm, seconds: 2.0, samples: 16 });
        }
        log.overflow(3.0);
        let line = log.line(place(), 10.0);
        let json = serde_json::to_string(&line).unwrap();
        assert_eq!(keys(&json), KEYS);
        for part in [
            r#""epoch":2,"update":1.5,"loss":"10","ppl":"1024","#,
            r#""wpb":"2048","bsz":"16","num_updates":"11","lr":"2e-05","gnorm":"1.5","clip":"50","#,
            r#""train_wall":"7","gb_free":"1.5","#,
        ] {
            assert!(json.contains(part), "{json}");
        }
        let scalars = line.scalars("train_inner");
        assert_eq!(scalars.len(), KEYS.len());
        assert!(scalars.contains(&("train_inner/ppl".into(), 1024.0)), "{scalars:?}");
        log.clip_norm = 0.0;
        log.update(UpdateStats { norm: 1.0, seconds: 0.0, samples: 16 });
        let place = LogPosition { loss_scale: None, ..place() };
        let json = serde_json::to_string(&log.line(place, 1.0)).unwrap();
        assert!(
            !json.contains("clip") && !json.contains("scale") && json.contains(r#""gnorm":"1","#),
            "{json}"
        );
    }

    /// The keys of the two lines at the end of an epoch in fairseq's README.
    #[test]
    fn lines_of_an_epoch_have_prefixes() {
        let mut log = LogWindow::new("train_", 128, 0.0);
        log.update(UpdateStats { norm: 1.0, seconds: 1.0, samples: 16 });
        let train = serde_json::to_string(&log.line(place(), 2.0)).unwrap();
        let of_inner = KEYS.iter().filter(|key| !["update", "clip"].contains(key));
        let expected: Vec<_> = of_inner
            .map(|key| if *key == "epoch" { key.to_string() } else { format!("train_{key}") })
            .collect();
        assert_eq!(keys(&train), expected);
        let (loss, words) = (2.0 * std::f64::consts::LN_2, 600.0);
        let sums = Evaluation { loss, words, samples: 6.0, steps: 4.0, seconds: 2.0 };
        let valid = serde_json::to_string(&sums.line(1, 10)).unwrap();
        let expected = r#"{"epoch":2,"valid_loss":"2","valid_ppl":"4","valid_wps":"300","valid_wpb":"150","valid_bsz":"1.5","valid_num_updates":"10"}"#;
        assert_eq!(valid, expected);
    }
}
