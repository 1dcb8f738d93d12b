//! The contract that the macros implement for a user's types: the static layout tree of a model,
//! the visitors and mappers over its parameters, and the values that a unit's forward takes and
//! returns.
//!
//! Order of the files, from the bottom up: `node`, `random`, `adapter`, `exchange`, `runtime`, `running`, `param`,
//! `contract`, `path`, `containers`, `opaque`, `burn_nn`, `unit_type`, `unit_value`, `const_check`, `lora`.

mod adapter;
mod burn_nn;
pub(crate) mod const_check;
mod containers;
mod contract;
mod exchange;
pub(crate) mod lora;
mod node;
pub(crate) mod opaque;
mod param;
mod path;
mod random;
mod running;
mod runtime;
mod unit_type;
mod unit_value;

pub(crate) use self::adapter::{AdapterDropout, AdapterSettings, ConfiguredLora};
pub use self::contract::{
    FsdpModule, FsdpUnit, HookedForward, ParamMapper, ParamVisitor, SplitColumns, SplitLinear,
    SplitVocabulary,
};
pub(crate) use self::exchange::Exchange;
pub use self::node::{Child, Forward, Kind, LEAF, Node, Split, Tie};
pub use self::param::Sharded;
pub(crate) use self::param::{AdaptedWeight, AdapterFactors, with_autodiff_of};
pub(crate) use self::path::{ModulePath, param_ids};
pub use self::random::RandomSource;
pub(crate) use self::random::{
    Draw, DrawnMask, Mask, Playback, RandomStream, Recording, Source, Values, capture_draws,
};
pub(crate) use self::running::RunningForward;
pub(crate) use self::runtime::{CallId, ForwardFn, ParamIndex, Runtime, SavedForward};
pub use self::unit_type::UnitType;
pub use self::unit_value::UnitValue;
