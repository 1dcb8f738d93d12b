//! The machines that a plan is made for: accelerators, links and prices.

use serde::Serialize;

/// A device that computes.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Accelerator {
    /// Name, for tables and the command line.
    pub name: &'static str,
    /// Peak of dense matrix products in half precision (bf16), in FLOP/s.
    pub half_flops: f64,
    /// Peak of dense matrix products of f32 tensors, in FLOP/s.
    pub single_flops: f64,
    /// Memory, in bytes.
    pub memory: usize,
    /// Memory bandwidth, in bytes per second.
    pub memory_bandwidth: f64,
    /// Share of the peak that the matrix products of training reach, including the kernels between
    /// them.
    pub efficiency: f64,
    /// Price of one device for one hour in US dollars, as an order of magnitude.
    pub dollars_per_hour: f64,
    /// Document that the figures are from.
    pub source: &'static str,
}

/// A link of one device, in each direction.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Link {
    /// Name, for tables and the command line.
    pub name: &'static str,
    /// Bandwidth of one device in one direction, in bytes per second.
    pub bandwidth: f64,
    /// Time of a message of no bytes, in seconds.
    pub latency: f64,
    /// Document that the figures are from.
    pub source: &'static str,
}

/// Equal machines with several devices each.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Cluster {
    /// The device of each rank.
    pub accelerator: Accelerator,
    /// Number of devices in a machine.
    pub per_machine: usize,
    /// Link between the devices of one machine.
    pub inside: Link,
    /// Link between devices of different machines.
    pub between: Link,
    /// Link between a device and the memory of its host.
    pub host: Link,
    /// Share of a link's bandwidth that collectives reach.
    pub link_efficiency: f64,
    /// Share of the memory bandwidth that the optimizer reaches.
    pub memory_efficiency: f64,
    /// Share of the device's memory that training may use. The rest is for the driver, libraries and
    /// fragments.
    pub usable_memory: f64,
    /// Whether all ranks of a machine share one device, as thread ranks on a CPU do.
    pub shares_device: bool,
}

const TERA: f64 = 1e12;
const GIGA: f64 = 1e9;

/// Device presets. Peaks are dense, without sparsity.
const ACCELERATORS: [Accelerator; 7] = [
    Accelerator {
        name: "a100",
        half_flops: 312.0 * TERA,
        single_flops: 156.0 * TERA,
        memory: 80 * GIB,
        memory_bandwidth: 2039.0 * GIGA,
        efficiency: 0.573,
        dollars_per_hour: 1.8,
        source: "NVIDIA A100 80GB SXM datasheet",
    },
    Accelerator {
        name: "h100",
        half_flops: 989.4 * TERA,
        single_flops: 494.7 * TERA,
        memory: 80 * GIB,
        memory_bandwidth: 3350.0 * GIGA,
        efficiency: 0.347,
        dollars_per_hour: 3.0,
        source: "NVIDIA H100 SXM5 datasheet",
    },
    Accelerator {
        name: "h100-96",
        half_flops: 989.4 * TERA,
        single_flops: 494.7 * TERA,
        memory: 96 * GIB,
        memory_bandwidth: 2400.0 * GIGA,
        efficiency: 0.347,
        dollars_per_hour: 3.0,
        source: "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (HBM2e, 500 W)",
    },
    Accelerator {
        name: "h200",
        half_flops: 989.4 * TERA,
        single_flops: 494.7 * TERA,
        memory: 141 * 1_000_000_000,
        memory_bandwidth: 4800.0 * GIGA,
        efficiency: 0.347,
        dollars_per_hour: 3.8,
        source: "NVIDIA H200 SXM datasheet",
    },
    Accelerator {
        name: "b200",
        half_flops: 2250.0 * TERA,
        single_flops: 1125.0 * TERA,
        memory: 180 * 1_000_000_000,
        memory_bandwidth: 7700.0 * GIGA,
        efficiency: 0.347,
        dollars_per_hour: 6.0,
        source: "NVIDIA DGX B200 datasheet, an eighth of the system",
    },
    Accelerator {
        name: "l4",
        half_flops: 121.0 * TERA,
        single_flops: 60.0 * TERA,
        memory: 24 * 1_000_000_000,
        memory_bandwidth: 300.0 * GIGA,
        efficiency: 0.5,
        dollars_per_hour: 0.7,
        source: "NVIDIA L4 datasheet, half of the figure with sparsity",
    },
    Accelerator {
        name: "rtx4090",
        half_flops: 165.2 * TERA,
        single_flops: 82.6 * TERA,
        memory: 24 * 1_000_000_000,
        memory_bandwidth: 1008.0 * GIGA,
        efficiency: 0.5,
        dollars_per_hour: 0.4,
        source: "NVIDIA Ada GPU architecture whitepaper, FP16 with FP32 accumulate",
    },
];
const GIB: usize = 1 << 30;

