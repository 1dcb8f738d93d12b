//! The random draws of a forward, recorded in its first run and played back when it is recomputed.
//!
//! A draw is a key and a position. The thread that runs a forward under recomputation records the
//! draws, and the recomputation receives them in the same order. The masks are therefore equal,
//! whatever other layers have drawn in between and whatever the step is by then. The call counters
//! of the layers do not advance during playback.

use std::cell::RefCell;

use crate::error::{ScheduleError, raise};

/// The key and the position of one mask in the substream of the layer `layer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Draw {
    pub(super) layer: u64,
    pub(crate) key: [u32; 2],
    pub(super) position: [u32; 2],
}

/// State of the present thread's draws: whether they are recorded or played back.
enum Tape {
    /// New draws, not recorded.
    Off,
    /// New draws, recorded in order.
    Record(Vec<Draw>),
    /// Draws from an earlier recording.
    Play(std::vec::IntoIter<Draw>),
}

thread_local! {
    static TAPE: RefCell<Tape> = const { RefCell::new(Tape::Off) };
    /// Draws since the start of each running [`capture_draws`], the outermost first.
    static CAPTURES: RefCell<Vec<Vec<Draw>>> = const { RefCell::new(Vec::new()) };
}

/// Runs `f`, and returns its result with the draws of this thread in it, new ones and played ones.
///
/// Unlike a [`Recording`] it may run inside of another one, and inside of a [`Playback`].
pub(crate) fn capture_draws<T>(f: impl FnOnce() -> T) -> (T, Vec<Draw>) {
    /// Ends the capture if `f` unwinds.
    struct Capture;
    impl Drop for Capture {
        fn drop(&mut self) {
            CAPTURES.with_borrow_mut(|captures| captures.pop());
        }
    }
    CAPTURES.with_borrow_mut(|captures| captures.push(Vec::new()));
    let capture = Capture;
    let result = f();
    let draws = CAPTURES.with_borrow_mut(|captures| captures.last_mut().map(std::mem::take));
    drop(capture);
    (result, draws.unwrap_or_default())
}

/// Returns the next draw of a layer: the recorded one during playback, otherwise a new one.
///
/// # Panics
///
/// Unwinds with [`ScheduleError::RandomDrawsMismatch`] if the recorded draw belongs to another
/// layer, or if no recorded draw is left.
pub(super) fn draw(layer: u64, new: impl FnOnce() -> Draw) -> Draw {
    let played = TAPE.with_borrow_mut(|tape| match tape {
        Tape::Off => Some(new()),
        Tape::Record(draws) => {
            let draw = new();
            draws.push(draw);
            Some(draw)
        }
        Tape::Play(draws) => draws.next().filter(|draw| draw.layer == layer),
    });
    let draw = played.unwrap_or_else(|| raise(ScheduleError::RandomDrawsMismatch.into()));
    CAPTURES.with_borrow_mut(|captures| captures.iter_mut().for_each(|draws| draws.push(draw)));
    draw
}

/// A recording of this thread's draws, which ends when it is finished or dropped.
#[derive(Debug)]
pub(crate) struct Recording(());

impl Recording {
    /// Starts to record this thread's draws.
    pub(crate) fn start() -> Self {
        TAPE.set(Tape::Record(Vec::new()));
        Self(())
    }

    /// Ends the recording and returns the draws since its start.
    pub(crate) fn finish(self) -> Vec<Draw> {
        match TAPE.replace(Tape::Off) {
            Tape::Record(draws) => draws,
            _ => Vec::new(),
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        TAPE.set(Tape::Off);
    }
}

/// A playback of recorded draws on this thread, which ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Playback(());

impl Playback {
    /// Starts to play `draws` back, in order.
    pub(crate) fn start(draws: Vec<Draw>) -> Self {
        TAPE.set(Tape::Play(draws.into_iter()));
        Self(())
    }
}

impl Drop for Playback {
    fn drop(&mut self) {
        TAPE.set(Tape::Off);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn playback_repeats_the_recorded_draws() {
        let new = |call: u32| move || Draw { layer: 7, key: [1, 2], position: [0, call] };
        let recording = Recording::start();
        let first = [draw(7, new(0)), draw(7, new(1))];
        let draws = recording.finish();
        assert_eq!(draws, first);
        let later = draw(7, new(2));
        {
            let _playing = Playback::start(draws);
            assert_eq!([draw(7, new(3)), draw(7, new(3))], first);
        }
        assert_ne!(draw(7, new(4)), later, "draws after the playback are new");
    }

    #[test]
    fn captures_nest_and_see_played_draws() {
        let new = |call: u32| move || Draw { layer: 7, key: [1, 2], position: [0, call] };
        let ((first, inner), all) = capture_draws(|| {
            let first = draw(7, new(0));
            (first, capture_draws(|| draw(7, new(1))).1)
        });
        assert_eq!(all, [vec![first], inner].concat());
        assert_eq!(all.len(), 2);
        let _playing = Playback::start(all.clone());
        assert_eq!(capture_draws(|| draw(7, new(5))).1, all[..1]);
        assert_eq!(capture_draws(|| ()).1, []);
    }

    #[test]
    fn a_draw_of_another_layer_or_an_extra_draw_is_an_error() {
        let new = || Draw { layer: 7, key: [1, 2], position: [0, 0] };
        for layers in [vec![8], vec![7, 7]] {
            let played = std::panic::catch_unwind(|| {
                let _playing = Playback::start(vec![new()]);
                for &layer in &layers {
                    draw(layer, new);
                }
            });
            let error = played.unwrap_err().downcast::<crate::Error>().unwrap();
            assert_eq!(*error, ScheduleError::RandomDrawsMismatch.into());
        }
    }
}
