//! Tests of exchanges among threads. The checks that every engine must pass are in `conformance.rs`.

use super::*;
use crate::layout::WorldSize;

fn groups(world: usize, timeout: Duration) -> Vec<LocalGroup> {
    let hub = Hub::new(WorldSize::new(world).unwrap(), timeout, false);
    hub.world.ranks().map(|rank| LocalGroup::new(hub.clone(), rank)).collect()
}

fn op(unit: &'static str) -> Op {
    Op::new("all_gather", unit)
}

fn on_all<T: Send>(groups: &[LocalGroup], f: impl Fn(&LocalGroup) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = groups.iter().map(|group| scope.spawn(|| f(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn every_rank_gets_every_value_in_rank_order() {
    let groups = groups(5, Duration::from_secs(20));
    for _ in 0..50 {
        for values in on_all(&groups, |group| group.exchange(&op("a"), group.index).unwrap()) {
            assert_eq!(values.iter().map(|value| **value).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        }
    }
    assert!(groups[0].hub.lock().rounds.is_empty(), "rounds are dropped once taken");
}

#[test]
fn a_rank_that_does_not_come_is_named_on_every_rank() {
    let groups = groups(3, Duration::from_millis(50));
    let errors = on_all(&groups[..2], |group| group.exchange(&op("encoder.0"), ()).unwrap_err());
    for error in errors.into_iter().chain([groups[2].exchange(&op("encoder.0"), ()).unwrap_err()]) {
        let CollectiveError::Timeout { op, unit, missing, .. } = error else { panic!("{error}") };
        assert_eq!(
            (op, unit.as_str(), missing),
            ("all_gather", "encoder.0", vec![groups[2].rank()])
        );
    }
}

#[test]
fn parts_of_a_group_exchange_among_themselves() {
    let groups = groups(6, Duration::from_secs(20));
    let sums = on_all(&groups, |group| {
        let rows = group.split(group.index / 3).unwrap();
        let columns = group.split(group.index % 3).unwrap();
        let sum = |part: &LocalGroup| -> usize {
            let values = part.exchange(&op("a"), group.index).unwrap();
            values.iter().map(|value| **value).sum()
        };
        (sum(&rows), sum(&columns), rows.rank() == group.rank())
    });
    let expected =
        [(3, 3, true), (3, 5, true), (3, 7, true), (12, 3, true), (12, 5, true), (12, 7, true)];
    assert_eq!(sums, expected);
}

#[test]
fn a_part_of_a_group_names_who_is_missing_by_rank_and_ends_all() {
    let groups = groups(4, Duration::from_millis(50));
    let errors = on_all(&groups, |group| {
        let part = group.split(group.index / 2).unwrap();
        match group.index {
            3 => None,
            index if index < 2 => {
                std::thread::sleep(Duration::from_millis(200));
                part.exchange(&op("a"), ()).err()
            }
            _ => part.exchange(&op("a"), ()).err(),
        }
    });
    let [first, second, third, None] = &errors[..] else { panic!("{errors:?}") };
    for error in [first, second, third] {
        let Some(CollectiveError::Timeout { missing, .. }) = error else { panic!("{error:?}") };
        assert_eq!(*missing, [groups[3].rank()]);
    }
}

#[test]
fn different_operations_end_the_group() {
    let groups = groups(2, Duration::from_secs(20));
    let errors = on_all(&groups, |group| {
        let unit = if group.rank() == Rank::ZERO { "a" } else { "b" };
        group.exchange(&op(unit), ()).unwrap_err()
    });
    assert_eq!(errors[0], errors[1]);
    assert!(matches!(errors[0], CollectiveError::Mismatch { .. }));
}

#[test]
fn large_replicated_gradients_are_reduced_by_one_member_each() {
    let keep = |numel: usize, segment| Reduce {
        range: 0..numel,
        shape: vec![numel],
        segment,
        dtype: DType::F32,
    };
    let keep = [
        keep(20_000, None),
        keep(100_000, None),
        keep(90_000, Some(0)),
        keep(30_000, None),
        keep(100, None),
    ];
    assert_eq!(reducers(&keep, 1), [None; 5]);
    assert_eq!(reducers(&keep, 2), [Some(1), Some(0), None, Some(1), None]);
    assert_eq!(reducers(&keep, 3), [Some(2), Some(0), None, Some(1), None]);
}
