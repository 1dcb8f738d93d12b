//! The collectives of a plan, and the time that they take on a cluster.

use serde::Serialize;

use super::cluster::Cluster;
use super::work::{Recomputation, UnitWork};
use crate::layout::Mesh;
use crate::plan::rehearsal::{Action, Part, Peers};

/// Operation of a [`Collective`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Operation {
    /// Every rank receives the shards of all ranks.
    AllGather,
    /// Every rank receives the sums of its shards.
    ReduceScatter,
    /// Every rank receives all sums.
    AllReduce,
}

impl Operation {
    /// Returns the name: `all_gather`, `reduce_scatter` or `all_reduce`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllReduce => "all_reduce",
        }
    }

    /// Returns how often each byte of the full tensor crosses a rank's link.
    const fn passes(self) -> f64 {
        match self {
            Self::AllReduce => 2.0,
            _ => 1.0,
        }
    }
}

/// A collective that a rank issues.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Collective {
    /// Operation.
    pub operation: Operation,
    /// Module path of the unit; empty for the outermost one.
    pub unit: String,
    /// Number of ranks that take part.
    pub ranks: usize,
    /// Bytes of the full tensor as it is sent, padding included.
    pub bytes: usize,
    /// Whether it is issued before its unit is needed.
    pub ahead: bool,
    /// Bytes that this rank receives from devices of its machine, and the number of messages.
    pub inside: Traffic,
    /// Bytes that this rank receives from other machines, and the number of messages.
    pub between: Traffic,
}

/// What a rank receives in a collective over the links of one level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Traffic {
    /// Bytes.
    pub bytes: usize,
    /// Messages.
    pub messages: usize,
}

/// The ranks of a collective, by where they are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spread {
    /// Ranks in each machine.
    pub(super) inside: usize,
    /// Machines.
    pub(super) machines: usize,
}

impl Spread {
    /// Returns how the ranks of a collective lie in machines of `per_machine` devices.
    pub(super) fn new(peers: Peers, mesh: Mesh, per_machine: usize) -> Self {
        let shard = mesh.shard_size().size();
        let of_neighbours = |ranks: usize, per_machine: usize| {
            let inside = ranks.min(per_machine);
            Self { inside, machines: ranks.div_ceil(inside) }
        };
        let tensor = mesh.tensor_size().size();
        let devices = per_machine;
        // Each data parallel rank is as many devices as there are tensor parallel ranks.
        let per_machine = (devices / tensor).max(1);
        match peers {
            Peers::Tensor => of_neighbours(tensor, devices),
            Peers::Context => of_neighbours(mesh.context_size().size(), per_machine),
            Peers::Shard => of_neighbours(shard, per_machine),
            Peers::Block(size) => of_neighbours(size, per_machine),
            Peers::Replicas => {
                let replicas = mesh.replicas().size();
                let inside = (per_machine / shard).clamp(1, replicas);
                Self { inside, machines: replicas.div_ceil(inside) }
            }
        }
    }

    pub(super) fn ranks(self) -> usize {
        self.inside * self.machines
    }

    /// Returns what a rank receives inside its machine and from others.
    ///
    /// A ring algorithm: of `bytes`, a machine receives the part of the other machines once, over
    /// the links of all its devices, and hands it on inside.
    pub(super) fn traffic(self, operation: Operation, bytes: usize) -> (Traffic, Traffic) {
        let passes = operation.passes();
        let share = |parts: usize| passes * bytes as f64 * (parts - 1) as f64 / parts as f64;
        let between = share(self.machines) / self.inside as f64;
        let inside = (share(self.ranks()) - between).max(0.0);
        let inside = if self.inside == 1 { 0.0 } else { inside };
        let messages = |parts: usize| passes as usize * (parts - 1);
        (
            Traffic { bytes: inside as usize, messages: messages(self.inside) },
            Traffic { bytes: between as usize, messages: messages(self.machines) },
        )
    }

    /// Returns the time of a collective in seconds.
    ///
    /// The bytes inside and between machines move at the same time, so that the slower level counts.
    /// The messages inside a machine follow each other, and those between machines form a tree.
    pub(super) fn seconds(self, operation: Operation, bytes: usize, cluster: &Cluster) -> f64 {
        if self.ranks() == 1 || bytes == 0 {
            return 0.0;
        }
        let (inside, between) = self.traffic(operation, bytes);
        // The ranks of a machine that share a device share its memory's bandwidth.
        let sharing = if cluster.shares_device { self.inside as f64 } else { 1.0 };
        let time = |bytes: usize, bandwidth: f64| {
            bytes as f64 * sharing / (bandwidth * cluster.link_efficiency)
        };
        let moving = time(inside.bytes, cluster.inside.bandwidth)
            .max(time(between.bytes, cluster.between.bandwidth));
        let steps = (self.machines as f64).log2().ceil();
        let latency = inside.messages as f64 * cluster.inside.latency
            + operation.passes() * steps * cluster.between.latency;
        moving + latency
    }
}

