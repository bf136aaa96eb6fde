//! The server's side of an HTTP/2 connection (RFC 9113), rule by rule as `penstock.gateway.h2` has it in Python, which is the
//! statement: bytes in, bytes out, no I/O and no clock.

mod arrivals;
mod connection;
mod egress;
mod events;
mod frames;
mod head;
mod hpack;
mod limits;
mod peer;
mod stream;
mod whole;

pub use head::BlockCache;
pub use peer::Connection;
pub use stream::Stream;
pub use whole::Exchanges;
