//! The purposes of a connection between a rank and rank 0.

use serde::{Deserialize, Serialize};

/// Purpose of a connection. A rank has one of each kind, so that it can send notices while it
/// waits for the reply to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Channel {
    /// The connection carries [`Request`](super::wire::Request)s.
    Requests,
    /// The connection carries [`Notice`](super::wire::Notice)s.
    Notices,
}
