//! Which units are prefetched, and the gather buffers that it costs.

use fsdp_runtime::prelude::*;

use super::super::mlp::{Block, Mlp, sharded};
use super::super::support::Embed;
use super::super::support::ranks::launch_options;
use super::{BLOCK_BYTES, BLOCKS, gathers, train, train_after};

#[test]
fn two_units_ahead_cost_exactly_two_more_buffers_and_change_no_bit() {
    let none = train(FsdpOptions::new().with_gather_buffers(1));
    let one = train(FsdpOptions::new());
    let two = train(FsdpOptions::new().with_units_ahead(2));
    let three = train(FsdpOptions::new().with_units_ahead(3));
    assert_eq!(one.buffers, none.buffers + BLOCK_BYTES);
    assert_eq!(two.buffers, none.buffers + 2 * BLOCK_BYTES);
    assert_eq!(three.buffers, none.buffers + 3 * BLOCK_BYTES);
    for (name, ahead) in [("one", &one), ("two", &two), ("three", &three)] {
        ahead.assert_same_bits(&none, name);
        assert_eq!(ahead.all_gathers, none.all_gathers, "{name}");
    }
    let off = train(FsdpOptions::new().with_units_ahead(0));
    off.assert_same_bits(&none, "off");
}

#[test]
fn two_units_ahead_are_gathered_in_the_order_of_their_use() {
    let (forward, backward) = gathers(FsdpOptions::new().with_units_ahead(2), |_| Ok(()));
    let expected = [
        "unshard (root)",
        "wait_for_unshard (root)",
        "unshard blocks.0",
        "wait_for_unshard blocks.0",
        "unshard blocks.1",
        "unshard blocks.2",
        "wait_for_unshard blocks.1",
        "unshard blocks.3",
        "wait_for_unshard blocks.2",
        "unshard blocks.4",
        "wait_for_unshard blocks.3",
        "wait_for_unshard blocks.4",
    ];
    assert_eq!(forward, expected);
    let expected = [
        "unshard blocks.3",
        "unshard blocks.2",
        "wait_for_unshard blocks.3",
        "unshard blocks.1",
        "wait_for_unshard blocks.2",
        "unshard blocks.0",
        "wait_for_unshard blocks.1",
        "wait_for_unshard blocks.0",
    ];
    assert_eq!(backward, expected);
}

/// The first block prefetches two, the second one none, the third one two.
const LISTS: [(&str, &[&str]); 3] = [
    ("blocks.0", &["blocks.1", "blocks.2"]),
    ("blocks.1", &[]),
    ("blocks.2", &["blocks.3", "blocks.4"]),
];

pub(super) fn with_lists(options: FsdpOptions) -> FsdpOptions {
    let options = LISTS.iter().fold(options, |options, (path, units)| {
        options.with_forward_prefetch_at(*path, units.iter().copied())
    });
    options.with_backward_prefetch_at("blocks.4", ["blocks.3", "blocks.2"])
}

fn set_lists(model: &Fsdp<Mlp>) -> Result<(), Error> {
    for (path, units) in LISTS {
        model.unit(path)?.set_forward_prefetch(units)?;
    }
    model.unit("blocks.4")?.set_backward_prefetch(&["blocks.3", "blocks.2"])
}

#[test]
fn lists_say_which_units_are_prefetched_and_get_the_buffers_that_they_need() {
    let none = train(FsdpOptions::new().with_gather_buffers(1));
    // Lists apply although the prefetch in both directions is off.
    let off = FsdpOptions::new()
        .with_gather_buffers(1)
        .with_forward_prefetch(false)
        .with_backward_prefetch(BackwardPrefetch::None);
    let listed = train(with_lists(off.clone()));
    assert_eq!(listed.buffers, none.buffers + 2 * BLOCK_BYTES);
    listed.assert_same_bits(&none, "lists");
    let set = train_after(off.clone(), set_lists);
    assert_eq!(set.buffers, listed.buffers, "the buffers are allocated anew");
    set.assert_same_bits(&none, "lists that are set later");

    let found = gathers(with_lists(off.clone()), |_| Ok(()));
    assert_eq!(gathers(off, set_lists), found);
    let expected = [
        "unshard (root)",
        "wait_for_unshard (root)",
        "unshard blocks.0",
        "wait_for_unshard blocks.0",
        "unshard blocks.1",
        "unshard blocks.2",
        "wait_for_unshard blocks.1",
        "wait_for_unshard blocks.2",
        "unshard blocks.3",
        "unshard blocks.4",
        "wait_for_unshard blocks.3",
        "wait_for_unshard blocks.4",
    ];
    assert_eq!(found.0, expected);
    let expected = [
        "unshard blocks.3",
        "unshard blocks.2",
        "wait_for_unshard blocks.3",
        "wait_for_unshard blocks.2",
        "unshard blocks.1",
        "wait_for_unshard blocks.1",
        "unshard blocks.0",
        "wait_for_unshard blocks.0",
    ];
    assert_eq!(found.1, expected);
}

