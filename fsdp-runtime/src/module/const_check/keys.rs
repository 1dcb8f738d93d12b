//! Rule: no two parameters of a model have one checkpoint key.
//!
//! A type is checked for the pairs that come together in it, which are those below different fields
//! of its own; a pair below one field was reported by that field's type. Keys are compared by hash,
//! in sorted order, as the compiler counts the steps of a constant.

use super::text::{Text, same};
use crate::module::{Child, Kind, Node};

/// The number of checkpoint keys below a node. The elements of a list share theirs.
pub const fn num_keys(node: &Node) -> usize {
    if is_key(node) {
        return 1;
    }
    let mut total = 0;
    let mut i = 0;
    while i < node.children.len() {
        total += num_keys(node.children[i].node);
        i += 1;
    }
    total
}

/// Checks one type; `N` is its [`num_keys`].
#[track_caller]
pub const fn have_distinct_keys<const N: usize>(layout: &Node) {
    let mut all = Collected { keys: [Key { hash: 0, field: 0, index: 0 }; N], len: 0 };
    let mut field = 0;
    while field < layout.children.len() {
        let child = &layout.children[field];
        all.collect(child.node, field, Hash::EMPTY.segment(segment(layout, child)));
        field += 1;
    }
    sort(&mut all.keys);
    let mut i = 1;
    while i < N {
        let (a, b) = (all.keys[i - 1], all.keys[i]);
        if a.hash == b.hash && a.field != b.field {
            let ((a_key, a_path), (b_key, b_path)) = (nth(layout, a.index), nth(layout, b.index));
            if same(a_key.as_str(), b_key.as_str()) {
                Text::new("")
                    .code(a_path.as_str())
                    .then(" and ")
                    .code(b_path.as_str())
                    .then(" have one checkpoint key, ")
                    .code(a_key.as_str())
                    .then("; give one of them another with `#[fsdp(key = \"..\")]`")
                    .fail();
            }
        }
        i += 1;
    }
}

const fn is_key(node: &Node) -> bool {
    matches!(node.kind, Kind::Param { .. } | Kind::Fixed)
}

/// The segment a child adds to a checkpoint key.
const fn segment(parent: &Node, child: &Child) -> &'static str {
    match parent.kind {
        Kind::List => "{}",
        _ => child.key_or_name(),
    }
}

#[derive(Clone, Copy)]
struct Key {
    hash: u64,
    /// Which field of the checked type it lies below.
    field: usize,
    /// Its place in the order of the layout.
    index: usize,
}

impl Key {
    const fn before(&self, other: &Self) -> bool {
        self.hash < other.hash || self.hash == other.hash && self.index < other.index
    }
}

struct Collected<const N: usize> {
    keys: [Key; N],
    len: usize,
}

impl<const N: usize> Collected<N> {
    const fn collect(&mut self, node: &Node, field: usize, hash: Hash) {
        if is_key(node) {
            self.keys[self.len] = Key { hash: hash.0, field, index: self.len };
            self.len += 1;
            return;
        }
        let mut i = 0;
        while i < node.children.len() {
            let child = &node.children[i];
            self.collect(child.node, field, hash.segment(segment(node, child)));
            i += 1;
        }
    }
}

/// FNV-1a, 64 bits (<http://www.isthe.com/chongo/tech/comp/fnv/>), of a key as far as it is known.
#[derive(Clone, Copy)]
struct Hash(u64);

impl Hash {
    const EMPTY: Self = Self(0xcbf2_9ce4_8422_2325);

    const fn segment(self, segment: &str) -> Self {
        let mut hash = self;
        if hash.0 != Self::EMPTY.0 && !segment.is_empty() {
            hash = hash.byte(b'.');
        }
        let bytes = segment.as_bytes();
        let mut i = 0;
        while i < bytes.len() {
            hash = hash.byte(bytes[i]);
            i += 1;
        }
        hash
    }

    const fn byte(self, byte: u8) -> Self {
        Self((self.0 ^ byte as u64).wrapping_mul(0x0100_0000_01b3))
    }
}

/// Shell's sort: short, and quick enough for the few hundred keys of a type.
const fn sort(keys: &mut [Key]) {
    let mut gap = keys.len() / 2;
    while gap > 0 {
        let mut i = gap;
        while i < keys.len() {
            let mut j = i;
            while j >= gap && keys[j].before(&keys[j - gap]) {
                let moved = keys[j];
                keys[j] = keys[j - gap];
                keys[j - gap] = moved;
                j -= gap;
            }
            i += 1;
        }
        gap /= 2;
    }
}

/// The key and the module path of the `index`-th parameter.
const fn nth(layout: &Node, index: usize) -> (Text, Text) {
    let (mut key, mut path) = (Text::new(""), Text::new(""));
    let mut left = index;
    find(layout, &mut left, &mut key, &mut path);
    (key, path)
}

const fn find(node: &Node, left: &mut usize, key: &mut Text, path: &mut Text) -> bool {
    if is_key(node) {
        if *left == 0 {
            return true;
        }
        *left -= 1;
        return false;
    }
    let mut i = 0;
    while i < node.children.len() {
        let child = &node.children[i];
        let (key_len, path_len) = (key.len(), path.len());
        key.push_segment(segment(node, child));
        path.push_segment(if matches!(node.kind, Kind::List) { "{}" } else { child.name });
        if find(child.node, left, key, path) {
            return true;
        }
        key.truncate(key_len);
        path.truncate(path_len);
        i += 1;
    }
    false
}
