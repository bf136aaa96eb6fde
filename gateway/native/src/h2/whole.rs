//! Usual exchanges of ext_proc, taken in without a call of gRPC: a request that comes whole, and the head of a response that is only
//! shown. `penstock.gateway.extproc.whole` says what is usual, and decides; what is not goes to a call of Python's with all bytes
//! that have come.

use prost::Message;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use super::connection::Core;
use super::head::Head;
use super::stream::Stream;
use crate::messages::{HttpHeaders, ProcessingRequest, Request};
use crate::responses::Heads;
use crate::wire::{Usual, Wire};

/// Of a message of gRPC: whether it is compressed, and its size.
const PREFIX_BYTES: usize = 5;
const FULL_DUPLEX_STREAMED: i32 = 4;

/// What exchanges of one service have in common; see `penstock.gateway.picker.compiled.Compiled.Exchanges`.
#[pyclass(frozen)]
pub struct Exchanges {
    path: String,
    phase: (String, String),
    wire: Py<Wire>,
    most_bytes: usize,
    chunk_bytes: usize,
    head: Vec<u8>,
    ok: Vec<u8>,
    ok_alone: Vec<u8>,
    pub usual: Usual,
    heads: Option<Py<Heads>>,
}

#[pymethods]
impl Exchanges {
    #[new]
    #[allow(clippy::too_many_arguments)]
    fn new(
        path: String,
        phase: (String, String),
        wire: Py<Wire>,
        most_bytes: usize,
        chunk_bytes: usize,
        head: Vec<u8>,
        ok: Vec<u8>,
        ok_alone: Vec<u8>,
        usual: Usual,
        heads: Option<Py<Heads>>,
    ) -> Self {
        Exchanges { path, phase, wire, most_bytes, chunk_bytes: chunk_bytes.max(1), head, ok, ok_alone, usual, heads }
    }
}

impl Exchanges {
    /// The exchange that a call with this head begins; None where the call is for another service, or is not usual.
    pub fn begun(&self, py: Python<'_>, head: &Head) -> PyResult<Option<Exchange>> {
        if !head.calls(py, &self.path)? {
            return Ok(None);
        }
        let (name, value) = &self.phase;
        Ok(Some(Exchange { apart: head.has(py, name, value)?, ..Exchange::default() }))
    }

    /// Answers a request with its destination, and sends its body on.
    pub fn routed(&self, py: Python<'_>, core: &mut Core, stream: &Py<Stream>, picked: &[u8], body: &[u8]) {
        core.message(py, stream, &self.head, picked);
        let mut rest = body;
        loop {
            let (chunk, more) = rest.split_at(rest.len().min(self.chunk_bytes));
            core.message(py, stream, b"", &Wire::chunk_of(chunk, more.is_empty()));
            rest = more;
            if rest.is_empty() {
                break;
            }
        }
        core.finish(py, stream, &self.ok);
    }

    /// Answers with one message, or with none, for which nobody waits.
    pub fn answered(&self, py: Python<'_>, core: &mut Core, stream: &Py<Stream>, message: Option<&[u8]>) {
        match message {
            Some(message) => {
                core.message(py, stream, &self.head, message);
                core.finish(py, stream, &self.ok);
            }
            None => {
                let urgent = core.egress.urgent();
                core.finish(py, stream, &self.ok_alone);
                if !urgent {
                    core.egress.wait();
                }
            }
        }
    }

    /// Takes in the head of a response; whether it was usual. A mistake is shown, and is then Python's to deal with.
    pub fn takes(&self, noted: &Bound<'_, PyDict>, fields: &Bound<'_, PyDict>, served: Option<&str>) -> bool {
        let Some(heads) = &self.heads else { return false };
        heads.get().take_in(noted, fields, served).unwrap_or_else(|mistake| {
            mistake.write_unraisable(noted.py(), None);
            false
        })
    }

    pub fn wire(&self) -> &Wire {
        self.wire.get()
    }
}

/// What an exchange has come to.
pub enum Event {
    /// A request with its whole body.
    Request(Py<PyDict>, Py<PyBytes>),
    /// The head of a response: its headers, what was noted of its request, and who answered.
    Response(Py<PyDict>, Option<Py<PyDict>>, Option<String>),
    /// It is no usual exchange.
    Unusual,
}

/// One exchange, as far as it has come.
#[derive(Default)]
pub struct Exchange {
    /// Another exchange has the response.
    apart: bool,
    /// All that has come.
    pub raw: Vec<u8>,
    /// How much of `raw` was read.
    read: usize,
    pub fields: Option<Py<PyDict>>,
    pub body: Vec<u8>,
    /// What it has come to, if to anything.
    pub event: Option<Event>,
}

