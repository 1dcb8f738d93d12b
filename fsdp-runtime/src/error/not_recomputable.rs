//! The reason why a forward cannot be recomputed in backward.

/// The reason why a forward cannot be recomputed in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotRecomputable {
    /// An input that contains a reference, or is one to a value that is not `Clone + Send + 'static`:
    /// the value may have changed before backward.
    Borrowed,
    /// An input that is a reference to a module with parameters, whose gradients are not those of the
    /// recomputed unit.
    Parameters,
    /// An input with a generic type.
    Generic,
    /// An input whose type is not `UnitValue + Clone + Send + 'static`.
    Unknown,
    /// A return value that is or contains a reference, or that has a generic type.
    Output,
}

impl NotRecomputable {
    /// Returns the second half of an error text: the reason, and what to write instead.
    pub(crate) const fn advice(self) -> &'static str {
        match self {
            Self::Borrowed => {
                "is borrowed, and may have changed when the forward is recomputed in backward; take \
                 it by value, or as `&T` of a type `T: Clone + Send + 'static`, and return what the \
                 forward changes"
            }
            Self::Parameters => {
                "is a reference to a module with parameters, which would be used after their own unit \
                 was resharded; make the module a field of this unit, or compute its result outside \
                 and take that"
            }
            Self::Generic => {
                "has a type that each caller chooses, so it cannot be kept until backward; use a \
                 concrete type"
            }
            Self::Unknown => {
                "cannot be kept until backward; its type must be `Clone` and `Send`, and FSDP must \
                 know its tensors: write `#[derive(Clone, UnitValue)]` on it"
            }
            Self::Output => {
                "is borrowed, or has a type that each caller chooses; return tensors, or a struct of \
                 tensors with `#[derive(UnitValue)]`"
            }
        }
    }
}
