//! Rules over the static layout tree, as `const fn`s that generated code calls in constants.
//!
//! A broken rule fails the constant with a message that names the paths involved. Every rule is
//! `#[track_caller]`, so the compiler points at the caller, whose tokens carry the position of the
//! user's code. Rules that concern a single item are in `fsdp-macros`.
//!
//! Order of the files, from the bottom up: `text`, `probe`, `keys`, `recompute`, `ties`, `units`.

mod keys;
mod probe;
mod recompute;
mod text;
mod ties;
mod units;

pub use self::keys::{have_distinct_keys, have_distinct_keys_of_generic, num_keys};
pub use self::probe::{BurnModule, DerivesModule, Fallback, Probe};
pub use self::recompute::{can_be_recomputed, not_kept};
pub use self::ties::{are_split_alike, leads_to_a_weight, lie_in_one_unit};
pub use self::units::{can_be_a_unit, has_hooks, hides_no_unit, is_a_sound_unit, skips_no_unit};
