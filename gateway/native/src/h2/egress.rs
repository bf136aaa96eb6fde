//! The half of a connection that sends: windows, turns, and what waits for them.

use hashlink::LinkedHashMap;
use pyo3::prelude::*;

use super::frames::{
    DATA, DEFAULT_TABLE_BYTES, DEFAULT_WINDOW, END_HEADERS, END_STREAM, Fault, HEADERS, MAX_WINDOW, MIN_FRAME_BYTES, Outcome,
    broken, code, head, rst_stream,
};
use super::stream::Stream;

/// What begins a block by which the dynamic table gets the size of nothing (RFC 7541, section 6.3).
const NO_TABLE: u8 = 0x20;

/// Sends what the peer's windows allow, one frame of each stream in turn.
pub struct Egress {
    /// Frames to write.
    pub out: Vec<u8>,
    /// Bytes at the beginning of `out` that nobody waits for.
    patient: usize,
    /// The peer does not read: no data goes into `out`.
    pub paused: bool,
    /// Bytes of all streams that wait.
    pub unsent: usize,
    /// When data last went out, or began to wait.
    pub progress_at: f64,
    pub initial_window: i64,
    pub max_frame: usize,
    pub frames_sent: u64,
    /// Streams that are over, their trailers being sent.
    pub finished: Vec<Py<Stream>>,
    /// Receivers of streams of which nothing waits any more.
    pub sent: Vec<Py<PyAny>>,
    /// Of the peer's table for our header blocks.
    table_bytes: u32,
    /// Our next header block has to begin with the table's size.
    resized: bool,
    window: i64,
    room: i64,
    /// Data that goes into `out` at once: more waits until that is written, so that a peer that does not read is noticed.
    write_bytes: i64,
    /// Streams that have data and a window.
    turns: LinkedHashMap<u32, Py<Stream>>,
}

impl Egress {
    pub fn new(write_bytes: i64, now: f64) -> Self {
        Egress {
            out: Vec::new(),
            patient: 0,
            paused: false,
            unsent: 0,
            progress_at: now,
            initial_window: DEFAULT_WINDOW,
            max_frame: MIN_FRAME_BYTES,
            frames_sent: 0,
            finished: Vec::new(),
            sent: Vec::new(),
            table_bytes: DEFAULT_TABLE_BYTES,
            resized: false,
            window: DEFAULT_WINDOW,
            room: write_bytes,
            write_bytes,
            turns: LinkedHashMap::new(),
        }
    }

    /// Whether anybody waits for what is to be written.
    pub fn urgent(&self) -> bool {
        self.out.len() > self.patient
    }

    /// Nobody waits for what is in `out`.
    pub fn wait(&mut self) {
        self.patient = self.out.len();
    }

    /// Puts all of `out` behind it, and keeps room for so many bytes.
    pub fn taken(&mut self, kept: usize) {
        self.out.clear();
        self.out.shrink_to(kept);
        self.patient = 0;
    }

    /// A header block, which fits one frame.
    pub fn headers(&mut self, stream_id: u32, flags: u8, block: &[u8]) {
        let resized = std::mem::take(&mut self.resized);
        head(&mut self.out, HEADERS, END_HEADERS | flags, stream_id, block.len() + usize::from(resized));
        if resized {
            self.out.push(NO_TABLE);
        }
        self.out.extend_from_slice(block);
    }

    /// Sends `parts`, which are one piece of data, when the windows allow it, in frames as large as the peer takes.
    pub fn data(&mut self, py: Python<'_>, stream: &Py<Stream>, parts: &[&[u8]], now: f64) {
        let size: usize = parts.iter().map(|part| part.len()).sum();
        let mut it = stream.borrow_mut(py);
        if !it.open || size == 0 {
            return;
        }
        if self.unsent == 0 {
            self.progress_at = now;
            let most = it.send_window.min(self.window).min(self.max_frame as i64).min(self.room);
            if size as i64 <= most && !self.paused {
                self.frame(&mut it, size); // what nearly always happens
                parts.iter().for_each(|part| self.out.extend_from_slice(part));
                return;
            }
        }
        parts.iter().for_each(|part| it.waiting.push(part));
        self.unsent += size;
        self.queue(stream, &mut it);
        drop(it);
        self.pump(py, now);
    }

    /// Ends the stream with trailers, after all data; `block` fits one frame.
    pub fn end(&mut self, py: Python<'_>, stream: &Py<Stream>, block: &[u8]) {
        let mut it = stream.borrow_mut(py);
        if !it.open {
            return;
        }
        if it.waiting.is_empty() {
            self.finish(stream.clone_ref(py), &mut it, block);
        } else {
            it.trailers = Some(block.to_vec());
        }
    }

