//! Figures of speed that are in several pages are the same in all of them.
//!
//! The tables of `performance.md` are the source: a section for each device, a row for each
//! measurement. The README and `gpu.md` repeat ratios of times, and `limits.md` that of attention.

use super::{matches, page, rows, text};

/// The head of the tables that compare this crate with PyTorch.
const HEAD: &str = "| measurement | ours | PyTorch | ours / PyTorch | date |";
const BERT_ON_CPU: &str = "BERT step; FSDP2";
const BERT_ON_GPU: &str = "BERT-base step";
const GPT: &str = "GPT 1.3B";
const OFFLOADED_GPT: &str = "GPT 6.7B";

/// A row of a table of `performance.md`.
struct Figure {
    /// The heading of the device.
    device: String,
    measurement: String,
    ours: String,
    theirs: String,
    /// Our time divided by PyTorch's.
    ratio: String,
}

/// Returns the rows of `performance.md` that compare this crate with PyTorch.
fn figures() -> Vec<Figure> {
    let page = page("performance");
    let mut found = Vec::new();
    for section in page.split("\n### ").skip(1) {
        let section = section.split("\n## ").next().unwrap_or_default();
        let device = section.lines().next().unwrap_or_default();
        assert!(section.contains(HEAD), "{device} has no table with the head `{HEAD}`");
        for row in rows(section) {
            let [measurement, ours, theirs, ratio, date]: [String; 5] =
                row.try_into().unwrap_or_else(|row| panic!("{device}: not five cells: {row:?}"));
            assert!(date.contains("20"), "{device}: {measurement} has no date");
            let device = device.to_string();
            found.push(Figure { device, measurement, ours, theirs, ratio });
        }
    }
    assert!(found.len() >= 25, "{} rows in performance.md", found.len());
    found
}

/// Returns the ratio of a measurement on the only device whose heading contains `device`.
fn ratio(figures: &[Figure], device: &str, measurement: &str) -> String {
    let found: Vec<&Figure> = figures
        .iter()
        .filter(|figure| figure.device.contains(device) && figure.measurement == measurement)
        .collect();
    assert_eq!(found.len(), 1, "rows `{measurement}` of {device}");
    let ratio = found[0].ratio.clone();
    assert_eq!(numbers(&ratio).len(), 1, "`{measurement}` of {device}: {ratio}");
    ratio
}

/// Returns the smallest and the largest ratio of the figures for which `wanted` holds.
fn range(figures: &[Figure], least: usize, wanted: impl Fn(&Figure) -> bool) -> (f64, f64) {
    let found: Vec<&Figure> = figures.iter().filter(|figure| wanted(figure)).collect();
    assert!(found.len() >= least, "{} rows, not {least}", found.len());
    let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
    for figure in found {
        let ratios = numbers(&figure.ratio);
        assert!(!ratios.is_empty(), "no ratio of `{}` on {}", figure.measurement, figure.device);
        for ratio in ratios {
            low = low.min(ratio);
            high = high.max(ratio);
        }
    }
    (low, high)
}

/// Returns the range of the BERT step on processors with AVX-512, beside FSDP2, as pages state it.
fn bert_with_avx512(figures: &[Figure]) -> String {
    let (low, high) = range(figures, 4, |figure| {
        figure.device.contains("AVX-512") && figure.measurement == BERT_ON_CPU
    });
    format!("{low:.2} to {high:.2}")
}

/// Returns the range of attention on the H200, as pages state it.
fn attention_on_h200(figures: &[Figure]) -> String {
    let (low, high) = range(figures, 6, |figure| {
        figure.device.contains("H200") && figure.measurement.starts_with("attention")
    });
    format!("{low:.1} to {high:.1}")
}

/// Returns the numbers of a text, such as 1234.5 for `1,234.5 ms`.
fn numbers(text: &str) -> Vec<f64> {
    text.split_whitespace()
        .filter_map(|word| word.trim_end_matches(',').replace(',', "").parse().ok())
        .collect()
}

/// Returns the numbers and ranges before each word `times` of a text, such as `0.2 to 0.4`.
fn factors(text: &str) -> Vec<String> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut found = Vec::new();
    for (at, word) in words.iter().enumerate() {
        if word.trim_end_matches(['.', ',', ';']) != "times" {
            continue;
        }
        found.push(match &words[..at] {
            [.., low, "to", high] => format!("{low} to {high}"),
            [.., one] => (*one).to_string(),
            [] => String::new(),
        });
    }
    found
}

