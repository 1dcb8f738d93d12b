//! The forecast of a run that does not begin, in the form of a record.

use std::time::Duration;

use crate::param_group::memory::{Memory, MemoryForecast, MemoryHolder, MemoryTimeline};

impl MemoryTimeline {
    /// Returns a record without samples, whose memory is that of a forecast. Its holders are the kinds of
    /// the forecast.
    ///
    /// It is for a run that [`MemoryForecast::check`] refuses.
    pub fn of_forecast(forecast: &MemoryForecast) -> Self {
        let device = Memory::of_kinds(forecast.kinds());
        let host = Memory::of_kinds(forecast.host.kinds());
        let mut holders = Vec::new();
        for (on_host, memory) in [(false, device), (true, host)] {
            let kinds = memory.kinds().filter(|(kind, usage)| *kind != "total" && usage.now > 0);
            holders.extend(kinds.map(|(kind, usage)| MemoryHolder {
                kind,
                on_host,
                unit: None,
                bytes: usage.now,
            }));
        }
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        Self {
            device_before: device,
            host_before: host,
            samples: Vec::new(),
            dropped: 0,
            marks: Vec::new(),
            dropped_marks: 0,
            device_after: device,
            host_after: host,
            holders,
            duration: Duration::ZERO,
            failure: None,
        }
    }
}
