//! What holds the memory of a rank: bytes by kind and unit.

use std::collections::BTreeMap;
use std::fmt;

use super::super::mib::mib;

/// Bytes of one kind of memory that one unit holds on one rank.
///
/// `Display` prints, for example, ``gradients of `blocks.2`, 1.50 MiB``.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryHolder {
    /// Kind of memory, under its name in [`Memory::kinds`](super::Memory::kinds).
    pub kind: &'static str,
    /// Whether the bytes are in host memory in place of device memory.
    pub on_host: bool,
    /// Module path of the unit; empty for the outermost unit, and `None` where several units share the
    /// bytes.
    pub unit: Option<String>,
    /// Number of bytes.
    pub bytes: usize,
}

impl MemoryHolder {
    /// Returns the kind, the unit and, for host memory, the place: ``shards of `head` on the host``.
    pub fn name(&self) -> String {
        let unit = match self.unit.as_deref() {
            Some("") => " of the outermost unit".to_string(),
            Some(path) => format!(" of `{path}`"),
            None => String::new(),
        };
        format!("{}{unit}{}", self.kind, if self.on_host { " on the host" } else { "" })
    }
}

impl fmt::Display for MemoryHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {:.2} MiB", self.name(), mib(self.bytes))
    }
}

/// A holder of memory: a kind, and the index of a unit or `None` for several units.
pub(super) type Holder = (&'static str, Option<usize>);

/// Bytes of every holder in one place, the device or the host. Holders of no bytes are left out.
#[derive(Clone, Debug, Default)]
pub(super) struct Holders(BTreeMap<Holder, usize>);

impl Holders {
    /// Adds bytes to a holder.
    pub(super) fn add(&mut self, holder: Holder, bytes: usize) {
        if bytes > 0 {
            *self.0.entry(holder).or_default() += bytes;
        }
    }

    /// Subtracts bytes of a kind, which are at most those that the kind has. They are taken from
    /// `unit` as far as it has them, then from what several units share, then from other units.
    /// Returns the unit and the bytes of each part.
    pub(super) fn subtract(
        &mut self,
        kind: &'static str,
        unit: Option<usize>,
        bytes: usize,
    ) -> Vec<(Option<usize>, usize)> {
        if let Some(held) = self.0.get_mut(&(kind, unit)).filter(|held| **held > bytes) {
            *held -= bytes;
            return vec![(unit, bytes)];
        }
        let mut left = bytes;
        let mut parts = Vec::new();
        let others = self.0.range((kind, None)..=(kind, Some(usize::MAX))).map(|(key, _)| key.1);
        // `None` is the first of a kind's keys.
        let order: Vec<_> = std::iter::once(unit).chain(others.filter(|it| *it != unit)).collect();
        for unit in order {
            if left == 0 {
                break;
            }
            let Some(held) = self.0.get_mut(&(kind, unit)) else { continue };
            let part = left.min(*held);
            *held -= part;
            left -= part;
            if *held == 0 {
                self.0.remove(&(kind, unit));
            }
            parts.push((unit, part));
        }
        debug_assert_eq!(left, 0, "{kind}: more bytes than are held");
        parts
    }

    /// Returns the holders, the largest first. `path` returns the module path of a unit.
    pub(super) fn list(&self, on_host: bool, path: &dyn Fn(usize) -> String) -> Vec<MemoryHolder> {
        let holder = |((kind, unit), bytes): (&Holder, &usize)| MemoryHolder {
            kind,
            on_host,
            unit: unit.map(path),
            bytes: *bytes,
        };
        let mut holders: Vec<_> = self.0.iter().map(holder).collect();
        sort(&mut holders);
        holders
    }
}

/// Sorts holders by their bytes, the largest first.
pub(super) fn sort(holders: &mut [MemoryHolder]) {
    holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_taken_from_the_unit_then_from_the_others() {
        let mut holders = Holders::default();
        for (unit, bytes) in [(Some(2), 5), (None, 4), (Some(1), 3), (Some(7), 0)] {
            holders.add(("gradients", unit), bytes);
        }
        holders.add(("shards", Some(1)), 100);
        assert_eq!(holders.subtract("gradients", Some(2), 3), [(Some(2), 3)]);
        let parts = holders.subtract("gradients", Some(2), 8);
        assert_eq!(parts, [(Some(2), 2), (None, 4), (Some(1), 2)]);
        let texts = holders.list(false, &|unit| format!("blocks.{unit}"));
        let texts: Vec<_> = texts.iter().map(|holder| (holder.name(), holder.bytes)).collect();
        let expected = [("shards of `blocks.1`", 100), ("gradients of `blocks.1`", 1)];
        assert_eq!(texts, expected.map(|(name, bytes)| (name.to_string(), bytes)));
    }

    #[test]
    fn a_holder_is_printed_with_its_place() {
        let holder = |unit: Option<&str>, on_host| MemoryHolder {
            kind: "optimizer",
            on_host,
            unit: unit.map(Into::into),
            bytes: 3 << 19,
        };
        assert_eq!(holder(None, false).to_string(), "optimizer, 1.50 MiB");
        let expected = "optimizer of the outermost unit on the host, 1.50 MiB";
        assert_eq!(holder(Some(""), true).to_string(), expected);
    }
}
