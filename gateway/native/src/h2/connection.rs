//! What a connection makes of frames. Nothing here calls Python: what receivers must hear is noted, and `peer.rs` tells them.

use hashlink::LinkedHashMap;
use pyo3::prelude::*;

use super::egress::Egress;
use super::frames::{
    DEFAULT_WINDOW, Fault, HEAD_BYTES, MAX_ID, MIN_FRAME_BYTES, Outcome, PING, PREFACE, broken, code, frame, goaway, rst_stream,
    setting, settings, window_update, word,
};
use super::head::BlockCache;
use super::hpack::Decoder;
use super::limits::{Bucket, Limits};
use super::stream::Stream;

/// What a receiver must hear.
pub enum Told {
    End(Py<PyAny>),
    Reset(Py<PyAny>, u32),
    Sent(Py<PyAny>),
}

/// What a frame leaves to be done by who may call Python.
pub enum Next<'a> {
    /// Tell what is in `told`.
    Tell,
    /// Give data to a stream's receiver, then call `data_taken`.
    Data(Py<Stream>, &'a [u8], bool),
    /// Ask for a receiver, then call `opened`.
    Open(Py<Stream>, bool),
}

pub struct Core {
    /// Streams that we have not ended yet.
    pub streams: LinkedHashMap<u32, Py<Stream>>,
    /// What the header lists of `streams` take.
    pub(super) header_bytes: usize,
    pub egress: Egress,
    /// Ended by a fault: what is in `out` is the last.
    pub closed: bool,
    pub fault: String,
    pub told: Vec<Told>,
    /// Streams whose exchanges have come further, until they are looked at.
    pub touched: Vec<Py<Stream>>,
    pub now: f64,
    pub receive_window: i64,
    pub(super) limits: Limits,
    pub(super) cache: Py<BlockCache>,
    pub(super) decoder: Decoder,
    greeted: bool,
    pub(super) configured: bool,
    /// Stream and flags of a header block that goes on.
    pub(super) header: Option<(u32, u8)>,
    pub(super) block: Vec<u8>,
    pub(super) block_frames: usize,
    pub(super) last_id: u32,
    /// By us, not long ago: the peer may not know yet.
    pub(super) was_reset: LinkedHashMap<u32, ()>,
    /// Ended by us: its end may still cross ours; whether its last DATA may, too.
    pub(super) farewells: LinkedHashMap<u32, bool>,
    pub(super) unacknowledged: i64,
    heard_at: f64,
    pinged: bool,
    control: Bucket,
    resets: Bucket,
    pub(super) resizes: Bucket,
    pub(super) updates: u64,
}

impl Core {
    pub fn new(cache: Py<BlockCache>, limits: Limits, now: f64) -> Self {
        let mut egress = Egress::new(limits.write_bytes, now);
        let ours = [
            (setting::HEADER_TABLE_SIZE, 0),
            (setting::MAX_CONCURRENT_STREAMS, limits.max_streams as u32),
            (setting::INITIAL_WINDOW_SIZE, limits.stream_window as u32),
            (setting::MAX_HEADER_LIST_SIZE, limits.max_list_bytes as u32),
            (setting::NO_RFC7540_PRIORITIES, 1),
        ];
        settings(&mut egress.out, &ours);
        window_update(&mut egress.out, 0, limits.connection_window - DEFAULT_WINDOW);
        Core {
            streams: LinkedHashMap::new(),
            header_bytes: 0,
            egress,
            closed: false,
            fault: String::new(),
            told: Vec::new(),
            touched: Vec::new(),
            now,
            receive_window: limits.connection_window,
            cache,
            decoder: Decoder::new(limits.max_list_bytes),
            greeted: false,
            configured: false,
            header: None,
            block: Vec::new(),
            block_frames: 0,
            last_id: 0,
            was_reset: LinkedHashMap::new(),
            farewells: LinkedHashMap::new(),
            unacknowledged: 0,
            heard_at: now,
            pinged: false,
            control: Bucket::new(limits.control, now),
            resets: Bucket::new(limits.resets, now),
            resizes: Bucket::new(limits.resizes, now),
            updates: 0,
            limits,
        }
    }

    // --- what comes ---

    /// The peer has said something.
    pub fn heard(&mut self, now: f64) {
        (self.now, self.heard_at, self.pinged) = (now, now, false);
    }

