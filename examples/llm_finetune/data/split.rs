//! Conversations that are held out of training, to evaluate on. A separate file for evaluation
//! needs no split: it is prepared as a data set of its own.

use anyhow::{Result, ensure};

use super::dataset::Dataset;
use super::shuffle::shuffled;

/// Stream of random numbers for splits. Epochs have those from 0.
const STREAM: u64 = u64::MAX;

/// Divides conversations at random into those to train on and those held out, each in the order of
/// the data. `fraction` of them, rounded, are held out, and at least one.
///
/// # Errors
///
/// If the fraction is not between 0 and 1, or no conversation is left to train on.
pub fn split(dataset: &Dataset, fraction: f64, seed: u64) -> Result<(Dataset, Dataset)> {
    ensure!(
        fraction > 0.0 && fraction < 1.0,
        "the held-out fraction is {fraction}; expected a number above 0 and below 1"
    );
    let all = dataset.len();
    let held_out = ((all as f64 * fraction).round() as usize).max(1);
    ensure!(held_out < all, "{all} conversations are too few to hold {held_out} out of training");
    let order = shuffled(all, seed, STREAM);
    let part = |indices: &[usize]| {
        let mut indices = indices.to_vec();
        indices.sort_unstable();
        dataset.subset(&indices)
    };
    Ok((part(&order[held_out..]), part(&order[..held_out])))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::fixture::numbered;

    fn first_ids(dataset: &Dataset) -> Vec<u32> {
        dataset.iter().map(|conversation| conversation.ids[0]).collect()
    }

    #[test]
    fn each_conversation_is_on_one_side() {
        let dataset = numbered(&[3; 50]);
        let (train, held_out) = split(&dataset, 0.1, 1).unwrap();
        assert_eq!((train.len(), held_out.len()), (45, 5));
        let mut all = [first_ids(&train), first_ids(&held_out)].concat();
        assert!(first_ids(&train).is_sorted() && first_ids(&held_out).is_sorted());
        all.sort_unstable();
        assert_eq!(all, first_ids(&dataset));
        let again = split(&dataset, 0.1, 1).unwrap().1;
        assert_eq!(first_ids(&again), first_ids(&held_out));
        // A part can be divided once more.
        let (rest, more) = split(&train, 0.2, 1).unwrap();
        let mut both = [first_ids(&rest), first_ids(&more)].concat();
        both.sort_unstable();
        assert_eq!(both, first_ids(&train));
        assert_ne!(first_ids(&split(&dataset, 0.1, 2).unwrap().1), first_ids(&held_out));
        assert_eq!(split(&dataset, 0.001, 1).unwrap().1.len(), 1);
    }

    #[test]
    fn a_split_without_training_is_refused() {
        for fraction in [0.0, 1.0, -0.5, f64::NAN] {
            assert!(split(&numbered(&[2, 2]), fraction, 1).is_err(), "{fraction}");
        }
        assert!(split(&numbered(&[2]), 0.5, 1).is_err());
    }
}
