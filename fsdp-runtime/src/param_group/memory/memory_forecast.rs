//! The memory that one rank will need, by kind.

use std::fmt;

use super::super::mib::mib;

/// The most bytes that one rank will use on its device in training, by kind.
///
/// The kinds are those of [`Memory`](crate::memory::Memory), but activations include those in Burn's
/// autodiff graph, which the caller has to estimate. All parameters that are stored in f32 are assumed
/// to be trained, and of those in bf16 the ones that require a gradient. A unit before which no trained
/// parameter is declared is assumed to take inputs of the model, which need no gradient: its gradients
/// arrive after those of all other units. `Display` prints a table in MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub struct MemoryForecast {
    /// Shards of sharded parameters.
    pub shards: usize,
    /// Replicated parameters, or their device copies if they are stored on the host.
    pub replicated: usize,
    /// Gather buffers, and copies of shards that are cast or moved to the device for an all-gather. Ranks that
    /// are threads on Flex and gather in place
    /// ([`with_gather_in_place`](crate::options::FsdpOptions::with_gather_in_place)) need less.
    pub gathered: usize,
    /// Gradients, at the moment of a backward pass when they take the most.
    pub gradients: usize,
    /// The optimizer's state; 0 until [`with_optimizer`](Self::with_optimizer) sets it.
    pub optimizer: usize,
    /// Activations; 0 until [`with_activations`](Self::with_activations) sets them.
    pub activations: usize,
    /// Memory on the host, in place of the device.
    pub host: HostForecast,
    /// Gradients on the device and on the host if a step accumulates several micro-batches.
    pub(crate) accumulated: (usize, usize),
    /// Bytes of the parameters that this rank's optimizer steps, in f32.
    pub(crate) stepped: usize,
    /// Bytes of the largest copy in f32 that an optimizer steps in place of a parameter in bf16.
    pub(crate) step_copy: usize,
    /// Elements of the probes of the optimizer's check.
    pub(crate) probes: usize,
    /// Whether parameters and optimizer state are stored on the host.
    pub(crate) offloaded: bool,
    /// Whether the device uses host memory.
    pub(crate) on_host: bool,
}

/// The host part of a [`MemoryForecast`], in bytes.
///
/// Without an [`OffloadPolicy`](crate::options::OffloadPolicy) every kind but `activations` is 0, and on devices
/// other than Flex the `optimizer`, which has the state of the optimizer's check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub struct HostForecast {
    /// Shards of sharded parameters, in bytes.
    pub shards: usize,
    /// Replicated parameters, in bytes.
    pub replicated: usize,
    /// Reduced gradients of all parameters, in bytes.
    pub gradients: usize,
    /// The optimizer's state; 0 until [`with_optimizer`](MemoryForecast::with_optimizer) sets it.
    pub optimizer: usize,
    /// Inputs of units under activation checkpointing; 0 until
    /// [`with_host_activations`](MemoryForecast::with_host_activations) sets them.
    pub activations: usize,
}

impl HostForecast {
    /// Returns every kind with its name, and the total last.
    pub fn kinds(&self) -> impl Iterator<Item = (&'static str, usize)> + use<> {
        let kinds = [
            ("shards", self.shards),
            ("replicated", self.replicated),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("activations", self.activations),
            ("total", self.total()),
        ];
        kinds.into_iter()
    }

    /// Returns the sum of all kinds.
    pub const fn total(&self) -> usize {
        self.shards + self.replicated + self.gradients + self.optimizer + self.activations
    }
}

impl MemoryForecast {
    /// Adds an optimizer with `moments` f32 values for each element of a parameter: 2 for Adam and
    /// AdamW (3 with `amsgrad`), 1 for SGD with momentum. Also counts the copy in f32 of the largest
    /// parameter that is trained in bf16, and the state that the
    /// [check](crate::FsdpOptions::with_optimizer_check) of the optimizer leaves in host memory.
    pub const fn with_optimizer(mut self, moments: usize) -> Self {
        let bytes = moments * self.stepped + self.step_copy;
        let of_probes = moments * self.probes * size_of::<f32>();
        if self.offloaded {
            self.host.optimizer = bytes + of_probes;
        } else if self.on_host {
            self.optimizer = bytes + of_probes;
        } else {
            self.optimizer = bytes;
            self.host.optimizer = of_probes;
        }
        self
    }