    /// The stream is gone.
    pub fn drop(&mut self, stream: &mut Stream) {
        stream.open = false;
        self.turns.remove(&stream.id); // its turn may never come: whoever takes no data may still open and reset streams
        self.unsent -= stream.waiting.len();
        stream.waiting.clear();
    }

    /// The peer takes `more` bytes on the connection.
    pub fn grow(&mut self, py: Python<'_>, more: i64, now: f64) -> Outcome {
        if more == 0 {
            return broken(code::PROTOCOL_ERROR, "WINDOW_UPDATE by nothing");
        }
        self.window += more;
        if self.window > MAX_WINDOW {
            return broken(code::FLOW_CONTROL_ERROR, "a window beyond all bounds");
        }
        self.pump(py, now);
        Ok(())
    }

    /// The peer takes `more` bytes on a stream.
    pub fn grow_stream(&mut self, py: Python<'_>, stream: &Py<Stream>, more: i64, now: f64) -> Outcome {
        if more == 0 {
            return Err(Fault::Stream(code::PROTOCOL_ERROR));
        }
        let mut it = stream.borrow_mut(py);
        it.send_window += more;
        if it.send_window > MAX_WINDOW {
            return Err(Fault::Stream(code::FLOW_CONTROL_ERROR));
        }
        self.queue(stream, &mut it);
        drop(it);
        self.pump(py, now);
        Ok(())
    }

    /// The peer has another INITIAL_WINDOW_SIZE; the windows of open streams change with it, even below nothing.
    pub fn resize<'a>(&mut self, py: Python<'_>, size: i64, streams: impl Iterator<Item = &'a Py<Stream>>, now: f64) -> Outcome {
        let more = size - std::mem::replace(&mut self.initial_window, size);
        for stream in streams {
            let mut it = stream.borrow_mut(py);
            it.send_window += more;
            if it.send_window > MAX_WINDOW {
                return broken(code::FLOW_CONTROL_ERROR, "a window beyond all bounds");
            }
            self.queue(stream, &mut it);
        }
        self.pump(py, now);
        Ok(())
    }

    /// The peer keeps a dynamic table of that size for our blocks, which use none. It takes a smaller one for an error unless the
    /// next block begins by agreeing (RFC 9113, section 4.3.1).
    pub fn resize_table(&mut self, size: u32) {
        self.resized |= size < self.table_bytes;
        self.table_bytes = size;
    }

    /// Sends what can be sent.
    pub fn pump(&mut self, py: Python<'_>, now: f64) {
        while self.window > 0 && self.room > 0 && !self.paused {
            let Some((_, stream)) = self.turns.pop_front() else { return };
            let mut it = stream.borrow_mut(py);
            let size = it.send_window.min(self.window).min(it.waiting.len().min(self.max_frame) as i64);
            if size <= 0 {
                continue; // its window has shrunk
            }
            let size = size as usize;
            self.frame(&mut it, size);
            it.waiting.pop(size, &mut self.out);
            self.unsent -= size;
            self.progress_at = now;
            if !it.waiting.is_empty() {
                self.queue(&stream, &mut it);
            } else if let Some(block) = it.trailers.take() {
                self.finish(stream.clone_ref(py), &mut it, &block);
            } else if let Some(receiver) = &it.receiver {
                self.sent.push(receiver.clone_ref(py));
            }
        }
    }

    /// What was in `out` is written.
    pub fn flushed(&mut self, py: Python<'_>, now: f64) {
        self.room = self.write_bytes;
        self.pump(py, now);
    }

    /// The head of a frame of data, of which `size` bytes follow.
    fn frame(&mut self, stream: &mut Stream, size: usize) {
        head(&mut self.out, DATA, 0, stream.id, size);
        stream.answered = true;
        stream.send_window -= size as i64;
        self.window -= size as i64;
        self.room -= size as i64;
        self.frames_sent += 1;
    }

    fn queue(&mut self, stream: &Py<Stream>, it: &mut PyRefMut<'_, Stream>) {
        if !it.waiting.is_empty() && it.send_window > 0 {
            self.turns.replace(it.id, stream.clone_ref(it.py())); // who has a turn keeps its place
        }
    }

    fn finish(&mut self, stream: Py<Stream>, it: &mut Stream, block: &[u8]) {
        self.headers(it.id, END_STREAM, block);
        if !it.ended {
            rst_stream(&mut self.out, it.id, code::NO_ERROR); // the rest of the peer's message is not needed
        }
        it.open = false;
        self.finished.push(stream);
    }
}
