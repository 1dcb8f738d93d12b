//! Patterns of module names, and the ranks and scales that a configuration gives to layers.

use regex::Regex;

use super::config::LoraConfig;
use crate::error::LoraError;

/// A pattern of module names, as in PEFT's `rank_pattern`: a regular expression for the end of a name, in
/// whole segments.
#[derive(Debug)]
struct Pattern<T> {
    text: String,
    regex: Regex,
    /// Value of the layers that match.
    value: T,
}

/// The ranks, alphas and scales of adapters by the names of their layers.
#[derive(Debug)]
pub(crate) struct Scales {
    rank: usize,
    alpha: f64,
    rank_stabilised: bool,
    ranks: Vec<Pattern<usize>>,
    alphas: Vec<Pattern<f64>>,
}

/// Sizes of one adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scale {
    pub(crate) rank: usize,
    pub(crate) alpha: f64,
    /// Factor of the product of the low-rank matrices.
    pub(crate) factor: f64,
}

impl Scales {
    /// Reads the settings of a configuration.
    ///
    /// # Errors
    ///
    /// [`LoraError`] for a rank of 0, an alpha that is not above 0, and a pattern that is no regular
    /// expression.
    pub(crate) fn new(config: &LoraConfig) -> Result<Self, LoraError> {
        if config.rank == 0 {
            return Err(LoraError::Rank);
        }
        let is_alpha = |alpha: f64| alpha.is_finite() && alpha > 0.0;
        if !is_alpha(config.alpha) {
            return Err(LoraError::Alpha { alpha: config.alpha });
        }
        let ranks = patterns("rank_pattern", &config.rank_pattern, |&rank| {
            (rank == 0).then(|| "gives the rank 0; it must be at least 1".to_string())
        })?;
        let alphas = patterns("alpha_pattern", &config.alpha_pattern, |&alpha| {
            let fault = || format!("gives the alpha {alpha}; it must be a finite number above 0");
            (!is_alpha(alpha)).then(fault)
        })?;
        target_pattern(config)?;
        excluded_pattern(config)?;
        Blocks::new(config)?;
        let LoraConfig { rank, alpha, rank_stabilised, .. } = *config;
        Ok(Self { rank, alpha, rank_stabilised, ranks, alphas })
    }

    /// Returns the sizes of the adapter of a layer that has any of these names. The first pattern of a
    /// setting that matches counts, as in PEFT.
    pub(crate) fn of(&self, names: &[&str]) -> Scale {
        let rank = first(&self.ranks, names).unwrap_or(self.rank);
        let alpha = first(&self.alphas, names).unwrap_or(self.alpha);
        let divisor = if self.rank_stabilised { (rank as f64).sqrt() } else { rank as f64 };
        Scale { rank, alpha, factor: alpha / divisor }
    }

    /// Returns the name of the setting and the text of a pattern that matches no layer, if there is one.
    pub(super) fn unmatched(&self, layers: &[[&str; 2]]) -> Option<(&'static str, String)> {
        let matches = |regex: &Regex| {
            layers.iter().any(|names| names.iter().any(|name| regex.is_match(name)))
        };
        let rank = self.ranks.iter().find(|pattern| !matches(&pattern.regex));
        let alpha = self.alphas.iter().find(|pattern| !matches(&pattern.regex));
        rank.map(|pattern| ("rank_pattern", pattern.text.clone()))
            .or_else(|| alpha.map(|pattern| ("alpha_pattern", pattern.text.clone())))
    }
}

/// Returns the value of the first pattern that matches any of the names.
fn first<T: Copy>(patterns: &[Pattern<T>], names: &[&str]) -> Option<T> {
    let matches = |pattern: &&Pattern<T>| names.iter().any(|name| pattern.regex.is_match(name));
    patterns.iter().find(matches).map(|pattern| pattern.value)
}

/// Reads the patterns of a setting. `fault` describes what is wrong with a value.
fn patterns<T: Copy>(
    setting: &'static str,
    list: &[(String, T)],
    fault: impl Fn(&T) -> Option<String>,
) -> Result<Vec<Pattern<T>>, LoraError> {
    let read = |(text, value): &(String, T)| {
        let error = |reason| LoraError::Pattern { setting, pattern: text.clone(), reason };
        if let Some(reason) = fault(value) {
            return Err(error(reason));
        }
        // PEFT's `re.match(rf"(.*\.)?({key})$", name)`.
        let regex = expression(setting, text, &format!(r"^(?:.*\.)?(?:{text})$"))?;
        Ok(Pattern { text: text.clone(), regex, value: *value })
    };
    list.iter().map(read).collect()
}

/// Reads the regular expression `whole`, made of the text of a setting.
fn expression(setting: &'static str, text: &str, whole: &str) -> Result<Regex, LoraError> {
    Regex::new(whole).map_err(|fault| LoraError::Pattern {
        setting,
        pattern: text.to_string(),
        reason: format!("is no regular expression that this crate reads: {fault}"),
    })
}

/// Returns the expression of a configuration for whole names of target modules, if there is one.
pub(super) fn target_pattern(config: &LoraConfig) -> Result<Option<Regex>, LoraError> {
    whole_names("target_modules", config.target_pattern.as_ref())
}

/// Returns the expression of a configuration for whole names of layers without adapters, if there is one.
pub(super) fn excluded_pattern(config: &LoraConfig) -> Result<Option<Regex>, LoraError> {
    whole_names("exclude_modules", config.excluded_pattern.as_ref())
}

fn whole_names(
    setting: &'static str,
    pattern: Option<&String>,
) -> Result<Option<Regex>, LoraError> {
    pattern.map(|text| expression(setting, text, &format!("^(?:{text})$"))).transpose()
}