/// Returns the exchanges of activations in a part of a unit's computation: the operation, the ranks, and the bytes
/// of the full tensor.
pub(super) fn exchanges(
    work: &UnitWork,
    part: Part,
    mesh: Mesh,
    recomputation: Recomputation,
) -> Vec<(Operation, Peers, usize)> {
    use Operation::{AllGather, AllReduce, ReduceScatter};
    let mut found = Vec::new();
    for _ in 0..work.tensor_exchanges {
        match mesh.splits_sequence() {
            true => found.extend(
                [AllGather, ReduceScatter].map(|it| (it, Peers::Tensor, work.tensor_bytes)),
            ),
            false => found.push((AllReduce, Peers::Tensor, work.tensor_bytes)),
        }
        // torchtitan gathers the inputs of split layers again.
        if part == Part::Backward && recomputation == Recomputation::Selective {
            found.push((AllGather, Peers::Tensor, work.tensor_bytes));
        }
    }
    if work.context_bytes > 0 {
        found.push((AllGather, Peers::Context, work.context_bytes));
        if part == Part::Backward {
            found.push((ReduceScatter, Peers::Context, work.context_bytes));
        }
    }
    found
}

/// A collective of an action.
pub(super) struct Issued {
    pub(super) operation: Operation,
    pub(super) unit: usize,
    pub(super) peers: Peers,
    pub(super) bytes: usize,
    pub(super) ahead: bool,
}

/// Returns the collectives that an action issues.
pub(super) fn issued(action: &Action) -> Vec<Issued> {
    match *action {
        Action::Gather { gathers, unit, peers, full, ahead, .. } if gathers > 0 => {
            vec![Issued { operation: Operation::AllGather, unit, peers, bytes: full, ahead }]
        }
        Action::Reduce { unit, scatters, sharded, replicated, replicas, .. } => {
            let issue =
                |operation, peers, bytes| Issued { operation, unit, peers, bytes, ahead: false };
            let first = if scatters { Operation::ReduceScatter } else { Operation::AllReduce };
            let parts = [
                (first, Peers::Shard, sharded),
                (Operation::AllReduce, Peers::Shard, replicated),
                (Operation::AllReduce, Peers::Replicas, replicas.unwrap_or(0)),
            ];
            let parts = parts.into_iter().filter(|(.., bytes)| *bytes > 0);
            parts.map(|(operation, peers, bytes)| issue(operation, peers, bytes)).collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Rank, WorldSize};

    fn mesh(world: usize, shard: usize) -> Mesh {
        let mesh = Mesh::new(Rank::ZERO, WorldSize::new(world).unwrap());
        mesh.grouped(shard).unwrap()
    }

    #[test]
    fn ranks_fill_machines() {
        let spread = |peers, world, shard| {
            let spread = Spread::new(peers, mesh(world, shard), 8);
            (spread.inside, spread.machines)
        };
        assert_eq!(spread(Peers::Shard, 4, 4), (4, 1));
        assert_eq!(spread(Peers::Shard, 64, 64), (8, 8));
        assert_eq!(spread(Peers::Shard, 64, 8), (8, 1));
        assert_eq!(spread(Peers::Replicas, 64, 8), (1, 8));
        assert_eq!(spread(Peers::Replicas, 64, 2), (4, 8));
        assert_eq!(spread(Peers::Block(8), 64, 64), (8, 1));
        // Two machines, each with two data parallel ranks of four devices.
        let mesh = Mesh::new(Rank::ZERO, WorldSize::new(16).unwrap());
        let mesh = mesh.tensor_parallel(4).unwrap().context_parallel(2).unwrap();
        let spread = |peers| {
            let spread = Spread::new(peers, mesh, 8);
            (spread.inside, spread.machines)
        };
        let peers = [Peers::Tensor, Peers::Context, Peers::Shard];
        assert_eq!(peers.map(spread), [(4, 1), (2, 1), (2, 2)]);
    }

    #[test]
    fn a_rank_receives_what_it_lacks() {
        let spread = Spread { inside: 8, machines: 4 };
        let (inside, between) = spread.traffic(Operation::AllGather, 3200);
        assert_eq!(inside.bytes + between.bytes, 3100, "all but its own 100");
        assert_eq!(between.bytes, 300, "an eighth of what the machine lacks");
        let (inside, between) = spread.traffic(Operation::AllReduce, 3200);
        assert_eq!((inside.bytes + between.bytes, between.bytes), (6200, 600));
        let alone = Spread { inside: 1, machines: 1 };
        assert_eq!(alone.traffic(Operation::AllGather, 3200), Default::default());
    }

    #[test]
    fn the_slower_level_decides() {
        let cluster = Cluster::preset("h100").unwrap();
        let seconds = |spread: Spread| spread.seconds(Operation::AllGather, 1 << 30, &cluster);
        let one = seconds(Spread { inside: 8, machines: 1 });
        let two = seconds(Spread { inside: 8, machines: 2 });
        let many = seconds(Spread { inside: 8, machines: 64 });
        let thin = seconds(Spread { inside: 1, machines: 8 });
        let nvlink = (1u64 << 30) as f64 * 7.0 / 8.0 / (450e9 * 0.8);
        assert!((one - nvlink).abs() < 1e-4, "{one} {nvlink}");
        assert!(one <= two && two < many && many < thin, "{one} {two} {many} {thin}");
    }
}
