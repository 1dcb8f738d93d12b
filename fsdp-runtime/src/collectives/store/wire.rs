//! The messages on a connection of the store, and their framing: a length of four bytes,
//! little-endian, then the serialised message.

use std::fmt;
use std::io::{self, Read, Write};
use std::marker::PhantomData;

use serde::de::{DeserializeOwned, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::channel::Channel;
use super::secret::{Greeting, Nonce, Proof};
use crate::collectives::failure::FailureMessage;

/// Largest size of a message in bytes.
const LARGEST: usize = 1 << 30;
/// Largest size of a [`Hello`] in bytes: its sender is not known yet.
pub(super) const LARGEST_HELLO: usize = 1024;

/// The first message on a connection, from a rank to rank 0.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    /// [`GREETING`], which distinguishes a rank from any other program.
    pub(super) greeting: String,
    pub(super) nonce: Nonce,
    /// Name of the run.
    pub(super) run: String,
    pub(super) rank: usize,
    pub(super) world: usize,
    /// Purpose of the connection.
    pub(super) channel: Channel,
}

impl Hello {
    /// Returns what both ends know once rank 0 has sent its nonce.
    pub(super) fn with<'a>(&'a self, server_nonce: &'a Nonce) -> Greeting<'a> {
        let Self { nonce, run, rank, world, channel, .. } = self;
        let (rank, world, channel) = (*rank, *world, *channel);
        Greeting { rank_nonce: nonce, server_nonce, run, rank, world, channel }
    }
}

/// Name and version of this crate.
pub(super) const GREETING: &str = concat!("fsdp-runtime ", env!("CARGO_PKG_VERSION"));

/// The answer of rank 0 to a [`Hello`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Challenge {
    /// Rank 0's nonce, and the proof that it knows the secret.
    Prove { nonce: Nonce, proof: Proof },
    /// The rank is a program of another version.
    Refused(String),
}

/// The answer to a [`Challenge`]: the rank's proof that it knows the secret.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Response {
    pub(super) proof: Proof,
}

/// The last message of a greeting: whether rank 0 admits the connection, or why not.
pub(super) type Welcome = Result<(), String>;

/// A message whose reply has to wait for other ranks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// Exchange a value with the members of a process group. With `to`, only the member at that
    /// position receives the values.
    Exchange { group: u64, to: Option<u64>, name: String, unit: String, size: u64, value: Vec<u8> },
    /// Split a process group by colors.
    Split { group: u64, color: u64 },
}

/// The answer to a [`Request`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// Values of all members, in rank order; none for a member that does not receive them.
    Values(#[serde(deserialize_with = "grown")] Vec<Vec<u8>>),
    /// The new process group, and the position of the requesting rank in it.
    Group { id: u64, members: Vec<usize>, index: usize },
    /// Failure that has ended the run.
    Failed(FailureMessage),
}

/// A message that rank 0 answers at once.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Notice {
    /// The rank is alive, and asks whether the run has failed.
    Heartbeat,
    /// The rank asks which ranks were silent during the last so many milliseconds.
    Silent(u64),
    /// The rank ends the run.
    Failed(FailureMessage),
    /// The rank has finished, or knows why the run has ended. It gets no answer.
    Bye,
}

/// The answer to a [`Notice`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// The run has not failed.
    Running,
    /// Failure that has ended the run.
    Ended(FailureMessage),
    /// Ranks that were silent.
    Silent(Vec<usize>),
}

/// Reads a list that grows with its elements, so that a wrong length of a list of lists allocates
/// no more than that of a list.
fn grown<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct Elements<T>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for Elements<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut elements = Vec::new();
            while let Some(element) = list.next_element()? {
                elements.push(element);
            }
            Ok(elements)
        }
    }
    deserializer.deserialize_seq(Elements(PhantomData))
}

/// Reads bytes as a message, whose kind is the first byte, for a fuzzer. Returns whether there is
/// such a message.
pub fn parse_bytes(bytes: &[u8]) -> bool {
    let Some((kind, frame)) = bytes.split_first() else { return false };
    match kind % 8 {
        0 => receive_up_to::<Hello>(frame, LARGEST_HELLO).is_ok(),
        1 => receive_up_to::<Challenge>(frame, LARGEST_HELLO).is_ok(),
        2 => receive_up_to::<Response>(frame, LARGEST_HELLO).is_ok(),
        3 => receive_up_to::<Welcome>(frame, LARGEST_HELLO).is_ok(),
        4 => receive::<Request>(frame).is_ok(),
        5 => receive::<Reply>(frame).is_ok(),
        6 => receive::<Notice>(frame).is_ok(),
        _ => receive::<Answer>(frame).is_ok(),
    }
}

/// Writes a message to a connection.
pub(super) fn send<T: Serialize>(mut connection: impl Write, message: &T) -> io::Result<()> {
    let invalid = |error: postcard::Error| io::Error::new(io::ErrorKind::InvalidData, error);
    let bytes = postcard::to_stdvec(message).map_err(invalid)?;
    let len = u32::try_from(bytes.len()).ok().filter(|&len| len as usize <= LARGEST);
    let len = len.ok_or_else(|| io::Error::other("a message of more than 1 GiB"))?;
    // One write for length and message, so that a small message travels in one packet.
    let frame = [&len.to_le_bytes()[..], &bytes].concat();
    connection.write_all(&frame)?;
    connection.flush()
}

/// Reads a message from a connection.
pub(super) fn receive<T: DeserializeOwned>(connection: impl Read) -> io::Result<T> {
    receive_up_to(connection, LARGEST)
}

/// Reads a message of at most `largest` bytes.
pub(super) fn receive_up_to<T: DeserializeOwned>(
    mut connection: impl Read,
    largest: usize,
) -> io::Result<T> {
    let mut len = [0; 4];
    connection.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > largest {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message that is too long"));
    }
    // The buffer grows with the bytes that arrive, so that a wrong length allocates nothing.
    let mut bytes = Vec::new();
    connection.take(len as u64).read_to_end(&mut bytes)?;
    if bytes.len() < len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    postcard::from_bytes(&bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_received_as_sent() {
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
    fn invalid_messages_are_errors_and_allocate_nothing() {
        let long = receive_up_to::<Hello>(&u32::MAX.to_le_bytes()[..], LARGEST_HELLO).unwrap_err();
        assert_eq!(long.kind(), io::ErrorKind::InvalidData);
        let cut = receive::<Reply>(&[0, 0, 0, 0x20, 1, 2][..]).unwrap_err();
        assert_eq!(cut.kind(), io::ErrorKind::UnexpectedEof);
        let wrong = receive::<Notice>(&[1, 0, 0, 0, 99][..]).unwrap_err();
        assert_eq!(wrong.kind(), io::ErrorKind::InvalidData);
    }
}