/// Returns the paragraph that begins with `start`, in one line.
fn paragraph(text: &str, start: &str) -> String {
    let mut found = text.split("\n\n").filter(|part| part.starts_with(start));
    let part = found.next().unwrap_or_else(|| panic!("no paragraph begins with `{start}`"));
    assert!(found.next().is_none(), "two paragraphs begin with `{start}`");
    part.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the item of a list that contains `part`, in one line.
fn item(page: &str, part: &str) -> String {
    let list = page.split("\n\n").find(|block| block.starts_with("- ") && block.contains(part));
    let list = list.unwrap_or_else(|| panic!("no list contains `{part}`"));
    let item = list.split("\n- ").find(|item| item.contains(part)).expect("an item");
    item.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn ratios_are_those_of_the_times() {
    let mut count = 0;
    for figure in figures() {
        let cells = [&figure.ours, &figure.theirs, &figure.ratio].map(|cell| numbers(cell));
        let [[ours], [theirs], [ratio]] = cells.each_ref().map(Vec::as_slice) else { continue };
        let rate = figure.ours.ends_with("/s");
        let computed = if rate { theirs / ours } else { ours / theirs };
        // Times and ratios are rounded to two digits or three.
        let close = (computed - ratio).abs() <= 0.02 * ratio + 0.005;
        let (device, name) = (&figure.device, &figure.measurement);
        assert!(close, "{device}: {name} has the ratio {ratio}, computed {computed:.3}");
        count += 1;
    }
    assert!(count >= 20, "{count} ratios");
}

#[test]
fn the_readme_repeats_the_ratios_of_the_tables() {
    let figures = figures();
    let avx512 = bert_with_avx512(&figures);
    let zen3 = ratio(&figures, "Zen 3", BERT_ON_CPU);
    let h100 = ratio(&figures, "H100", BERT_ON_GPU);
    let h200 = ratio(&figures, "H200", BERT_ON_GPU);
    let gpt = ratio(&figures, "H200", GPT);

    let sentence = paragraph(&text("README.md"), "A step of a small BERT takes");
    assert_eq!(factors(&sentence), [&avx512, &zen3, &h100, &h200, &gpt].map(String::as_str));
    let pattern = format!(
        "A step of a small BERT takes {avx512} times .. AVX-512, and {zen3} times on Zen 3 .. \
         BERT-base takes {h100} times as long on an H100 and {h200} times on an H200, and {GPT} .. \
         {gpt} times as long on an H200"
    );
    assert!(matches(&pattern, &sentence), "README.md has `{sentence}`, not `{pattern}`");
}

#[test]
fn gpu_and_limits_repeat_the_ratios_of_the_tables() {
    let figures = figures();
    let h100 = ratio(&figures, "H100", BERT_ON_GPU);
    let h200 = ratio(&figures, "H200", BERT_ON_GPU);
    let gpt = ratio(&figures, "H200", GPT);
    let attention = attention_on_h200(&figures);
    let offloaded = ratio(&figures, "H200", OFFLOADED_GPT);

    let list = paragraph(&page("gpu"), "- A step of BERT-base takes");
    let all = [&h100, &h200, &gpt, &attention, &offloaded].map(String::as_str);
    assert_eq!(factors(&list), all);
    let pattern = format!(
        "- A step of BERT-base takes {h100} times as long on the H100 and {h200} times on the \
         H200. .. {GPT} .. {gpt} times as long on the H200. .. `nn::attention` takes {attention} \
         times .. H200 .. {OFFLOADED_GPT} .. {offloaded} times"
    );
    assert!(matches(&pattern, &list), "gpu.md has `{list}`, not `{pattern}`");

    let limit = item(&page("limits"), "`nn::attention` takes");
    assert_eq!(factors(&limit), [attention.as_str()], "limits.md has `{limit}`");
    assert!(limit.contains("H200"), "limits.md names no card in `{limit}`");
}

#[test]
fn factors_and_numbers_are_found() {
    assert_eq!(factors("takes 0.2 to 0.4 times as long, or 3 times."), ["0.2 to 0.4", "3"]);
    assert_eq!(numbers("10,099 word pieces/s, 0.5, 2 ms"), [10_099.0, 0.5, 2.0]);
    assert!(numbers("not recorded").is_empty() && factors("as long").is_empty());
}
