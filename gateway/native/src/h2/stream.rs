//! One stream of a connection: its windows, what it has yet to send, and who hears of it.

use pyo3::prelude::*;

use super::head::Head;
use super::whole::Exchange;

/// A stream from its request's headers until we have ended it; see `penstock.gateway.h2.stream.Stream`.
#[pyclass]
pub struct Stream {
    #[pyo3(get)]
    pub id: u32,
    #[pyo3(get)]
    pub head: Py<Head>,
    /// None once the stream is over: it may be what holds the stream.
    pub receiver: Option<Py<PyAny>>,
    /// What comes is an exchange, until that has come to something.
    pub exchange: Option<Box<Exchange>>,
    /// True while we may still send.
    #[pyo3(get)]
    pub open: bool,
    /// We have sent it data.
    pub answered: bool,
    /// The peer has said all.
    pub ended: bool,
    #[pyo3(get)]
    pub send_window: i64,
    pub receive_window: i64,
    /// Bytes used up that the peer has no new window for yet.
    pub unacknowledged: i64,
    pub waiting: Waiting,
    /// The block that ends the stream once all data is out.
    pub trailers: Option<Vec<u8>>,
    pub content_length: Option<i64>,
}

#[pymethods]
impl Stream {
    /// Bytes that wait for a window, or their turn.
    #[getter]
    fn unsent(&self) -> usize {
        self.waiting.len()
    }
}

impl Stream {
    pub fn new(id: u32, head: Py<Head>, content_length: Option<i64>, send_window: i64, receive_window: i64) -> Self {
        Stream {
            id,
            head,
            receiver: None,
            exchange: None,
            open: true,
            answered: false,
            ended: false,
            send_window,
            receive_window,
            unacknowledged: 0,
            waiting: Waiting::default(),
            trailers: None,
            content_length,
        }
    }
}

/// Bytes that are taken from the front as they can be sent.
#[derive(Default)]
pub struct Waiting {
    bytes: Vec<u8>,
    /// Where those begin that are not taken yet.
    at: usize,
}

impl Waiting {
    pub fn len(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn push(&mut self, data: &[u8]) {
        self.bytes.extend_from_slice(data);
    }

    /// Moves the first `size` bytes to `out`.
    pub fn pop(&mut self, size: usize, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.bytes[self.at..self.at + size]);
        self.at += size;
        if self.is_empty() {
            self.clear(); // a stream that is open for long keeps no room for what it once had to send
        } else if 2 * self.at >= self.bytes.len() {
            self.bytes.drain(..self.at);
            self.at = 0;
        }
    }

    pub fn clear(&mut self) {
        *self = Waiting::default();
    }
}
