//! Checks of the failures that end a process group: a rank that is late, ranks that issue different
//! collectives, and a rank that fails.

use super::*;

pub(super) fn time_out(group: &AnyProcessGroup) {
    if group.size() == 1 {
        return;
    }
    let last = group.members()[group.size() - 1];
    group.exchange(&op("barrier", "the start"), ()).unwrap();
    if group.rank() == last {
        std::thread::sleep(3 * SHORT);
    }
    let error = match group.exchange(&op("all_gather", "encoder.layers.3"), ()) {
        // The failure may reach the late rank only after this exchange has succeeded.
        Ok(_) if group.rank() == last => group.exchange(&op("barrier", "later"), ()).unwrap_err(),
        outcome => outcome.unwrap_err(),
    };
    let CollectiveError::Timeout { op, unit, missing, waited } = error else { panic!("{error}") };
    assert_eq!((op, unit.as_str(), waited), ("all_gather", "encoder.layers.3", SHORT));
    assert_eq!(missing, [last]);
    assert!(group.exchange(&super::op("barrier", "later"), ()).is_err(), "the group has ended");
}

/// The last rank is late, and the first one waits for it in a part of the group. The others wait for
/// both, and name the last one alone.
pub(super) fn time_out_of_waiting_ranks(group: &AnyProcessGroup) {
    if group.size() < 3 {
        return;
    }
    let (first, last) = (group.members()[0], group.members()[group.size() - 1]);
    let is_outside = group.rank() != first && group.rank() != last;
    let part = group.split(usize::from(is_outside)).unwrap();
    group.exchange(&op("barrier", "the start"), ()).unwrap();
    if group.rank() == last {
        std::thread::sleep(3 * SHORT);
    }
    let waits_in = if group.rank() == first { &part } else { group };
    let error = match waits_in.exchange(&op("all_gather", "encoder.layers.3"), ()) {
        Ok(_) => group.exchange(&op("barrier", "later"), ()).unwrap_err(),
        Err(error) => error,
    };
    let CollectiveError::Timeout { missing, .. } = error else { panic!("{error}") };
    assert_eq!(missing, [last]);
}

pub(super) fn mismatch(group: &AnyProcessGroup) {
    if group.size() == 1 {
        return;
    }
    let last = index(group) == group.size() - 1;
    let unit = if last { "encoder.layers.1" } else { "encoder.layers.0" };
    match group.exchange(&op("all_gather", unit), ()).unwrap_err() {
        CollectiveError::Mismatch { rank, found, peer, expected } => {
            assert!(found != expected && rank != peer);
            assert!(found.starts_with("all_gather of encoder.layers."), "{found}");
            assert!(expected.starts_with("all_gather of encoder.layers."), "{expected}");
        }
        error => panic!("{error}"),
    }
}

pub(super) fn mismatch_of_sizes(group: &AnyProcessGroup) {
    if group.size() == 1 {
        return;
    }
    let size = if index(group) == 0 { 100 } else { 101 };
    let error = group.exchange(&op("all_gather", "unit").of(size), ()).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, CollectiveError::Mismatch { .. }), "{text}");
    assert!(text.contains("(100 elements)") && text.contains("(101 elements)"), "{text}");
}

pub(super) fn failure(group: &AnyProcessGroup) {
    let failed = CollectiveError::PeerFailed { rank: group.members()[0], reason: "why".into() };
    group.exchange(&op("barrier", "the start"), ()).unwrap();
    if group.rank() == Rank::ZERO {
        // By now the other ranks wait in their next exchange.
        std::thread::sleep(Duration::from_millis(200));
        group.fail(failed.clone());
    }
    // The failure ends the exchange at once, not after the time-out.
    assert_eq!(group.exchange(&op("barrier", "the end"), ()).unwrap_err(), failed);
}
