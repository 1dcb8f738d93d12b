//! fairseq's log lines: one JSON object each, with its keys in its order.
//!
//! As in fairseq, numbers are strings of six significant digits (Python's `{:g}`), but for `epoch` and
//! `update`, which counts epochs in parts; `loss` is a word piece's in base 2 and `ppl` is 2 to its
//! power; `wpb` and `bsz` are the word pieces and the samples of an update over all ranks, `wps` and
//! `ups` word pieces and updates a second; `lr` is the next update's; `clip` is how many updates in a
//! hundred were clipped, and not there without a bound; `loss_scale` is there in float16;
//! `train_wall` are the seconds spent in updates and overflows, `wall` those since the start. What
//! fairseq averages over a window of its own is of the updates since the line before. As there, a batch
//! whose gradients overflow is no update and in no line. `gb_free` is the GPU's memory, or, of other devices, the
//! machine's, and not there where the system does not tell.

use std::time::Instant;

use serde::Serialize;

/// One line.
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

/// What an update was like.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// Norm of all gradients before clipping.
    pub norm: f64,
    /// Seconds it took.
    pub seconds: f64,
}

/// Where in the run a line stands.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Updates made.
    pub updates: usize,
    /// What was taken for them of the text, in updates: overflows have used theirs up.
    pub batches: usize,
    /// Updates in an epoch.
    pub per_epoch: usize,
    /// The next update's learning rate.
    pub lr: f64,
    /// Bytes that are free, where the system tells.
    pub free: Option<usize>,
}

/// Makes the lines of a run.
#[derive(Debug)]
pub struct Log {
    start: Instant,
    last: Instant,
    samples: usize,
    tokens_per_sample: usize,
    clip_norm: f64,
    since: Vec<Update>,
    /// Seconds spent on batches that overflowed.
    overflowed: f64,
}

impl Log {
    /// For updates of `samples` samples over all ranks, clipped to `clip_norm` unless that is 0.
    pub fn new(samples: usize, tokens_per_sample: usize, clip_norm: f64) -> Self {
        let now = Instant::now();
        let since = Vec::new();
        Self {
            start: now,
            last: now,
            samples,
            tokens_per_sample,
            clip_norm,
            since,
            overflowed: 0.0,
        }
    }

    /// Takes note of an update.
    pub fn update(&mut self, update: Update) {
        self.since.push(update);
    }

    /// Takes note of a batch that overflowed, and the seconds it took.
    pub fn overflow(&mut self, seconds: f64) {
        self.overflowed += seconds;
    }

    /// The line of the updates since the last one, whose mean loss over all ranks is `loss`.
    pub fn line(&mut self, place: Place, loss: f64, loss_scale: Option<f32>) -> LogLine {
        let Place { updates, batches, per_epoch, lr, free } = place;
        let count = self.since.len().max(1) as f64;
        let rate = count / self.last.elapsed().as_secs_f64().max(1e-9);
        let words = (self.samples * self.tokens_per_sample) as f64;
        let norm = self.since.iter().map(|update| update.norm).sum::<f64>() / count;
        let clipped = self.since.iter().filter(|update| update.norm > self.clip_norm).count();
        let clip = (self.clip_norm > 0.0).then(|| rounded(100.0 * clipped as f64 / count, 1));
        let in_updates: f64 = self.since.iter().map(|update| update.seconds).sum();
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
            train_wall: rounded(std::mem::take(&mut self.overflowed) + in_updates, 0),
            gb_free: free.map(|free| rounded(free as f64 / f64::from(1 << 30), 1)),
            wall: rounded(self.start.elapsed().as_secs_f64(), 0),
        };
        self.since.clear();
        self.last = Instant::now();
        line
    }
}

fn rounded(number: f64, digits: i32) -> String {
    let unit = 10f64.powi(digits);
    general((number * unit).round() / unit)
}

/// Python's `{:g}`: six significant digits without zeros at the end, in powers of ten below 1e-4 and
/// from a million on.
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

    /// Numbers of the log in fairseq's README, and `'{:g}'.format(..)` of others.
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
        let mut log = Log::new(16, 128, 1.0);
        for norm in [0.5, 2.5] {
            log.update(Update { norm, seconds: 2.0 });
        }
        log.overflow(3.0);
        let free = Some(3 << 29);
        let place = Place { updates: 11, batches: 12, per_epoch: 8, lr: 2e-5, free };
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
        log.update(Update { norm: 1.0, seconds: 0.0 });
        let json = serde_json::to_string(&log.line(place, 1.0, None)).unwrap();
        assert!(
            !json.contains("clip") && !json.contains("scale") && json.contains(r#""gnorm":"1","#),
            "{json}"
        );
    }
}