    /// Counts the gradients of a step that accumulates several micro-batches, with
    /// [`Fsdp::accumulate`](crate::Fsdp::accumulate).
    pub const fn with_accumulation(mut self) -> Self {
        (self.gradients, self.host.gradients) = self.accumulated;
        self
    }

    /// Sets the activations on the device, in bytes. [`linear_bytes`](crate::nn::linear_bytes),
    /// [`attention_bytes`](crate::nn::attention_bytes) and
    /// [`linear_cross_entropy_bytes`](crate::nn::linear_cross_entropy_bytes) return those of three
    /// operations.
    pub const fn with_activations(mut self, bytes: usize) -> Self {
        self.activations = bytes;
        self
    }

    /// Sets the inputs of units under activation checkpointing on the host, in bytes.
    pub const fn with_host_activations(mut self, bytes: usize) -> Self {
        self.host.activations = bytes;
        self
    }

    /// Returns every kind on the device with its name, and the total last.
    pub fn kinds(&self) -> impl Iterator<Item = (&'static str, usize)> + use<> {
        let kinds = [
            ("shards", self.shards),
            ("replicated", self.replicated),
            ("gathered", self.gathered),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("activations", self.activations),
            ("total", self.total()),
        ];
        kinds.into_iter()
    }

    /// Returns the sum of all kinds on the device.
    pub const fn total(&self) -> usize {
        self.shards
            + self.replicated
            + self.gathered
            + self.gradients
            + self.optimizer
            + self.activations
    }

    /// Checks that a rank with `available` bytes on its device can train.
    ///
    /// # Errors
    ///
    /// Returns [`MemoryError::DoesNotFit`], whose text includes this table, if it cannot.
    pub fn check(&self, available: usize) -> Result<(), MemoryError> {
        if self.total() > available {
            return Err(MemoryError::DoesNotFit { available, forecast: Box::new(*self) });
        }
        Ok(())
    }

    /// Checks that a rank with `available` bytes on the host can train.
    ///
    /// Set `with_device` if the device uses host memory, as Flex does: the device's part then
    /// counts as well.
    ///
    /// # Errors
    ///
    /// Returns [`MemoryError::HostDoesNotFit`], whose text includes this table, if it cannot.
    pub fn check_host(&self, available: usize, with_device: bool) -> Result<(), MemoryError> {
        let needed = self.host.total() + if with_device { self.total() } else { 0 };
        if needed > available {
            return Err(MemoryError::HostDoesNotFit {
                needed,
                available,
                forecast: Box::new(*self),
            });
        }
        Ok(())
    }
}

impl fmt::Display for MemoryForecast {
    /// Prints a table in MiB: one row for each kind and one for the total. A second column has the
    /// host's part, if there is any.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<12}{:>12}", "MiB per rank", "at most")?;
        let on_host = self.host.total() > 0;
        if on_host {
            write!(f, "{:>12}", "on the host")?;
        }
        for (name, bytes) in self.kinds() {
            write!(f, "\n{name:<12}{:>12.2}", mib(bytes))?;
            let host = self.host.kinds().find(|(kind, _)| on_host && *kind == name);
            if let Some((_, bytes)) = host {
                write!(f, "{:>12.2}", mib(bytes))?;
            }
        }
        Ok(())
    }
}

/// A model that needs more memory than its ranks have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A rank that needs more memory on its device than there is.
    #[error(
        "a rank needs {:.2} MiB on its device, but has {:.2} MiB; use more ranks, a smaller batch, \
         shorter samples, half precision, offload or activation checkpointing\n{forecast}",
        mib(forecast.total()),
        mib(*available)
    )]
    DoesNotFit {
        /// Bytes that a rank may use on its device.
        available: usize,
        /// Memory that the rank needs.
        forecast: Box<MemoryForecast>,
    },
    /// A rank that needs more memory on its host than there is.
    #[error(
        "a rank needs {:.2} MiB on its host, but has {:.2} MiB; use more ranks on other machines, or \
         an `OffloadPolicy` that keeps more on the device\n{forecast}",
        mib(*needed),
        mib(*available)
    )]
    HostDoesNotFit {
        /// Bytes that the rank needs on its host, including those of a device that uses host
        /// memory.
        needed: usize,
        /// Bytes that a rank may use on its host.
        available: usize,
        /// Memory that the rank needs.
        forecast: Box<MemoryForecast>,
    },
}
