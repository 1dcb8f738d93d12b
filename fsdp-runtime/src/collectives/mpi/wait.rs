//! A wait for peers that polls.

use std::time::{Duration, Instant};

/// A wait for peers, with a time-out. It yields between the first polls, and sleeps between later
/// ones.
#[derive(Debug)]
pub(super) struct Wait {
    timeout: Duration,
    waited: RunningTime,
    polls: u32,
    /// Quarters of the time-out that have passed and were reported.
    quarters: u32,
}

impl Wait {
    /// Number of polls that yield before sleeps begin: a sleep takes at least 60 µs or so.
    const YIELDS: u32 = 100;

    /// Begins a wait.
    pub(super) fn new(timeout: Duration) -> Self {
        Self { timeout, waited: RunningTime::start(Instant::now()), polls: 0, quarters: 0 }
    }

    /// Starts the time-out anew, after a peer has made progress.
    pub(super) fn restart(&mut self) {
        *self = Self::new(self.timeout);
    }

    /// Returns whether another quarter of the time-out has passed since the last call.
    pub(super) fn takes_long(&mut self) -> bool {
        let takes_long = self.waited.total > (self.quarters + 1) * (self.timeout / 4);
        self.quarters += u32::from(takes_long);
        takes_long
    }

    /// Waits until the next poll. Returns whether there is one: `false` after the time-out.
    #[must_use]
    pub(super) fn pause(&mut self) -> bool {
        self.polls += 1;
        let waited = self.waited.until(Instant::now());
        if self.polls < Self::YIELDS {
            std::thread::yield_now();
        } else if waited > self.timeout {
            return false;
        } else {
            std::thread::sleep(Duration::from_micros(if self.polls < 1000 { 20 } else { 500 }));
        }
        true
    }
}

/// Time in which this process ran, measured by readings of a clock.
///
/// A process that was stopped for longer than a time-out must not report its peers missing when it
/// continues: it has not polled for their messages meanwhile.
#[derive(Debug)]
struct RunningTime {
    total: Duration,
    last_reading: Instant,
}

impl RunningTime {
    /// Longest time between two readings that counts whole. The process polls at least every few
    /// milliseconds while it runs.
    const LONGEST_GAP: Duration = Duration::from_millis(200);

    /// Starts measuring at `now`.
    fn start(now: Instant) -> Self {
        Self { total: Duration::ZERO, last_reading: now }
    }

    /// Returns the time in which this process ran from the start until `now`.
    fn until(&mut self, now: Instant) -> Duration {
        self.total += (now - self.last_reading).min(Self::LONGEST_GAP);
        self.last_reading = now;
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_in_which_a_process_was_stopped_does_not_count() {
        let start = Instant::now();
        let ms = Duration::from_millis;
        let mut time = RunningTime::start(start);
        assert_eq!(time.until(start + ms(3)), ms(3));
        assert_eq!(time.until(start + ms(150)), ms(150));
        // Stopped for an hour.
        let continued = start + ms(150) + Duration::from_secs(3600);
        assert_eq!(time.until(continued), ms(150) + RunningTime::LONGEST_GAP);
        assert_eq!(time.until(continued + ms(5)), ms(155) + RunningTime::LONGEST_GAP);
    }
}
