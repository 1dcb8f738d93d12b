//! Which keys a query may see: one range for each query, whatever hides the others.

use std::ops::Range;

use super::AttentionRule;

/// The keys that queries may see under a rule. Padding may hide some of them.
///
/// Neither the first nor the last key of a range decreases from one query of a row to the next.
#[derive(Clone, Copy, Debug)]
pub struct KeyRanges<'a> {
    rule: &'a AttentionRule,
    queries: usize,
    keys: usize,
}

impl<'a> KeyRanges<'a> {
    /// Returns the ranges of as many queries, among as many keys.
    pub fn new(rule: &'a AttentionRule, [queries, keys]: [usize; 2]) -> Self {
        Self { rule, queries, keys }
    }

    /// Returns the rule.
    pub fn rule(&self) -> &'a AttentionRule {
        self.rule
    }

    /// Returns the number of all queries.
    pub fn queries(&self) -> usize {
        self.queries
    }

    /// Returns the number of all keys.
    pub fn keys(&self) -> usize {
        self.keys
    }

    /// Returns the position of a query among the keys, where the last query has the position of the
    /// last key. It is negative for the first queries if there are more of them than keys.
    pub fn position(&self, query: usize) -> i64 {
        (query + self.keys) as i64 - self.queries as i64
    }

    /// Returns how many keys before its own position a query sees, and how many after it, if the rule
    /// bounds them. Segments are not counted.
    pub fn reach(&self) -> [Option<i64>; 2] {
        let longest = self.queries + self.keys;
        let window = self.rule.window.map(|keys| (keys.min(longest) as i64) - 1);
        [window, if self.rule.causal { Some(0) } else { window }]
    }

    /// Returns the keys that a query of a row of the batch may see. A range without keys begins at its
    /// end.
    pub fn of_query(&self, row: usize, query: usize) -> Range<usize> {
        let position = self.position(query);
        let bound = |at: i64| at.clamp(0, self.keys as i64) as usize;
        let [before, after] = self.reach();
        let mut first = before.map_or(0, |before| bound(position - before));
        let mut end = after.map_or(self.keys, |after| bound(position + after + 1));
        if let Some(segments) = &self.rule.segments {
            let run = segments.around(row, query);
            (first, end) = (first.max(run.start), end.min(run.end));
        }
        first.min(end)..end
    }

    /// Returns the keys from the first to the last that some of these queries may see, in some of these
    /// rows of the batch.
    pub fn of_queries(&self, rows: Range<usize>, queries: Range<usize>) -> Range<usize> {
        // Without segments all rows are alike.
        let rows = if self.rule.segments.is_some() { rows } else { 0..1 };
        let of_row = |row| {
            let [first, last] = [queries.start, queries.end - 1].map(|at| self.of_query(row, at));
            first.start..last.end
        };
        let joined = |a: Range<usize>, b: Range<usize>| a.start.min(b.start)..a.end.max(b.end);
        rows.map(of_row).reduce(joined).unwrap_or(0..0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::Segments;

    #[test]
    fn ranges_are_those_of_the_definition() {
        let (lengths, plain) = ([3, 5], AttentionRule::new(1.0));
        let of = |rule: &AttentionRule, [queries, keys]: [usize; 2]| -> Vec<_> {
            let ranges = KeyRanges::new(rule, [queries, keys]);
            (0..queries).map(|query| ranges.of_query(0, query)).collect()
        };
        assert_eq!(of(&plain, lengths), [0..5, 0..5, 0..5]);
        let causal = AttentionRule { causal: true, ..plain.clone() };
        assert_eq!(of(&causal, lengths), [0..3, 0..4, 0..5]);
        assert_eq!(of(&causal, [3, 2]), [0..0, 0..1, 0..2]);
        let window = AttentionRule { window: Some(2), ..plain.clone() };
        assert_eq!(of(&window, lengths), [1..4, 2..5, 3..5]);
        let both = AttentionRule { window: Some(2), ..causal.clone() };
        assert_eq!(of(&both, lengths), [1..3, 2..4, 3..5]);
        assert_eq!(of(&both, [4, 2]), [0..0, 0..0, 0..1, 0..2]);
        let all = AttentionRule { window: Some(usize::MAX), ..causal.clone() };
        assert_eq!(of(&all, lengths), of(&causal, lengths));
        let segments = Segments::new(&[1, 1, 1, 0, 0], 5).ok();
        let packed = AttentionRule { segments, ..both };
        assert_eq!(of(&packed, [5, 5]), [0..1, 0..2, 1..3, 3..4, 3..5]);
    }

    #[test]
    fn the_range_of_several_queries_has_the_keys_of_each() {
        let segments = Segments::new(&[1, 1, 1, 0, 0, 7, 2, 2, 2, 2, 2, 2], 6).ok();
        let rule = AttentionRule { causal: true, segments, ..AttentionRule::new(1.0) };
        let ranges = KeyRanges::new(&rule, [6, 6]);
        assert_eq!(ranges.of_queries(0..1, 1..4), 0..4);
        assert_eq!(ranges.of_queries(0..1, 3..5), 3..5);
        assert_eq!(ranges.of_queries(0..2, 3..5), 0..5);
    }
}
