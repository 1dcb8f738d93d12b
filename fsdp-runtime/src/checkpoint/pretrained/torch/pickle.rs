//! The values of a pickle that was read.

use safetensors::Dtype;

use super::globals::{Class, Global};

/// The reason why a pickle is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PickleError {
    /// An imported name that weights do not need.
    Global(String),
    /// Bytes that are no pickle, or one of a form that is not read.
    Invalid(String),
}

impl From<String> for PickleError {
    fn from(reason: String) -> Self {
        Self::Invalid(reason)
    }
}

/// A Python value. Texts are parts of the pickle, and containers are numbers of nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value<'a> {
    Int(i64),
    Text(&'a str),
    Global(Global),
    /// Index of a container or object in [`Pickle::nodes`].
    Node(usize),
    /// `None`, or a value whose contents weights do not need: a bool, a float, bytes.
    Other,
}

/// A Python container or object.
#[derive(Clone, Debug)]
pub(super) enum Node<'a> {
    Tuple(Vec<Value<'a>>),
    List(Vec<Value<'a>>),
    Dict(Vec<(Value<'a>, Value<'a>)>),
    Storage(StorageRef<'a>),
    Tensor(TensorRef<'a>),
    /// Instance of a class, with its state.
    Object(Class, Option<Value<'a>>),
}

/// A storage of the archive that a pickle is in.
#[derive(Clone, Copy, Debug)]
pub(super) struct StorageRef<'a> {
    pub(super) dtype: Dtype,
    /// Name of the storage in the archive.
    pub(super) key: &'a str,
}

/// A view of a storage. Offset and strides are in elements.
#[derive(Clone, Debug)]
pub(super) struct TensorRef<'a> {
    pub(super) storage: StorageRef<'a>,
    pub(super) offset: usize,
    pub(super) shape: Vec<usize>,
    pub(super) strides: Vec<usize>,
}

/// A pickle that was read. Containers may contain themselves.
#[derive(Clone, Debug)]
pub(super) struct Pickle<'a> {
    pub(super) nodes: Vec<Node<'a>>,
    pub(super) root: Value<'a>,
}

impl<'a> Pickle<'a> {
    /// Returns the container or object that a value refers to.
    pub(super) fn node(&self, value: Value<'a>) -> Option<&Node<'a>> {
        match value {
            Value::Node(index) => self.nodes.get(index),
            _ => None,
        }
    }

    /// Returns the entries of a dict.
    pub(super) fn dict(&self, value: Value<'a>) -> Option<&[(Value<'a>, Value<'a>)]> {
        match self.node(value)? {
            Node::Dict(entries) => Some(entries),
            _ => None,
        }
    }

    /// Returns the elements of a tuple or list.
    pub(super) fn sequence(&self, value: Value<'a>) -> Option<&[Value<'a>]> {
        match self.node(value)? {
            Node::Tuple(values) | Node::List(values) => Some(values),
            _ => None,
        }
    }

    /// Returns the state of an instance of `class`.
    pub(super) fn object(&self, class: Class, value: Value<'a>) -> Option<Value<'a>> {
        match self.node(value)? {
            Node::Object(found, state) if *found == class => *state,
            _ => None,
        }
    }

    /// Returns an attribute of an instance of `class`.
    pub(super) fn field(&self, class: Class, value: Value<'a>, name: &str) -> Option<Value<'a>> {
        let state = self.dict(self.object(class, value)?)?;
        state.iter().find(|(key, _)| *key == Value::Text(name)).map(|(_, value)| *value)
    }

    /// Returns a tuple or list of sizes.
    pub(super) fn sizes(&self, value: Value<'a>) -> Option<Vec<usize>> {
        self.sequence(value)?.iter().map(|&value| size(value)).collect()
    }
}

/// Returns a value as a number that is not negative.
pub(super) fn size(value: Value<'_>) -> Option<usize> {
    match value {
        Value::Int(number) => usize::try_from(number).ok(),
        _ => None,
    }
}