impl Exchange {
    /// Takes in the next bytes; whether it is usual so far. It is not where more comes behind what it has come to.
    pub fn feed(&mut self, py: Python<'_>, of: &Exchanges, data: &[u8]) -> PyResult<bool> {
        self.raw.extend_from_slice(data);
        self.event = self.event.take().map(|_| Event::Unusual);
        while self.event.is_none() {
            if self.raw.len() > of.most_bytes {
                self.event = Some(Event::Unusual);
                break;
            }
            let Some(prefix) = self.raw.get(self.read..self.read + PREFIX_BYTES) else { break };
            let size = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
            if prefix[0] != 0 || size > of.most_bytes {
                self.event = Some(Event::Unusual);
                break;
            }
            let from = self.read + PREFIX_BYTES;
            let Some(message) = self.raw.get(from..from + size) else { break };
            let message = ProcessingRequest::decode(message);
            self.read = from + size;
            self.event = match message {
                Ok(message) => self.take_in(py, of.wire(), message)?,
                Err(_) => Some(Event::Unusual), // protobuf may read it, and says why where it does not
            };
        }
        if self.event.is_some() && self.read < self.raw.len() {
            self.event = Some(Event::Unusual);
        }
        Ok(!matches!(self.event, Some(Event::Unusual)))
    }

    fn take_in(&mut self, py: Python<'_>, wire: &Wire, message: ProcessingRequest) -> PyResult<Option<Event>> {
        let (metadata, observed) = (message.metadata_context.as_ref(), message.observability_mode);
        if !observed && wire.hints(metadata) {
            return Ok(Some(Event::Unusual));
        }
        match (message.request, &self.fields) {
            (Some(Request::ResponseHeaders(head)), None) if observed => {
                let fields = wire.headers(py, head.headers.as_ref())?.unbind();
                let noted = wire.noted(py, metadata)?.map(Bound::unbind);
                let served = wire.served(metadata, &message.attributes);
                Ok(Some(Event::Response(fields, noted, served)))
            }
            (Some(Request::RequestHeaders(head)), None) if !observed && self.apart => {
                let duplex = message.protocol_config.is_none_or(|it| it.request_body_mode == FULL_DUPLEX_STREAMED);
                self.request(py, wire, &head, duplex)
            }
            (Some(Request::RequestBody(part)), Some(fields)) if !observed => {
                if self.body.is_empty() {
                    self.body = part.body;
                } else {
                    self.body.extend_from_slice(&part.body);
                }
                let body = || PyBytes::new(py, &self.body).unbind();
                Ok(part.end_of_stream.then(|| Event::Request(fields.clone_ref(py), body())))
            }
            _ => Ok(Some(Event::Unusual)),
        }
    }

    fn request(&mut self, py: Python<'_>, wire: &Wire, head: &HttpHeaders, duplex: bool) -> PyResult<Option<Event>> {
        if head.end_of_stream || !duplex {
            return Ok(Some(Event::Unusual));
        }
        self.fields = Some(wire.headers(py, head.headers.as_ref())?.unbind());
        Ok(None)
    }
}

impl Head {
    /// Whether it is a call of the method at `path` as nearly all are: without a time limit and without compression.
    fn calls(&self, py: Python<'_>, path: &str) -> PyResult<bool> {
        let pseudo = self.pseudo.bind(py);
        let is = |name: &str, wanted: &str| -> PyResult<bool> {
            let value = pseudo.get_item(name)?;
            Ok(value.is_some_and(|value| value.cast::<PyString>().is_ok_and(|it| it.to_str().is_ok_and(|it| it == wanted))))
        };
        let absent = |name: &str| !self.regular.iter().any(|(its, _)| its == name);
        Ok(is(":path", path)?
            && is(":method", "POST")?
            && self.first_is(py, "content-type", "application/grpc")?
            && absent("grpc-timeout")
            && absent("grpc-encoding"))
    }

    fn first_is(&self, py: Python<'_>, name: &str, wanted: &str) -> PyResult<bool> {
        let value = self.regular.iter().find(|(its, _)| its == name);
        value.map_or(Ok(false), |(_, value)| Ok(value.bind(py).to_str()? == wanted))
    }

    fn has(&self, py: Python<'_>, name: &str, wanted: &str) -> PyResult<bool> {
        for (its, value) in &self.regular {
            if its == name && value.bind(py).to_str()? == wanted {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
