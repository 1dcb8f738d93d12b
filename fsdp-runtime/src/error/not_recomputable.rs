//! Why a forward cannot be recomputed in backward.

/// Why a forward cannot be run again in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotRecomputable {
    /// An input is a reference, or holds one: what it refers to may have changed by then.
    Borrowed,
    /// An input's type is each caller's own.
    Generic,
    /// An input's type is not `UnitValue + Clone + Send + 'static`.
    Unknown,
    /// What it returns is a reference, holds one, or is each caller's own.
    Output,
}

impl NotRecomputable {
    /// What stands in the way, and what to write instead.
    pub(crate) const fn advice(self) -> &'static str {
        match self {
            Self::Borrowed => {
                "is borrowed, and may have changed when the forward is run again in backward; take \
                 it by value, and return what the forward changes"
            }
            Self::Generic => {
                "is of a type that each caller chooses, so nothing can keep it until backward; \
                 write the type out"
            }
            Self::Unknown => {
                "cannot be kept until backward; its type must be `Clone` and `Send`, and FSDP must \
                 know its tensors: write `#[derive(Clone, UnitValue)]` on it"
            }
            Self::Output => {
                "borrows from the call, or is of a type that each caller chooses; return tensors, \
                 or a struct of them under `#[derive(UnitValue)]`"
            }
        }
    }
}
