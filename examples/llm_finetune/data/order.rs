//! Order of rows, and their assignment to steps and ranks.
//!
//! The rows of a step are chosen for all ranks together. Rank `r` of `w` takes every `w`-th of
//! them, from the `r`-th on. Therefore a step has the same rows on any number of ranks. The last
//! step of an epoch has the rows that are left. A rank without a row there has an empty share: it
//! takes part in the step's collectives with a batch of padding, of weight 0.

use serde::{Deserialize, Serialize};

use super::shuffle::shuffled;

/// Order in which rows are trained on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// Seed of the shuffle, or `None` for the order of the data.
    seed: Option<u64>,
}

/// Place in the training data, from which training goes on after a restart. It is kept in rows, so
/// that the number of rows of a step may change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Epoch, from 0.
    pub epoch: u64,
    /// Number of rows of the epoch that were trained on.
    pub row: usize,
}

impl Order {
    /// Creates an order that is shuffled in each epoch. It depends on the seed and the epoch only.
    pub fn new(seed: u64) -> Self {
        Self { seed: Some(seed) }
    }

    /// Creates the order of the data, the same in each epoch.
    pub fn of_data() -> Self {
        Self { seed: None }
    }

    /// Returns the rows of an epoch in the order of training.
    pub fn epoch(&self, rows: usize, epoch: u64) -> Vec<usize> {
        match self.seed {
            Some(seed) => shuffled(rows, seed, epoch),
            None => (0..rows).collect(),
        }
    }
}

impl Cursor {
    /// Returns the place after a step of `global_rows` rows, in an epoch of `rows` rows. After the
    /// last row comes the next epoch.
    pub fn after_step(self, rows: usize, global_rows: usize) -> Self {
        let row = self.row + global_rows;
        if row >= rows { Self { epoch: self.epoch + 1, row: 0 } } else { Self { row, ..self } }
    }

    /// Returns the rows of one rank in the step that begins here. `order` is that of the epoch.
    pub fn share(
        self,
        order: &[usize],
        global_rows: usize,
        rank: usize,
        world: usize,
    ) -> Vec<usize> {
        let step = order.iter().skip(self.row).take(global_rows);
        step.skip(rank).step_by(world.max(1)).copied().collect()
    }
}

/// Returns the number of steps of an epoch. The last one may have fewer rows.
pub fn steps_per_epoch(rows: usize, global_rows: usize) -> usize {
    rows.div_ceil(global_rows.max(1))
}

/// Returns the rows of one rank in a step of an epoch that has this order.
pub fn share(
    order: &[usize],
    step: usize,
    global_rows: usize,
    rank: usize,
    world: usize,
) -> Vec<usize> {
    let row = step.saturating_mul(global_rows);
    Cursor { epoch: 0, row }.share(order, global_rows, rank, world)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_has_the_same_rows_on_any_number_of_ranks() {
        let order = Order::new(3).epoch(21, 1);
        for step in 0..steps_per_epoch(21, 8) {
            let expected = share(&order, step, 8, 0, 1);
            assert_eq!(expected, order[step * 8..(step * 8 + 8).min(21)]);
            for world in [2, 4, 8] {
                let shares: Vec<_> =
                    (0..world).map(|rank| share(&order, step, 8, rank, world)).collect();
                let dealt: Vec<usize> =
                    (0..8).filter_map(|at| shares[at % world].get(at / world).copied()).collect();
                assert_eq!(dealt, expected, "step {step}, {world} ranks");
            }
        }
        // The last step has 5 rows: ranks 5, 6 and 7 of 8 have none.
        let last = |rank| share(&order, 2, 8, rank, 8).len();
        assert_eq!((0..8).map(last).collect::<Vec<_>>(), [1, 1, 1, 1, 1, 0, 0, 0]);
        assert!(share(&order, 3, 8, 0, 1).is_empty());
    }

    #[test]
    fn epochs_and_seeds_have_their_own_orders() {
        let order = |seed, epoch| Order::new(seed).epoch(40, epoch);
        assert_eq!(order(1, 0), order(1, 0));
        assert_ne!(order(1, 0), order(1, 1));
        assert_ne!(order(1, 0), order(2, 0));
        assert_eq!(Order::of_data().epoch(4, 7), [0, 1, 2, 3]);
    }

    #[test]
    fn training_goes_on_where_it_stopped() {
        let (order, rows) = (Order::new(5), 10);
        let steps = |mut cursor: Cursor, count: usize| {
            let mut all = Vec::new();
            for _ in 0..count {
                all.extend(cursor.share(&order.epoch(rows, cursor.epoch), 4, 0, 1));
                cursor = cursor.after_step(rows, 4);
            }
            (all, cursor)
        };
        let (all, end) = steps(Cursor::default(), 6);
        assert_eq!(end, Cursor { epoch: 2, row: 0 });
        let (first, middle) = steps(Cursor::default(), 4);
        assert_eq!(middle, Cursor { epoch: 1, row: 4 });
        assert_eq!([first, steps(middle, 2).0].concat(), all);
        assert_eq!(all.len(), 20);
    }
}
