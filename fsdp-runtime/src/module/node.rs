//! The static layout tree of a model: plain data that the macros write into `FsdpModule::LAYOUT`.
//!
//! The rules that a tree must keep are in `const_check`.

use crate::error::NotRecomputable;

/// A hooked method of a unit, and whether its inputs can be saved for recomputation in backward.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Forward {
    /// Name of the method.
    pub name: &'static str,
    /// Names of the inputs, each with the reason why it cannot be saved, if there is one.
    pub inputs: &'static [(&'static str, Option<NotRecomputable>)],
}

/// The role of a [`Node`] in the layout tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A struct under `#[fsdp_unit]`: one all-gather, one reduce-scatter.
    Unit {
        /// Whether the unit is under `#[fsdp_unit(root)]`.
        root: bool,
    },
    /// A module whose parameters belong to the enclosing unit.
    Module,
    /// A float `Param`, which the runtime shards or replicates.
    Param {
        /// Number of dimensions of the parameter.
        rank: usize,
    },
    /// An integer or Boolean `Param`, which is never sharded.
    Fixed,
    /// An `Option`. It adds no segment to paths: its only child has the option's own path.
    Optional,
    /// A `Vec` or an array. Its only child stands for every element; an element's path segment is
    /// its index.
    List,
    /// A tuple, whose children are named `0`, `1`, ...
    Tuple,
    /// A value without parameters, such as `usize` or `burn::nn::Gelu`.
    Constant,
    /// A field under `#[fsdp(leaf)]`, whose parameters are found when the model is sharded.
    Leaf,
}

/// One type in the static layout tree of a model.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    /// Name of the type, without its module path.
    pub ty: &'static str,
    /// Role of the type.
    pub kind: Kind,
    /// Fields in declaration order, without those under `#[module(skip)]`.
    pub children: &'static [Child],
    /// Weights declared as shared with `tie("a.b" = "c.d")`.
    pub ties: &'static [Tie],
}

/// A field, or the element of a container.
#[derive(Clone, Copy, Debug)]
pub struct Child {
    /// Name of the field, a segment of the module path. Empty below `Optional` and `List`.
    pub name: &'static str,
    /// Name of the field in a foreign checkpoint, where that differs from `name`: one segment or
    /// several (`"output.LayerNorm"`).
    pub key: Option<&'static str>,
    /// Whether the checkpoint holds this matrix transposed, as PyTorch's `nn.Linear` does.
    pub transposed: bool,
    /// Whether the field is under `#[fsdp(unit)]`: the module in it is a unit, and in a container
    /// each element is one.
    pub unit: bool,
    /// Name of the group in `#[fsdp(unit = "name")]`: the modules in all fields of the struct with
    /// that name are one unit.
    pub group: Option<&'static str>,
    /// How the matrix of the layer in the field is split over tensor parallel ranks, under
    /// `#[fsdp(column)]`, `#[fsdp(row)]`, `#[fsdp(vocab)]` or `#[fsdp(shared)]`.
    pub split: Option<Split>,
    /// Layout of the field's type.
    pub node: &'static Node,
}

/// How the matrix of a layer is split over tensor parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// A rank has a part of the outputs.
    Column {
        /// Whether the layer returns the outputs of all ranks.
        gather: bool,
    },
    /// A rank has a part of the inputs. The layer returns the sum over all ranks.
    Row,
    /// A rank has a part of the vocabulary.
    Vocab,
    /// Every rank has the whole, and uses it with parts of other values: the gradient is the sum over the
    /// ranks.
    Shared,
}

impl Child {
    /// Creates a field that has the same name in checkpoints, is not transposed, and is not a unit.
    pub(crate) const fn plain(name: &'static str, node: &'static Node) -> Self {
        Self { name, key: None, transposed: false, unit: false, group: None, split: None, node }
    }

    /// Returns the segment that this field adds to a checkpoint key.
    pub const fn key_or_name(&self) -> &'static str {
        match self.key {
            Some(key) => key,
            None => self.name,
        }
    }
}

/// Two places that share one weight. A path names a `Param`, or a module with exactly one matrix.
#[derive(Clone, Copy, Debug)]
pub struct Tie {
    /// Place that owns the weight, as a dotted path of field names from the declaring type.
    pub first: &'static str,
    /// Place that aliases the weight, as a dotted path of field names from the declaring type.
    pub second: &'static str,
    /// Whether the places are tied only in a model whose two parameters are clones of one.
    pub if_shared: bool,
}

impl Node {
    /// Returns this node; for an `Option`, the node of the type inside.
    pub(crate) fn without_option(&self) -> &Self {
        let mut node = self;
        while node.kind == Kind::Optional {
            node = node.children[0].node;
        }
        node
    }

    /// Returns the name of the type; for an `Option`, of the type inside; empty for a list or a tuple.
    pub(crate) fn type_name(&self) -> &'static str {
        let node = self.without_option();
        if matches!(node.kind, Kind::List | Kind::Tuple) { "" } else { node.ty }
    }

    /// Creates a node without children.
    pub const fn plain(ty: &'static str, kind: Kind) -> Self {
        Self { ty, kind, children: &[], ties: &[] }
    }

    /// Returns whether the type is under `#[fsdp_unit]`.
    pub const fn is_unit(&self) -> bool {
        matches!(self.kind, Kind::Unit { .. })
    }

    /// Returns the names of the unit types in the tree, each once, in layout order.
    pub(crate) fn unit_names(&self) -> Vec<&'static str> {
        self.names_of(&|node| node.is_unit())
    }

    /// Returns the names of all module types in the tree, each once, in layout order.
    pub(crate) fn type_names(&self) -> Vec<&'static str> {
        let counts = |node: &Self| {
            let is_param = matches!(node.kind, Kind::Param { .. } | Kind::Fixed);
            !is_param && node.kind != Kind::Optional && !node.type_name().is_empty()
        };
        self.names_of(&counts)
    }

    fn names_of(&self, counts: &dyn Fn(&Self) -> bool) -> Vec<&'static str> {
        fn visit(node: &Node, counts: &dyn Fn(&Node) -> bool, names: &mut Vec<&'static str>) {
            if counts(node) && !names.contains(&node.ty) {
                names.push(node.ty);
            }
            node.children.iter().for_each(|child| visit(child.node, counts, names));
        }
        let mut names = Vec::new();
        visit(self, counts, &mut names);
        names
    }
}

/// Layout of a field under `#[fsdp(leaf)]`.
pub const LEAF: Node = Node::plain("leaf", Kind::Leaf);
