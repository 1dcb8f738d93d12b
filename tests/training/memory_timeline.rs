//! The record of memory over time agrees with the accounting at every moment.

use burn::optim::GradientsParams;
use fsdp_runtime::memory::MemorySample;
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;

use crate::support::{Net, batch, loss, on_ranks};

fn step(net: &Fsdp<Net>, worker: &Worker, at: usize) -> Result<GradientsParams, Error> {
    let first = worker.rank().index() * 2;
    let (tokens, labels) = batch(at, first..first + 2, worker.device());
    net.backward(loss(net.forward(tokens), labels))
}

#[test]
fn a_record_follows_the_accounting_on_the_device_and_on_the_host() {
    for offload in [OffloadPolicy::None, OffloadPolicy::Params { pin_memory: false }] {
        on_ranks(2, move |worker| {
            let options = FsdpOptions::new().with_seed(3).with_offload(offload);
            let mut net = fully_shard(Net::new(3, 0.0, worker.device()), worker, options)?;
            assert_eq!(net.stats().memory_timeline(), None);
            let built = net.stats().memory();
            net.stats().start_memory_timeline(10_000);
            let mut optimizer = AdamWConfig::new().init();
            for at in 0..2 {
                let gradients = step(&net, worker, at)?;
                net = optimizer.step(1e-3, net, gradients);
                net.stats().record_optimizer(&optimizer)?;
            }
            let timeline = net.stats().stop_memory_timeline().expect("a record is kept");
            assert_eq!(net.stats().stop_memory_timeline(), None);
            assert_eq!((timeline.dropped, timeline.device_before.total.now), (0, built.total.now));
            let (device, host) = (timeline.device(), timeline.host());
            for (levels, counted) in
                [(&device, net.stats().memory()), (&host, net.stats().host_memory())]
            {
                let (_, last) = levels.last().expect("the level before the first change");
                assert_eq!(last.kinds().count(), 8, "seven kinds and the total");
                assert!(last.kinds().eq(counted.kinds()), "{last} {counted}");
            }
            let changes = |kind: &str, on_host: bool| {
                let same =
                    |sample: &&MemorySample| sample.kind == kind && sample.on_host == on_host;
                timeline.samples.iter().filter(same).count()
            };
            assert!(changes("gradients", false) > 4);
            assert_eq!(changes("gradients", true) > 0, offload != OffloadPolicy::None);
            let units: Vec<_> = timeline.samples.iter().filter_map(|s| s.unit.clone()).collect();
            assert!(units.iter().any(|unit| unit == "blocks.1"), "{units:?}");
            Ok(())
        });
    }
}

/// A clone of the model shares the record.
#[test]
fn a_short_record_keeps_the_newest_changes() {
    on_ranks(2, |worker| {
        let options = FsdpOptions::new().with_seed(3);
        let net = fully_shard(Net::new(3, 0.0, worker.device()), worker, options)?;
        net.stats().start_memory_timeline(5);
        step(&net, worker, 0)?;
        let timeline = net.clone().stats().memory_timeline().expect("a record is kept");
        assert_eq!(timeline.samples.len(), 5);
        assert!(timeline.dropped > 5, "{}", timeline.dropped);
        let last = timeline.device().last().expect("a level").1;
        assert_eq!(last.total.now, net.stats().memory().total.now);
        Ok(())
    });
}
