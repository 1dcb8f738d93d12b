//! What goes over a line of the store: a length, and so many bytes of a message.

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::collectives::failure::Failure;

/// Bytes of the largest message.
const LARGEST: usize = 1 << 30;
/// Bytes of the largest first message, before it is known who sends it.
pub(super) const LARGEST_HELLO: usize = 4096;

/// How a rank introduces itself.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    /// [`GREETING`], so that no other program is taken for a rank.
    pub(super) greeting: String,
    /// The run, where the launcher names it.
    pub(super) run: String,
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) line: Line,
}

/// The crate and its version.
pub(super) const GREETING: &str = concat!("fsdp-runtime ", env!("CARGO_PKG_VERSION"));

/// A rank has two lines, so that it can be heard while it waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Line {
    /// For [`Request`]s.
    Requests,
    /// For [`Notice`]s.
    Notices,
}

/// The answer to a [`Hello`]: the rank is in, or why not.
pub(super) type Welcome = Result<(), String>;

/// What waits for the other ranks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    Exchange { group: u64, name: String, unit: String, size: u64, value: Vec<u8> },
    Split { group: u64, color: u64 },
}

/// The answer to a [`Request`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    Values(Vec<Vec<u8>>),
    Group { id: u64, members: Vec<usize>, index: usize },
    Failed(Failure),
}

/// What is answered at once.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Notice {
    /// The rank goes on; has the run?
    Here,
    /// Which ranks have said nothing for so many milliseconds?
    Silent(u64),
    /// The rank ends the run.
    Failed(Failure),
    /// The rank has ended well, or knows why the run has ended.
    Bye,
}

/// The answer to a [`Notice`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    Going,
    Ended(Failure),
    Silent(Vec<usize>),
}

/// Writes a message.
pub(super) fn send<T: Serialize>(mut line: impl Write, message: &T) -> io::Result<()> {
    let invalid = |error: postcard::Error| io::Error::new(io::ErrorKind::InvalidData, error);
    let bytes = postcard::to_stdvec(message).map_err(invalid)?;
    let len = u32::try_from(bytes.len()).ok().filter(|&len| len as usize <= LARGEST);
    let len = len.ok_or_else(|| io::Error::other("a message of more than 1 GiB"))?;
    // In one piece, so that it leaves in one packet where it fits.
    let frame = [&len.to_le_bytes()[..], &bytes].concat();
    line.write_all(&frame)?;
    line.flush()
}

/// Reads a message.
pub(super) fn receive<T: DeserializeOwned>(line: impl Read) -> io::Result<T> {
    receive_up_to(line, LARGEST)
}

/// Reads a message of at most so many bytes.
pub(super) fn receive_up_to<T: DeserializeOwned>(
    mut line: impl Read,
    largest: usize,
) -> io::Result<T> {
    let mut len = [0; 4];
    line.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > largest {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message that is too long"));
    }
    // Grows with what arrives: a length alone takes no memory.
    let mut bytes = Vec::new();
    line.take(len as u64).read_to_end(&mut bytes)?;
    if bytes.len() < len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    postcard::from_bytes(&bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let mut bytes = Vec::new();
        send(&mut bytes, &Reply::Values(vec![vec![1, 2], vec![]])).unwrap();
        send(&mut bytes, &Notice::Silent(7)).unwrap();
        let mut line = bytes.as_slice();
        let Reply::Values(values) = receive(&mut line).unwrap() else { panic!("values") };
        assert_eq!(values, [vec![1, 2], vec![]]);
        assert!(matches!(receive(&mut line).unwrap(), Notice::Silent(7)));
        let end = receive::<Notice>(&mut line).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn what_is_no_message_is_an_error_and_takes_no_memory() {
        let long = receive_up_to::<Hello>(&u32::MAX.to_le_bytes()[..], LARGEST_HELLO).unwrap_err();
        assert_eq!(long.kind(), io::ErrorKind::InvalidData);
        let cut = receive::<Reply>(&[0, 0, 0, 0x20, 1, 2][..]).unwrap_err();
        assert_eq!(cut.kind(), io::ErrorKind::UnexpectedEof);
        let wrong = receive::<Notice>(&[1, 0, 0, 0, 99][..]).unwrap_err();
        assert_eq!(wrong.kind(), io::ErrorKind::InvalidData);
    }
}