#[test]
fn a_list_for_another_level_gets_its_buffers() {
    let none = train(FsdpOptions::new().with_gather_buffers(1));
    let units = ["blocks.0", "blocks.1", "blocks.2"];
    let options = FsdpOptions::new().with_gather_buffers(1).with_forward_prefetch_at("", units);
    let listed = train(options);
    assert_eq!(listed.buffers, none.buffers + 2 * BLOCK_BYTES, "three in all");
    listed.assert_same_bits(&none, "the root prefetches blocks");
}

/// A type in a list stands for the next unit of that type, and a type that is named twice for two.
#[test]
fn lists_by_type_are_those_of_each_unit_of_the_type() {
    let off = FsdpOptions::new()
        .with_gather_buffers(1)
        .with_forward_prefetch(false)
        .with_backward_prefetch(BackwardPrefetch::None);
    let none = train(off.clone());
    let two = unit_types![Block, Block];
    let typed = |options: FsdpOptions| {
        let options = options.with_forward_prefetch_for(unit_types![Block], two);
        options.with_backward_prefetch_for(unit_types![Block], two)
    };
    let by_type = train(typed(off.clone()));
    by_type.assert_same_bits(&none, "by type");
    assert_eq!(by_type.buffers, none.buffers + 2 * BLOCK_BYTES);
    assert_eq!(by_type.all_gathers, none.all_gathers);
    let path = |block: usize| format!("blocks.{block}");
    let by_path = (0..BLOCKS).fold(off.clone(), |options, block| {
        let next = (block + 1..BLOCKS).take(2).map(path);
        let before = (0..block).rev().take(2).map(path);
        let options = options.with_forward_prefetch_at(path(block), next);
        options.with_backward_prefetch_at(path(block), before)
    });
    let found = gathers(typed(off.clone()), |_| Ok(()));
    assert_eq!(found, gathers(by_path, |_| Ok(())));
    let ahead: Vec<&str> = found.0.iter().map(String::as_str).skip(4).take(3).collect();
    assert_eq!(ahead, ["unshard blocks.1", "unshard blocks.2", "wait_for_unshard blocks.1"]);

    // Another type: the root prefetches the first block. A path overrides the type.
    let root = off.clone().with_forward_prefetch_for(unit_types![Mlp], unit_types![Block]);
    let (forward, _) = gathers(root.clone(), |_| Ok(()));
    assert_eq!(forward[..3], ["unshard (root)", "wait_for_unshard (root)", "unshard blocks.0"]);
    let at = gathers(root.with_forward_prefetch_at("", [""; 0]), |_| Ok(()));
    assert_eq!(at, gathers(off, |_| Ok(())));
}

#[test]
fn a_type_that_the_model_does_not_have_is_refused_in_a_list() {
    let (block, other) = (unit_types![Block], unit_types![Embed]);
    for (option, options) in [
        ("forward_prefetch_for", FsdpOptions::new().with_forward_prefetch_for(block, other)),
        ("forward_prefetch_for", FsdpOptions::new().with_forward_prefetch_for(other, block)),
        ("backward_prefetch_for", FsdpOptions::new().with_backward_prefetch_for(block, other)),
    ] {
        let made =
            launch(launch_options(2), move |worker| sharded(2, &worker, options.clone()).map(drop));
        let error = made.unwrap_err().to_string();
        assert!(error.contains(option) && error.contains("`Embed`"), "{error}");
        assert!(error.contains("`Block`"), "the units are named: {error}");
    }
}

#[test]
fn a_list_that_is_cleared_has_the_order_and_the_buffers_of_the_default() {
    let default = train(FsdpOptions::new());
    let clear = |model: &Fsdp<Mlp>| {
        for (path, _) in LISTS {
            model.unit(path)?.clear_forward_prefetch()?;
        }
        model.unit("blocks.4")?.clear_backward_prefetch()
    };
    let set_and_clear = |model: &Fsdp<Mlp>| {
        set_lists(model)?;
        for (path, _) in LISTS {
            model.unit(path)?.clear_forward_prefetch()?;
        }
        model.unit("blocks.4")?.clear_backward_prefetch()
    };
    let listed = train(with_lists(FsdpOptions::new()));
    assert_ne!(listed.buffers, default.buffers);
    for cleared in [
        train_after(with_lists(FsdpOptions::new()), clear),
        train_after(FsdpOptions::new(), set_and_clear),
    ] {
        cleared.assert_same_bits(&default, "cleared");
        assert_eq!(cleared.buffers, default.buffers);
    }
    let found = gathers(FsdpOptions::new(), set_and_clear);
    assert_eq!(found, gathers(FsdpOptions::new(), |_| Ok(())));
    assert_ne!(found, gathers(FsdpOptions::new(), set_lists));
}