    /// Takes in frames of `bytes` from `at` on, which is moved behind them, up to one that leaves something to be done.
    pub fn frames<'a>(&mut self, py: Python<'_>, bytes: &'a [u8], at: &mut usize) -> PyResult<Outcome<Option<Next<'a>>>> {
        if !self.greeted
            && !self.closed
            && let Err(fault) = self.begin(bytes, at)
        {
            return Ok(Err(fault));
        }
        while self.greeted && !self.closed && bytes.len() - *at >= HEAD_BYTES {
            let head = &bytes[*at..*at + HEAD_BYTES];
            let size = word(&head[..4]) as usize >> 8;
            if size > MIN_FRAME_BYTES {
                return Ok(broken(code::FRAME_SIZE_ERROR, format!("a frame of {size} bytes")));
            }
            let start = *at + HEAD_BYTES;
            if bytes.len() - start < size {
                break;
            }
            *at = start + size;
            let stream_id = word(&head[5..]) & MAX_ID;
            let next = self.frame(py, head[3], head[4], stream_id, &bytes[start..*at])?;
            match self.settle(py, stream_id, next) {
                Ok(Some(Some(next))) => return Ok(Ok(Some(next))),
                Err(fault) => return Ok(Err(fault)),
                _ if !self.told.is_empty() => return Ok(Ok(Some(Next::Tell))),
                _ => {}
            }
        }
        Ok(Ok(None))
    }

    /// Moves `at` behind the connection preface.
    fn begin(&mut self, bytes: &[u8], at: &mut usize) -> Outcome {
        let size = bytes.len().min(PREFACE.len());
        if bytes[..size] != PREFACE[..size] {
            return broken(code::PROTOCOL_ERROR, "this is a port for HTTP/2");
        }
        self.greeted = size == PREFACE.len();
        if self.greeted {
            *at = size;
        }
        Ok(())
    }

    /// Resets the stream where the outcome is its fault; None: it was.
    pub(super) fn settle<T>(&mut self, py: Python<'_>, stream_id: u32, outcome: Outcome<T>) -> Outcome<Option<T>> {
        match outcome {
            Err(Fault::Stream(code)) => {
                // To have us reset a stream is to reset it (CVE-2025-8671): what it asked for was begun.
                if let Some(stream) = self.streams.get(&stream_id) {
                    let answered = stream.borrow(py).answered;
                    self.take_reset(answered)?;
                }
                self.reset(py, stream_id, code);
                Ok(None)
            }
            Err(fault) => Err(fault),
            Ok(value) => Ok(Some(value)),
        }
    }

    pub(super) fn tax(&mut self) -> Outcome {
        if self.control.take(self.now, 1.0) {
            return Ok(());
        }
        broken(code::ENHANCE_YOUR_CALM, "too many frames that carry nothing")
    }

    // --- what goes ---

    /// Bytes of a stream were used up: the peer may send as many more, once they are worth a frame.
    pub fn consumed(&mut self, stream: &mut Stream, size: i64) {
        stream.unacknowledged += size;
        if stream.unacknowledged >= self.limits.stream_window / 2 && stream.open && !stream.ended {
            window_update(&mut self.egress.out, stream.id, stream.unacknowledged);
            stream.receive_window += std::mem::take(&mut stream.unacknowledged);
        }
    }

    /// Sends a message of gRPC, after the head of the answer: `block`, which fits one frame, and is empty where the head was sent
    /// before.
    pub fn message(&mut self, py: Python<'_>, stream: &Py<Stream>, block: &[u8], message: &[u8]) {
        if !block.is_empty() && stream.borrow(py).open {
            self.egress.headers(stream.borrow(py).id, 0, block);
        }
        let size = (message.len() as u32).to_be_bytes();
        self.send(py, stream, &[&[0], &size, message]);
    }

    /// Sends data when the windows allow it.
    pub fn send(&mut self, py: Python<'_>, stream: &Py<Stream>, parts: &[&[u8]]) {
        self.egress.data(py, stream, parts, self.now);
        self.pumped(py);
        if self.egress.unsent > self.limits.max_unsent_bytes {
            self.fail(py, code::ENHANCE_YOUR_CALM, "answers are not read");
        }
    }

