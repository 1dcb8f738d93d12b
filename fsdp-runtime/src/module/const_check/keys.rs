//! Rule: no two parameters of a model have one checkpoint key.
//!
//! The check of a type covers pairs of parameters below different fields of that type; a pair below
//! one field is reported for that field's type. Keys are hashed and sorted before they are
//! compared, because the compiler limits the number of steps in a constant.

use super::text::{Text, path_segment, same};
use crate::module::{Child, Kind, Node};

/// Returns the number of checkpoint keys below a node. A list counts as one element.
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

/// Checks that the parameters of a type have distinct checkpoint keys. `N` is at least the type's
/// [`num_keys`].
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

/// Most checkpoint keys of a generic type that are compared.
const MOST_OF_GENERIC: usize = 512;

/// Checks that the parameters of a generic type have distinct checkpoint keys, unless it has more
/// than `MOST_OF_GENERIC`. The length of an array cannot depend on a type parameter.
#[track_caller]
pub const fn have_distinct_keys_of_generic(layout: &Node) {
    if num_keys(layout) <= MOST_OF_GENERIC {
        have_distinct_keys::<MOST_OF_GENERIC>(layout);
    }
}

/// Returns whether a node is a parameter, which has a checkpoint key.
const fn is_key(node: &Node) -> bool {
    matches!(node.kind, Kind::Param { .. } | Kind::Fixed)
}

/// Returns the segment that a child adds to a checkpoint key.
const fn segment(parent: &Node, child: &Child) -> &'static str {
    match parent.kind {
        Kind::List => "{}",
        _ => child.key_or_name(),
    }
}

/// The checkpoint key of one parameter.
#[derive(Clone, Copy)]
struct Key {
    hash: u64,
    /// Index of the field of the checked type that contains the parameter.
    field: usize,
    /// Index of the parameter in layout order.
    index: usize,
}

impl Key {
    /// Returns whether the key sorts before `other`.
    const fn before(&self, other: &Self) -> bool {
        self.hash < other.hash || self.hash == other.hash && self.index < other.index
    }
}

/// The keys of a type, in layout order; the first `len` are filled in.
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

/// The 64-bit FNV-1a hash (<http://www.isthe.com/chongo/tech/comp/fnv/>) of the first segments of a
/// key.
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

/// Sorts the keys with Shell sort, which is short, and fast enough for a few hundred keys.
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

/// Returns the checkpoint key and the module path of the parameter with the index `index`.
const fn nth(layout: &Node, index: usize) -> (Text, Text) {
    let (mut key, mut path) = (Text::new(""), Text::new(""));
    let mut left = index;
    find(layout, &mut left, &mut key, &mut path);
    (key, path)
}

/// Appends the key and the path of the parameter with the index `left` below `node`. Returns
/// `false`, and subtracts the number of parameters from `left`, if there are fewer.
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
        path.push_segment(path_segment(node, child));
        if find(child.node, left, key, path) {
            return true;
        }
        key.truncate(key_len);
        path.truncate(path_len);
        i += 1;
    }
    false
}