/// Link presets, each direction of one device.
const LINKS: [Link; 9] = [
    link("nvlink3", 300.0, 3e-6, "NVIDIA A100 datasheet: 600 GB/s in both directions"),
    link("nvlink4", 450.0, 3e-6, "NVIDIA H100 datasheet: 900 GB/s in both directions"),
    link("nvlink5", 900.0, 3e-6, "NVIDIA DGX B200 datasheet: 1.8 TB/s in both directions"),
    link("800g", 100.0, 8e-6, "800 Gb/s for each device: InfiniBand XDR"),
    link("400g", 50.0, 8e-6, "400 Gb/s for each device: InfiniBand NDR"),
    link("200g", 25.0, 8e-6, "200 Gb/s for each device: InfiniBand HDR"),
    link("100g", 12.5, 10e-6, "100 Gb/s for each device: 100 Gb Ethernet"),
    link("pcie5", 63.0, 5e-6, "PCI Express 5.0 x16"),
    link("pcie4", 31.5, 5e-6, "PCI Express 4.0 x16"),
];

const fn link(name: &'static str, gigabytes: f64, latency: f64, source: &'static str) -> Link {
    Link { name, bandwidth: gigabytes * GIGA, latency, source }
}

/// Error for a name that no preset has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no {what} `{name}`; there are: {known}")]
pub struct UnknownPreset {
    /// What was looked for, such as `device`.
    pub what: &'static str,
    /// The name that was given.
    pub name: String,
    /// Names that there are.
    pub known: String,
}

impl UnknownPreset {
    pub(super) fn new<'a>(
        what: &'static str,
        name: &str,
        known: impl Iterator<Item = &'a str>,
    ) -> Self {
        Self { what, name: name.into(), known: known.collect::<Vec<_>>().join(", ") }
    }
}

impl Accelerator {
    /// Returns the presets: `a100`, `h100`, `h100-96`, `h200`, `b200`, `l4`, `rtx4090`.
    pub const fn presets() -> &'static [Self] {
        &ACCELERATORS
    }

    /// Returns the preset with a name, in any case.
    ///
    /// # Errors
    ///
    /// [`UnknownPreset`] for another name.
    pub fn preset(name: &str) -> Result<Self, UnknownPreset> {
        let found = ACCELERATORS.iter().find(|it| it.name.eq_ignore_ascii_case(name));
        let known = ACCELERATORS.iter().map(|it| it.name);
        found.cloned().ok_or_else(|| UnknownPreset::new("device", name, known))
    }
}

impl Link {
    /// Returns the presets: `nvlink3` to `nvlink5`, `800g`, `400g`, `200g`, `100g`, `pcie5`, `pcie4`.
    pub const fn presets() -> &'static [Self] {
        &LINKS
    }

    /// Returns the preset with a name, in any case.
    ///
    /// # Errors
    ///
    /// [`UnknownPreset`] for another name.
    pub fn preset(name: &str) -> Result<Self, UnknownPreset> {
        let found = LINKS.iter().find(|it| it.name.eq_ignore_ascii_case(name));
        let known = LINKS.iter().map(|it| it.name);
        found.cloned().ok_or_else(|| UnknownPreset::new("link", name, known))
    }

    /// Creates a link of a bandwidth in bytes per second and a latency in seconds.
    pub const fn new(name: &'static str, bandwidth: f64, latency: f64) -> Self {
        Self { name, bandwidth, latency, source: "" }
    }
}

impl Cluster {
    /// Returns machines of eight devices of a preset, with the links that such machines have: NVLink
    /// inside for the devices that have it and PCIe for the others, 400 Gb/s for each device between
    /// machines, or 100 Gb/s for devices without NVLink.
    ///
    /// # Errors
    ///
    /// [`UnknownPreset`] for a name that no device has.
    pub fn preset(device: &str) -> Result<Self, UnknownPreset> {
        let accelerator = Accelerator::preset(device)?;
        let (inside, between, host) = match accelerator.name {
            "a100" => ("nvlink3", "200g", "pcie4"),
            "b200" => ("nvlink5", "400g", "pcie5"),
            "l4" | "rtx4090" => ("pcie4", "100g", "pcie4"),
            _ => ("nvlink4", "400g", "pcie5"),
        };
        let link = |name: &str| Link::preset(name);
        let (inside, between, host) = (link(inside)?, link(between)?, link(host)?);
        Ok(Self::new(accelerator, 8, inside, between, host))
    }

    /// Creates machines of `per_machine` devices with the given links.
    pub const fn new(
        accelerator: Accelerator,
        per_machine: usize,
        inside: Link,
        between: Link,
        host: Link,
    ) -> Self {
        Self {
            accelerator,
            per_machine,
            inside,
            between,
            host,
            link_efficiency: 0.8,
            memory_efficiency: 0.8,
            usable_memory: 0.94,
            shares_device: false,
        }
    }

    /// Returns a machine whose processor all ranks share, as thread ranks do. `flops` and
    /// `bandwidth` are those of the whole processor, in FLOP/s and bytes per second, as measured.
    pub fn processor(flops: f64, bandwidth: f64, memory: usize) -> Self {
        let accelerator = Accelerator {
            name: "processor",
            half_flops: flops,
            single_flops: flops,
            memory,
            memory_bandwidth: bandwidth,
            efficiency: 1.0,
            dollars_per_hour: 0.0,
            source: "measured",
        };
        let memory = Link::new("memory", bandwidth, 2e-5);
        let cluster = Self::new(accelerator, usize::MAX, memory.clone(), memory.clone(), memory);
        Self { shares_device: true, ..cluster }
    }

    /// Returns the bytes of a device that training may use.
    pub fn usable(&self) -> usize {
        (self.accelerator.memory as f64 * self.usable_memory) as usize
    }
}
