//! The secret of a run, and the proof that the other end of a connection knows it.
//!
//! Both ends send a random nonce. Each then sends the keyed hash (HMAC-SHA-256) of both nonces, of
//! its side, and of what it says about itself. So a proof fits one connection, one side and one
//! rank only, and a recorded greeting is worth nothing later.

use std::fmt;
use std::io;

use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use super::channel::Channel;

/// Environment variable with the secret of a run.
pub(crate) const SECRET_VARIABLE: &str = "FSDP_RUN_SECRET";

/// A random number that one end of a connection chose.
pub(super) type Nonce = [u8; 32];
/// A keyed hash that proves knowledge of the secret.
pub(super) type Proof = [u8; 32];

/// The secret of a run. Without one it is empty, and proves nothing.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct RunSecret(Vec<u8>);

impl fmt::Debug for RunSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "no secret" } else { "a secret" })
    }
}

/// What both ends of a connection know when one of them proves its knowledge of the secret.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Greeting<'a> {
    /// Nonce of the rank that has connected.
    pub(super) rank_nonce: &'a Nonce,
    /// Nonce of rank 0.
    pub(super) server_nonce: &'a Nonce,
    pub(super) run: &'a str,
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) channel: Channel,
}

/// An end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Side {
    /// Rank 0, which listens.
    Server,
    /// Another rank, which has connected.
    Rank,
}

impl RunSecret {
    /// Returns the secret of a text, such as the value of [`SECRET_VARIABLE`].
    pub(crate) fn new(text: impl Into<Vec<u8>>) -> Self {
        Self(text.into())
    }

    /// Returns whether there is no secret.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the proof of one side.
    pub(super) fn prove(&self, side: Side, greeting: &Greeting<'_>) -> io::Result<Proof> {
        Ok(self.hash(side, greeting)?.finalize().into_bytes().into())
    }

    /// Returns whether `proof` is that of a side that knows the secret. The time that it takes does
    /// not depend on the proof.
    pub(super) fn verify(
        &self,
        side: Side,
        greeting: &Greeting<'_>,
        proof: &Proof,
    ) -> io::Result<bool> {
        Ok(self.hash(side, greeting)?.verify_slice(proof).is_ok())
    }

    fn hash(&self, side: Side, greeting: &Greeting<'_>) -> io::Result<Hmac<Sha256>> {
        // Postcard writes lengths, so that no two greetings have the same bytes.
        let message = postcard::to_stdvec(&(side, greeting)).map_err(io::Error::other)?;
        let mut hash = Hmac::<Sha256>::new_from_slice(&self.0).map_err(io::Error::other)?;
        hash.update(b"fsdp-runtime store 1");
        hash.update(&message);
        Ok(hash)
    }
}

/// Returns a random nonce of the operating system.
pub(super) fn nonce() -> io::Result<Nonce> {
    let mut nonce = Nonce::default();
    getrandom::fill(&mut nonce).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_fits_its_secret_side_nonces_and_rank_only() {
        let (one, two) = (nonce().unwrap(), nonce().unwrap());
        assert_ne!(one, two);
        let greeting = Greeting {
            rank_nonce: &one,
            server_nonce: &two,
            run: "a run",
            rank: 1,
            world: 2,
            channel: Channel::Requests,
        };
        let secret = RunSecret::new("a secret");
        let proof = secret.prove(Side::Rank, &greeting).unwrap();
        let fits =
            |secret: &RunSecret, side, greeting| secret.verify(side, &greeting, &proof).unwrap();
        assert!(fits(&secret, Side::Rank, greeting));
        assert!(!fits(&secret, Side::Server, greeting));
        assert!(!fits(&RunSecret::new("another"), Side::Rank, greeting));
        assert!(!fits(&RunSecret::default(), Side::Rank, greeting));
        for other in [
            Greeting { server_nonce: &one, ..greeting },
            Greeting { rank_nonce: &two, ..greeting },
            Greeting { run: "another", ..greeting },
            Greeting { rank: 0, ..greeting },
            Greeting { world: 3, ..greeting },
            Greeting { channel: Channel::Notices, ..greeting },
        ] {
            assert!(!fits(&secret, Side::Rank, other), "{other:?}");
        }
        assert_eq!(format!("{secret:?}"), "a secret");
    }
}
