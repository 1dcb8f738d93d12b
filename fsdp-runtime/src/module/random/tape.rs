//! What a forward drew, so that it draws the same when it is run again.
//!
//! A draw is a key and a place. Those of a checkpointed forward are noted on the thread that runs it,
//! and handed out again in their order when it is recomputed: whatever layers have drawn since, and
//! whatever step it is by then, the masks are the same. The layers' own counters stand still
//! meanwhile.

use std::cell::RefCell;

use crate::error::ScheduleError;
use crate::error::raise;

/// One mask's place in the stream of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Draw {
    pub(crate) layer: u64,
    pub(crate) key: [u32; 2],
    pub(crate) place: [u32; 2],
}

enum Tape {
    Off,
    Record(Vec<Draw>),
    Play(std::vec::IntoIter<Draw>),
}

thread_local! {
    static TAPE: RefCell<Tape> = const { RefCell::new(Tape::Off) };
}

/// The next draw of a layer: the one on the tape, where one plays, else a new one.
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
    played.unwrap_or_else(|| raise(ScheduleError::OtherDraws.into()))
}

fn off() {
    TAPE.set(Tape::Off);
}

/// A tape that notes draws, until it is finished or dropped.
#[derive(Debug)]
pub(crate) struct Recording(());

impl Recording {
    pub(crate) fn start() -> Self {
        TAPE.set(Tape::Record(Vec::new()));
        Self(())
    }

    /// What was drawn since it began.
    pub(crate) fn finish(self) -> Vec<Draw> {
        match TAPE.replace(Tape::Off) {
            Tape::Record(draws) => draws,
            _ => Vec::new(),
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        off();
    }
}

/// A tape that plays draws, until it is dropped.
#[derive(Debug)]
pub(crate) struct Playback(());

impl Playback {
    pub(crate) fn start(draws: Vec<Draw>) -> Self {
        TAPE.set(Tape::Play(draws.into_iter()));
        Self(())
    }
}

impl Drop for Playback {
    fn drop(&mut self) {
        off();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_drawn_is_drawn_again() {
        let new = |place: u32| move || Draw { layer: 7, key: [1, 2], place: [0, place] };
        let recording = Recording::start();
        let first = [draw(7, new(0)), draw(7, new(1))];
        let draws = recording.finish();
        assert_eq!(draws, first);
        let later = draw(7, new(2));
        {
            let _playing = Playback::start(draws);
            assert_eq!([draw(7, new(3)), draw(7, new(3))], first);
        }
        assert_ne!(draw(7, new(4)), later, "and afterwards new ones");
    }

    #[test]
    fn another_layer_or_one_more_draw_is_an_error() {
        let new = || Draw { layer: 7, key: [1, 2], place: [0, 0] };
        for layers in [vec![8], vec![7, 7]] {
            let played = std::panic::catch_unwind(|| {
                let _playing = Playback::start(vec![new()]);
                for &layer in &layers {
                    draw(layer, new);
                }
            });
            let error = played.unwrap_err().downcast::<crate::Error>().unwrap();
            assert_eq!(*error, ScheduleError::OtherDraws.into());
        }
    }
}
