//! What a connection makes of each kind of frame.

use pyo3::prelude::*;

use super::connection::{Core, Next, Told, keep};
use super::frames::{
    ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, Fault, GOAWAY, HEADERS, MAX_ID, Outcome, PADDED, PING, PRIORITY,
    PUSH_PROMISE, RST_STREAM, SETTINGS, WINDOW_UPDATE, WITH_PRIORITY, broken, code, frame, only_word, read_settings, unpadded,
    window_update,
};
use super::head::Head;
use super::stream::Stream;

impl Core {
    pub(super) fn frame<'a>(
        &mut self,
        py: Python<'_>,
        kind: u8,
        flags: u8,
        id: u32,
        payload: &'a [u8],
    ) -> PyResult<Outcome<Option<Next<'a>>>> {
        if self.header.is_some_and(|(its, _)| kind != CONTINUATION || id != its) {
            return Ok(broken(code::PROTOCOL_ERROR, "a header block was not ended"));
        }
        if !self.configured {
            if kind != SETTINGS || flags & ACK != 0 {
                return Ok(broken(code::PROTOCOL_ERROR, "the first frame is not SETTINGS"));
            }
            self.configured = true;
        }
        let outcome = match kind {
            DATA => return Ok(self.data(py, flags, id, payload)),
            HEADERS => return self.headers(py, flags, id, payload),
            CONTINUATION => return self.continuation(py, flags, payload),
            PRIORITY => self.priority(id, payload),
            RST_STREAM => self.rst_stream(py, id, payload),
            SETTINGS => self.settings(py, flags, id, payload),
            PUSH_PROMISE => broken(code::PROTOCOL_ERROR, "PUSH_PROMISE from a client"),
            PING => self.ping(flags, id, payload),
            GOAWAY => self.goaway(id, payload),
            WINDOW_UPDATE => self.window_update(py, id, payload),
            _ => self.tax(),
        };
        Ok(outcome.map(|()| None))
    }

    fn data<'a>(&mut self, py: Python<'_>, flags: u8, id: u32, payload: &'a [u8]) -> Outcome<Option<Next<'a>>> {
        let size = payload.len() as i64;
        self.receive_window -= size;
        self.unacknowledged += size;
        if self.unacknowledged >= self.limits.connection_window / 2 || self.receive_window < 0 {
            self.reopen()?;
        }
        let ends = flags & END_STREAM != 0;
        let Some(stream) = self.streams.get(&id).map(|stream| stream.clone_ref(py)).filter(|it| !it.borrow(py).ended) else {
            if payload.is_empty() && ends && self.farewells.get(&id).is_some_and(|&may| may) {
                keep(&mut self.farewells, id, false, self.limits.ended_kept);
                return Ok(None);
            }
            return self.late(id, "DATA").map(|()| None);
        };
        let mut it = stream.borrow_mut(py);
        it.receive_window -= size;
        if it.receive_window < 0 {
            return Err(Fault::Stream(code::FLOW_CONTROL_ERROR));
        }
        let mut data = payload;
        if flags & PADDED != 0 {
            data = unpadded(payload)?;
            self.consumed(&mut it, size - data.len() as i64);
        }
        if let Some(length) = &mut it.content_length {
            *length -= data.len() as i64;
            if *length < 0 {
                return Err(Fault::Stream(code::PROTOCOL_ERROR));
            }
        }
        drop(it);
        if !data.is_empty() {
            return Ok(Some(Next::Data(stream, data, ends)));
        }
        if ends {
            self.end(py, &stream)?
        } else {
            self.tax()?
        }
        Ok(None)
    }

    /// The receiver has got the data of a frame that `ends` its side of the stream.
    pub fn data_taken(&mut self, py: Python<'_>, stream: &Py<Stream>) -> Outcome {
        let (id, open) = (stream.borrow(py).id, stream.borrow(py).open);
        let outcome = if open { self.end(py, stream) } else { Ok(()) };
        self.settle(py, id, outcome).map(|_| ())
    }

    /// Reopens the connection's window at once: each stream has a window of its own, and an unread stream must not stop the others.
    fn reopen(&mut self) -> Outcome {
        if self.receive_window < 0 {
            return broken(code::FLOW_CONTROL_ERROR, "more data than the connection's window");
        }
        window_update(&mut self.egress.out, 0, self.unacknowledged);
        self.receive_window += std::mem::take(&mut self.unacknowledged);
        Ok(())
    }

    fn end(&mut self, py: Python<'_>, stream: &Py<Stream>) -> Outcome {
        let mut it = stream.borrow_mut(py);
        if it.content_length.is_some_and(|length| length != 0) {
            return Err(Fault::Stream(code::PROTOCOL_ERROR));
        }
        it.ended = true;
        if it.exchange.is_some() {
            self.touched.push(stream.clone_ref(py));
        }
        self.told.extend(it.receiver.as_ref().map(|receiver| Told::End(receiver.clone_ref(py))));
        Ok(())
    }

    /// A frame for a stream that does not take it any more, or not yet.
    fn late(&mut self, id: u32, kind: &str) -> Outcome {
        self.known(id, kind)?;
        self.tax()?;
        if self.was_reset.contains_key(&id) { Ok(()) } else { Err(Fault::Stream(code::STREAM_CLOSED)) }
    }

    fn known(&self, id: u32, kind: &str) -> Outcome {
        if id > self.last_id || id % 2 == 0 {
            return broken(code::PROTOCOL_ERROR, format!("{kind} for stream {id}, which was never opened"));
        }
        Ok(())
    }

    fn headers<'a>(&mut self, py: Python<'_>, flags: u8, id: u32, payload: &'a [u8]) -> PyResult<Outcome<Option<Next<'a>>>> {
        let block = match header_block(flags, id, payload) {
            Ok(block) => block,
            Err(fault) => return Ok(Err(fault)),
        };
        if flags & END_HEADERS != 0 {
            return self.request(py, id, flags & END_STREAM != 0, block);
        }
        self.header = Some((id, flags));
        self.block.clear();
        self.block.extend_from_slice(block);
        self.block_frames = 1;
        Ok(Ok(None))
    }

    fn continuation<'a>(&mut self, py: Python<'_>, flags: u8, payload: &'a [u8]) -> PyResult<Outcome<Option<Next<'a>>>> {
        let Some((id, first)) = self.header else {
            return Ok(broken(code::PROTOCOL_ERROR, "CONTINUATION of nothing"));
        };
        self.block.extend_from_slice(payload);
        self.block_frames += 1;
        if self.block.len() > self.limits.max_block_bytes || self.block_frames > self.limits.max_block_frames {
            return Ok(broken(code::ENHANCE_YOUR_CALM, "a header block that does not end"));
        }
        if flags & END_HEADERS == 0 {
            return Ok(Ok(None));
        }
        self.header = None;
        let block = std::mem::take(&mut self.block);
        self.request(py, id, first & END_STREAM != 0, &block)
    }

    /// A complete header block: a request's, or its trailers.
    fn request<'a>(&mut self, py: Python<'_>, id: u32, ends: bool, block: &[u8]) -> PyResult<Outcome<Option<Next<'a>>>> {
        let head = self.cache.borrow_mut(py).read(py, &mut self.decoder, block, self.limits.max_list_bytes)?;
        Ok(match head {
            Ok(head) => match self.begun(py, id, ends, head.get()) {
                Ok(true) => Ok(Some(Next::Open(self.stream(py, id, head)?, ends))),
                Ok(false) => Ok(None),
                Err(fault) => Err(fault),
            },
            Err(fault) => Err(fault),
        })
    }

    fn stream(&self, py: Python<'_>, id: u32, head: Py<Head>) -> PyResult<Py<Stream>> {
        let length = head.get().content_length;
        Py::new(py, Stream::new(id, head, length, self.egress.initial_window, self.limits.stream_window))
    }

    /// Whether the block opens a stream.
    fn begun(&mut self, py: Python<'_>, id: u32, ends: bool, head: &Head) -> Outcome<bool> {
        if let Some(stream) = self.streams.get(&id).map(|stream| stream.clone_ref(py)) {
            if stream.borrow(py).ended {
                return Err(Fault::Stream(code::STREAM_CLOSED));
            }
            if !ends || head.any_pseudo || head.malformed {
                return Err(Fault::Stream(code::PROTOCOL_ERROR)); // trailers that are none
            }
            return self.end(py, &stream).map(|()| false);
        }
        if id <= self.last_id {
            if !self.was_reset.contains_key(&id) {
                return broken(code::PROTOCOL_ERROR, format!("stream {id} is opened after {}", self.last_id));
            }
            return self.tax().map(|()| false);
        }
        self.last_id = id;
        if head.malformed || head.missing {
            self.tax()?;
            return Err(Fault::Stream(code::PROTOCOL_ERROR));
        }
        Ok(true)
    }

    /// Whether there may be one more stream, with these headers.
    pub fn has_room(&self, head: &Head) -> bool {
        self.streams.len() < self.limits.max_streams && self.header_bytes + head.size <= self.limits.max_header_bytes
    }

    /// A stream has its receiver; None refuses it.
    pub fn opened(&mut self, py: Python<'_>, stream: Py<Stream>, receiver: Option<Py<PyAny>>, ends: bool) -> Outcome {
        let id = stream.borrow(py).id;
        let Some(receiver) = receiver else { return self.refused(py, id) };
        stream.borrow_mut(py).receiver = Some(receiver);
        self.admitted(py, &stream);
        let outcome = if ends { self.end(py, &stream) } else { Ok(()) };
        self.settle(py, id, outcome).map(|_| ())
    }

    /// A stream has a receiver, or an exchange that is taken in here.
    pub fn admitted(&mut self, py: Python<'_>, stream: &Py<Stream>) {
        let it = stream.borrow(py);
        self.header_bytes += it.head.get().size;
        self.streams.insert(it.id, stream.clone_ref(py));
    }

    /// Nobody takes the stream.
    pub fn refused(&mut self, py: Python<'_>, id: u32) -> Outcome {
        let outcome = self.tax().and(Err(Fault::Stream(code::REFUSED_STREAM)));
        self.settle(py, id, outcome).map(|_: Option<()>| ())
    }

    fn priority(&mut self, id: u32, payload: &[u8]) -> Outcome {
        if id == 0 {
            return broken(code::PROTOCOL_ERROR, "PRIORITY for no stream");
        }
        if payload.len() != 5 {
            return broken(code::FRAME_SIZE_ERROR, format!("PRIORITY of {} bytes", payload.len()));
        }
        self.tax()
    }

    fn rst_stream(&mut self, py: Python<'_>, id: u32, payload: &[u8]) -> Outcome {
        let code = only_word("RST_STREAM", payload)?;
        self.known(id, "RST_STREAM")?;
        let Some(stream) = self.streams.get(&id) else {
            return if self.farewells.remove(&id).is_some() { Ok(()) } else { self.tax() };
        };
        let answered = stream.borrow(py).answered;
        self.take_reset(answered)?;
        self.gone(py, id, if code > code::LAST { code::INTERNAL_ERROR } else { code });
        Ok(())
    }

    fn settings(&mut self, py: Python<'_>, flags: u8, id: u32, payload: &[u8]) -> Outcome {
        if id != 0 {
            return broken(code::PROTOCOL_ERROR, "SETTINGS for a stream");
        }
        self.tax()?;
        if flags & ACK != 0 {
            if !payload.is_empty() {
                return broken(code::FRAME_SIZE_ERROR, "an acknowledgement of SETTINGS that says something");
            }
            return Ok(());
        }
        let values = read_settings(payload)?;
        let egress = &mut self.egress;
        egress.max_frame = values.max_frame.unwrap_or(egress.max_frame);
        for table in values.tables {
            egress.resize_table(table);
        }
        frame(&mut egress.out, SETTINGS, ACK, 0, b"");
        if let Some(window) = values.window.filter(|&window| window != egress.initial_window) {
            if !self.resizes.take(self.now, self.streams.len() as f64) {
                return broken(code::ENHANCE_YOUR_CALM, "too many changes of the windows of open streams");
            }
            let outcome = egress.resize(py, window, self.streams.values(), self.now);
            self.pumped(py);
            outcome?;
        }
        Ok(())
    }

    fn ping(&mut self, flags: u8, id: u32, payload: &[u8]) -> Outcome {
        if id != 0 {
            return broken(code::PROTOCOL_ERROR, "PING for a stream");
        }
        if payload.len() != 8 {
            return broken(code::FRAME_SIZE_ERROR, format!("PING of {} bytes", payload.len()));
        }
        self.tax()?;
        if flags & ACK == 0 {
            frame(&mut self.egress.out, PING, ACK, 0, payload);
        }
        Ok(())
    }

    /// The peer will open no more streams, and close the connection when it likes.
    fn goaway(&mut self, id: u32, payload: &[u8]) -> Outcome {
        if id != 0 {
            return broken(code::PROTOCOL_ERROR, "GOAWAY for a stream");
        }
        if payload.len() < 8 {
            return broken(code::FRAME_SIZE_ERROR, format!("GOAWAY of {} bytes", payload.len()));
        }
        self.tax()
    }

    fn window_update(&mut self, py: Python<'_>, id: u32, payload: &[u8]) -> Outcome {
        let more = i64::from(only_word("WINDOW_UPDATE", payload)? & MAX_ID);
        self.updates += 1;
        if self.updates > self.limits.updates_a_frame * self.egress.frames_sent {
            self.tax()?;
        }
        let outcome = if id == 0 {
            self.egress.grow(py, more, self.now)
        } else if let Some(stream) = self.streams.get(&id) {
            self.egress.grow_stream(py, stream, more, self.now)
        } else {
            self.known(id, "WINDOW_UPDATE")
        };
        self.pumped(py);
        outcome
    }
}

/// The part of a header block that a HEADERS frame has.
fn header_block(flags: u8, id: u32, payload: &[u8]) -> Outcome<&[u8]> {
    if id % 2 == 0 {
        return broken(code::PROTOCOL_ERROR, format!("HEADERS for stream {id}"));
    }
    let block = if flags & PADDED != 0 { unpadded(payload)? } else { payload };
    if flags & WITH_PRIORITY == 0 {
        return Ok(block);
    }
    match block.get(5..) {
        Some(block) => Ok(block),
        None => broken(code::FRAME_SIZE_ERROR, "HEADERS without the priority that they announce"),
    }
}
