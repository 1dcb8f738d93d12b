//! Numbers in the state of optimizers and schedulers, as exact text.

use std::collections::BTreeMap;
use std::fmt;

use burn_pack::Scalar as Packed;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Numbers of an optimizer's or scheduler's state, by name.
pub type Scalars = BTreeMap<String, Scalar>;

/// A number of one of the kinds in Burn's records.
///
/// It is serialised as text with the kind, `uint 10`: JSON has no infinity, and a JSON reader may
/// change a float's last bit.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Scalar {
    /// A signed integer.
    Int(i64),
    /// An unsigned integer.
    UInt(u64),
    /// A float. Two floats are equal if their bits are.
    Float(f64),
    /// A Boolean.
    Bool(bool),
}

impl PartialEq for Scalar {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Int(a), Self::Int(b)) => a == b,
            (Self::UInt(a), Self::UInt(b)) => a == b,
            (Self::Float(a), Self::Float(b)) => a.to_bits() == b.to_bits(),
            (Self::Bool(a), Self::Bool(b)) => a == b,
            _ => false,
        }
    }
}

impl Scalar {
    /// Returns the name of the kind: `int`, `uint`, `float` or `bool`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Int(_) => "int",
            Self::UInt(_) => "uint",
            Self::Float(_) => "float",
            Self::Bool(_) => "bool",
        }
    }
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.kind())?;
        match self {
            Self::Int(x) => x.fmt(f),
            Self::UInt(x) => x.fmt(f),
            Self::Float(x) => write!(f, "{x:?}"),
            Self::Bool(x) => x.fmt(f),
        }
    }
}

impl Serialize for Scalar {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'a> Deserialize<'a> for Scalar {
    fn deserialize<D: Deserializer<'a>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let number = match text.split_once(' ') {
            Some(("int", x)) => x.parse().ok().map(Self::Int),
            Some(("uint", x)) => x.parse().ok().map(Self::UInt),
            Some(("float", x)) => x.parse().ok().map(Self::Float),
            Some(("bool", x)) => x.parse().ok().map(Self::Bool),
            _ => None,
        };
        number.ok_or_else(|| {
            D::Error::custom(format!(
                "`{text}` is not a number preceded by its kind, such as `uint 10`"
            ))
        })
    }
}

impl From<Packed> for Scalar {
    fn from(packed: Packed) -> Self {
        match packed {
            Packed::Int(x) => Self::Int(x),
            Packed::UInt(x) => Self::UInt(x),
            Packed::Float(x) => Self::Float(x),
            Packed::Bool(x) => Self::Bool(x),
        }
    }
}

impl From<Scalar> for Packed {
    fn from(scalar: Scalar) -> Self {
        match scalar {
            Scalar::Int(x) => Self::Int(x),
            Scalar::UInt(x) => Self::UInt(x),
            Scalar::Float(x) => Self::Float(x),
            Scalar::Bool(x) => Self::Bool(x),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_unchanged_by_serialisation() {
        for scalar in [
            Scalar::Int(i64::MIN),
            Scalar::UInt(u64::MAX),
            Scalar::Float(0.1 + 0.2),
            Scalar::Float(f64::INFINITY),
            Scalar::Float(-0.0),
            Scalar::Float(5e-324),
            Scalar::Bool(true),
        ] {
            let text = serde_json::to_string(&scalar).unwrap();
            assert_eq!(serde_json::from_str::<Scalar>(&text).unwrap(), scalar, "{text}");
        }
        for text in ["\"float\"", "\"uint -1\"", "\"real 1\"", "3"] {
            assert!(serde_json::from_str::<Scalar>(text).is_err(), "{text}");
        }
    }
}