    /// Ends the stream with trailers, after all data; `block` fits one frame.
    pub fn finish(&mut self, py: Python<'_>, stream: &Py<Stream>, block: &[u8]) {
        self.egress.end(py, stream, block);
        self.pumped(py);
    }

    /// Ends a stream at once.
    pub fn reset(&mut self, py: Python<'_>, id: u32, code: u32) {
        rst_stream(&mut self.egress.out, id, code);
        keep(&mut self.was_reset, id, (), self.limits.ended_kept);
        if let Some(stream) = self.streams.get(&id) {
            let ended = stream.borrow(py).ended;
            keep(&mut self.farewells, id, !ended, self.limits.ended_kept);
            self.gone(py, id, code);
        }
    }

    /// What was to be written is written.
    pub fn flushed(&mut self, py: Python<'_>) {
        self.egress.flushed(py, self.now);
        self.pumped(py);
    }

    /// The peer reads again.
    pub fn resume(&mut self, py: Python<'_>) {
        self.egress.paused = false;
        self.egress.pump(py, self.now);
        self.pumped(py);
    }

    /// Pings a silent peer, and closes the connection to one that does not answer or does not read.
    pub fn tick(&mut self, py: Python<'_>, now: f64) {
        self.now = now;
        if self.closed {
            return;
        }
        let silent = now - self.heard_at;
        if silent > self.limits.silence_s {
            self.fail(py, code::NO_ERROR, "no sign of life");
        } else if self.egress.unsent > 0 && now - self.egress.progress_at > self.limits.stall_s {
            self.fail(py, code::ENHANCE_YOUR_CALM, "answers are not read");
        } else if silent > self.limits.idle_ping_s && !self.pinged {
            self.pinged = true;
            frame(&mut self.egress.out, PING, 0, 0, b"penstock");
        }
    }

    /// Asks the peer to open no more streams here.
    pub fn leave(&mut self) {
        goaway(&mut self.egress.out, MAX_ID, code::NO_ERROR, "");
    }

    /// Ends the connection: all streams are gone, and a GOAWAY says why.
    pub fn fail(&mut self, py: Python<'_>, code: u32, message: &str) {
        if self.closed {
            return;
        }
        (self.closed, self.fault) = (true, message.to_owned());
        goaway(&mut self.egress.out, self.last_id, code, message);
        for id in self.streams.keys().copied().collect::<Vec<_>>() {
            self.gone(py, id, code);
        }
    }

    /// Takes in what the egress has finished.
    pub(super) fn pumped(&mut self, py: Python<'_>) {
        for stream in std::mem::take(&mut self.egress.finished) {
            self.finished(&mut stream.borrow_mut(py));
        }
        self.told.extend(self.egress.sent.drain(..).map(Told::Sent));
    }

    /// Our trailers have ended a stream.
    fn finished(&mut self, stream: &mut Stream) {
        if !stream.ended {
            keep(&mut self.was_reset, stream.id, (), self.limits.ended_kept);
        }
        keep(&mut self.farewells, stream.id, !stream.ended, self.limits.ended_kept);
        self.streams.remove(&stream.id);
        self.header_bytes -= stream.head.get().size;
        (stream.receiver, stream.exchange) = (None, None);
        self.resets.give();
    }

    pub(super) fn take_reset(&mut self, answered: bool) -> Outcome {
        // Envoy ends each exchange so, after our answers: a stream that we have answered was not opened to be reset.
        if answered || self.resets.take(self.now, 1.0) {
            return Ok(());
        }
        broken(code::ENHANCE_YOUR_CALM, "too many streams are opened to be reset")
    }

    pub(super) fn gone(&mut self, py: Python<'_>, id: u32, code: u32) {
        if let Some(stream) = self.streams.remove(&id) {
            let mut it = stream.borrow_mut(py);
            self.header_bytes -= it.head.get().size;
            self.egress.drop(&mut it);
            it.exchange = None;
            self.told.extend(it.receiver.take().map(|receiver| Told::Reset(receiver, code)));
        }
    }
}

/// Forgets the oldest where there are too many.
pub(super) fn keep<V>(recent: &mut LinkedHashMap<u32, V>, id: u32, value: V, most: usize) {
    recent.replace(id, value);
    if recent.len() > most {
        recent.pop_front();
    }
}
