//! What the macros implement for a user's types: the static layout tree of a model, the visitors and
//! mappers over its parameters, and the values that a unit's forward takes and returns.

mod burn_nn;
pub(crate) mod const_check;
mod contract;
pub(crate) mod opaque;
mod param;
mod random;
mod unit_type;
mod unit_value;

pub use self::contract::*;
pub use self::param::Sharded;
pub(crate) use self::param::{CallId, KeptForward, ParamIndex, Run, Runtime};
pub use self::random::RandomSource;
pub(crate) use self::random::{Draw, Playback, RandomStream, Recording, Source};
pub use self::unit_type::UnitType;
pub use self::unit_value::UnitValue;