/// The numbers of the blocks that get adapters.
#[derive(Debug)]
pub(super) struct Blocks<'a> {
    numbers: &'a [usize],
    /// Expressions whose first group is the number of a block.
    lists: Vec<Regex>,
}

impl<'a> Blocks<'a> {
    /// Reads the settings of a configuration; `None` if all blocks get adapters.
    ///
    /// # Errors
    ///
    /// [`LoraError::Pattern`] for a pattern that is no regular expression.
    pub(super) fn new(config: &'a LoraConfig) -> Result<Option<Self>, LoraError> {
        if config.layers_to_transform.is_empty() {
            return Ok(None);
        }
        let any = ["[^.]*".to_string()];
        let patterns = match config.layers_pattern.is_empty() {
            true => &any[..],
            false => &config.layers_pattern,
        };
        let read = |text: &String| {
            let whole = format!(r"^(?:.*?\.)??(?:{text})\.(\d+)\.");
            expression("layers_pattern", text, &whole)
        };
        let lists = patterns.iter().map(read).collect::<Result<_, _>>()?;
        Ok(Some(Self { numbers: &config.layers_to_transform, lists }))
    }

    /// Returns the number of the block in which a layer of any of these names lies.
    pub(super) fn number(&self, names: &[&str]) -> Option<usize> {
        let of = |(regex, name): (&Regex, &&str)| regex.captures(name)?[1].parse().ok();
        names.iter().flat_map(|name| self.lists.iter().map(move |it| (it, name))).find_map(of)
    }

    /// Returns whether a layer of any of these names gets an adapter.
    pub(super) fn contain(&self, names: &[&str]) -> bool {
        self.number(names).is_some_and(|number| self.numbers.contains(&number))
    }

    /// Returns the numbers of the configuration that are not among `found`.
    pub(super) fn missing(&self, found: &[usize]) -> Vec<usize> {
        self.numbers.iter().copied().filter(|number| !found.contains(number)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUERY: &str = "bert.layer.10.attention.self.query";

    fn rank(patterns: &[(&str, usize)], name: &str) -> usize {
        let patterns = patterns.iter().map(|(text, rank)| (text.to_string(), *rank));
        Scales::new(&LoraConfig::new(4).with_rank_pattern(patterns)).unwrap().of(&[name]).rank
    }

    #[test]
    fn a_pattern_is_whole_segments_at_the_end_of_a_name() {
        for pattern in
            ["query", "self.query", QUERY, r"layer\.\d+\..*query", "^bert.*query", "q.*|k"]
        {
            assert_eq!(rank(&[(pattern, 9)], QUERY), 9, "{pattern}");
        }
        for pattern in ["uery", "self", "0.attention.self.query", "^layer.*query", "bert"] {
            assert_eq!(rank(&[(pattern, 9)], QUERY), 4, "{pattern}");
        }
        assert_eq!(rank(&[("key", 1), ("self.query", 2), ("query", 3)], QUERY), 2);
    }

    #[test]
    fn a_factor_is_alpha_by_the_rank_or_its_root() {
        let config = LoraConfig::new(4).with_alpha(8.0).with_rank_pattern([("query", 16)]);
        let factors = |config: &LoraConfig| {
            let scales = Scales::new(config).unwrap();
            ["key", "query", "value"].map(|name| scales.of(&[name]).factor)
        };
        assert_eq!(factors(&config), [2.0, 0.5, 2.0]);
        let config = config.with_rslora(true).with_alpha_pattern([("value", 2.0)]);
        assert_eq!(factors(&config), [4.0, 2.0, 1.0]);
    }

    #[test]
    fn blocks_are_counted_by_the_first_number_of_a_list() {
        let config = LoraConfig::new(4).with_layers_to_transform([1, 10]);
        let blocks = Blocks::new(&config).unwrap().unwrap();
        assert_eq!(blocks.number(&[QUERY]), Some(10));
        assert_eq!(blocks.number(&["layers.1.experts.0.up"]), Some(1));
        assert_eq!(blocks.number(&["head", "bert.head"]), None);
        assert!(blocks.contain(&[QUERY]) && !blocks.contain(&["layers.2.query"]));
        assert_eq!(blocks.missing(&[0, 1, 2]), [10]);
        let config = config.with_layers_pattern(["h", "experts"]);
        let blocks = Blocks::new(&config).unwrap().unwrap();
        assert_eq!(blocks.number(&[QUERY]), None);
        assert_eq!(blocks.number(&["layers.1.experts.0.up"]), Some(0));
        assert_eq!(blocks.number(&["h.7.attn"]), Some(7));
        assert!(Blocks::new(&LoraConfig::new(4)).unwrap().is_none());
    }

    #[test]
    fn wrong_patterns_are_named() {
        let ranks = |text: &str, rank| LoraConfig::new(4).with_rank_pattern([(text, rank)]);
        for (config, expected) in [
            (ranks("q(", 2), "`rank_pattern` has `q(`, which is no regular expression"),
            (ranks("(?=q)", 2), "`rank_pattern` has `(?=q)`, which is no regular expression"),
            (
                LoraConfig::new(4).with_target_pattern("q("),
                "`target_modules` has `q(`, which is no",
            ),
            (
                LoraConfig::new(4).with_excluded_pattern("(?!q)"),
                "`exclude_modules` has `(?!q)`, which is no",
            ),
            (
                LoraConfig::new(4).with_layers_to_transform([0]).with_layers_pattern(["(h"]),
                "`layers_pattern` has `(h`, which is no",
            ),
            (ranks("q", 0), "`rank_pattern` has `q`, which gives the rank 0"),
            (
                LoraConfig::new(4).with_alpha_pattern([("q", f64::NAN)]),
                "`alpha_pattern` has `q`, which gives the alpha NaN",
            ),
        ] {
            let error = Scales::new(&config).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
