//! Reads what a proxy says over ext_proc, and writes the answers to requests with a destination: see
//! `penstock.gateway.extproc.wire`, whose forms in Python are the statement.

use std::borrow::Cow;
use std::collections::BTreeMap;

use hashbrown::HashMap;
use prost::{Message, length_delimiter_len};
use prost_types::value::Kind;
use prost_types::{Struct, Value};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};

use crate::fields::{self, field};
use crate::messages::{HeaderMap, Metadata, ProcessingRequest, Request};

/// Fields with their values: of an option for a header that it overwrites what is there or adds, of a response that the route is
/// chosen anew, of a chunk that it is the last.
const OVERWRITE: [u8; 2] = [3 << 3, 2];
const CLEAR_ROUTE_CACHE: [u8; 2] = [5 << 3, 1];
const END_OF_STREAM: [u8; 2] = [2 << 3, 1];
/// What goes before the number of a `Value`.
const NUMBER: u8 = 2 << 3 | 1;
/// Room for what most answers to a request's headers have besides the mutation.
const PICKED_BYTES: usize = 1024;

/// A field of a namespace in metadata or attributes.
type Place = (String, String);
/// As `penstock.gateway.extproc.wire.Message` has them.
type Read<'py> = (
    Bound<'py, PyString>,
    bool,
    Bound<'py, PyDict>,
    Bound<'py, PyBytes>,
    bool,
    Option<(i32, i32, bool)>,
    Option<Bound<'py, PyTuple>>,
    Option<Bound<'py, PyDict>>,
    Option<String>,
);

/// What the answers to requests that go on as nearly all do have in common; see `penstock.gateway.picker.compiled.Compiled.Exchanges`.
#[derive(FromPyObject)]
pub struct Usual {
    mutation: Vec<u8>,
    destination: String,
    pool: String,
    metadata: String,
    log: String,
    notes: Vec<String>,
}

/// Reads and writes messages.
#[pyclass(frozen)]
pub struct Wire {
    names: HashMap<String, Py<PyString>>,
    subset: Place,
    log: String,
    notes: Vec<Py<PyString>>,
    served: Place,
    address: Place,
}

#[pymethods]
impl Wire {
    /// See `penstock.gateway.picker.compiled.Compiled.Wire`.
    #[new]
    fn new(
        names: Vec<Bound<'_, PyString>>,
        subset: Place,
        log: String,
        notes: Vec<Bound<'_, PyString>>,
        served: Place,
        address: Place,
    ) -> PyResult<Self> {
        if notes.is_empty() {
            return Err(PyValueError::new_err("no note names a booking"));
        }
        let names = names.into_iter().map(|name| Ok((name.to_str()?.to_owned(), name.unbind()))).collect::<PyResult<_>>()?;
        Ok(Wire { names, subset, log, notes: notes.into_iter().map(Bound::unbind).collect(), served, address })
    }

    /// What a message says. Raises ValueError for what is none.
    fn read<'py>(&self, py: Python<'py>, data: &[u8]) -> PyResult<Read<'py>> {
        let message = ProcessingRequest::decode(data).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let metadata = message.metadata_context.as_ref();
        let modes = message
            .protocol_config
            .map(|it| (it.request_body_mode, it.response_body_mode, it.send_body_without_waiting_for_header_response));
        let (mut fields, mut body, mut ends) = (PyDict::new(py), &[][..], false);
        let (mut hint, mut noted, mut served) = (None, None, None);
        let kind = match &message.request {
            Some(Request::RequestHeaders(head)) => {
                (fields, ends, hint) = (self.headers(py, head.headers.as_ref())?, head.end_of_stream, self.hint(py, metadata)?);
                "request_headers"
            }
            Some(Request::ResponseHeaders(head)) => {
                (fields, ends) = (self.headers(py, head.headers.as_ref())?, head.end_of_stream);
                (noted, served) = (self.noted(py, metadata)?, self.served(metadata, &message.attributes));
                "response_headers"
            }
            Some(Request::RequestBody(part)) => {
                (body, ends, hint) = (&part.body, part.end_of_stream, self.hint(py, metadata)?);
                "request_body"
            }
            Some(Request::ResponseBody(part)) => {
                (body, ends) = (&part.body, part.end_of_stream);
                "response_body"
            }
            Some(Request::RequestTrailers(_)) => {
                hint = self.hint(py, metadata)?;
                "request_trailers"
            }
            Some(Request::ResponseTrailers(_)) => "response_trailers",
            None => "",
        };
        let (kind, body) = (PyString::intern(py, kind), PyBytes::new(py, body));
        Ok((kind, message.observability_mode, fields, body, ends, modes, hint, noted, served))
    }

    /// The answer to a request's headers that sends it to its destination.
    ///
    /// `mutation` is a `HeaderMutation` in bytes, to which `sets` and `removes` are added; `metadata` has the fields of each of its
    /// namespaces.
    fn picked<'py>(
        &self,
        py: Python<'py>,
        mutation: &[u8],
        sets: Vec<(PyBackedStr, PyBackedStr)>,
        removes: Vec<PyBackedStr>,
        metadata: Vec<(PyBackedStr, Bound<'py, PyDict>)>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &Self::picked_of(mutation, sets, removes, metadata)?))
    }

    /// The answer that has a chunk of the request's body, its last one where it `ends`.
    fn chunk<'py>(&self, py: Python<'py>, body: &[u8], ends: bool) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &Self::chunk_of(body, ends))
    }
}

impl Wire {
    /// See `picked`.
    pub fn picked_of(
        mutation: &[u8],
        sets: Vec<(PyBackedStr, PyBackedStr)>,
        removes: Vec<PyBackedStr>,
        metadata: Vec<(PyBackedStr, Bound<'_, PyDict>)>,
    ) -> PyResult<Vec<u8>> {
        let mut out = sent_on(mutation, |out| {
            sets.iter().for_each(|(name, value)| overwrite(out, name, value));
            removes.iter().for_each(|name| field(out, 2, name.as_bytes()));
        });
        if !metadata.is_empty() {
            fields::message(&mut out, 8, |out| {
                metadata
                    .iter()
                    .try_for_each(|(name, fields)| entry(out, name, |out| fields::message(out, 5, |out| all(out, fields))))
            })?;
        }
        Ok(out)
    }

    /// As `picked_of`, for a request that goes on as nearly all do.
    pub fn usual_of(usual: &Usual, endpoints: &str, pool: &str, notes: &Bound<'_, PyTuple>) -> PyResult<Vec<u8>> {
        let mut out = sent_on(&usual.mutation, |out| {
            overwrite(out, &usual.destination, endpoints);
            overwrite(out, &usual.pool, pool);
        });
        fields::message(&mut out, 8, |out| {
            entry(out, &usual.metadata, |out| {
                fields::message(out, 5, |out| entry(out, &usual.destination, |out| field(out, 3, endpoints.as_bytes())))
            });
            entry(out, &usual.log, |out| {
                let mut noted = usual.notes.iter().zip(notes);
                fields::message(out, 5, |out| noted.try_for_each(|(name, note)| entry(out, name, |out| value(out, &note))))
            })
        })?;
        Ok(out)
    }

    /// See `chunk`.
    pub fn chunk_of(body: &[u8], ends: bool) -> Vec<u8> {
        let last: &[u8] = if ends { &END_OF_STREAM } else { &[] };
        let size = |size: usize| 1 + length_delimiter_len(size) + size;
        let streamed = size(body.len()) + last.len();
        let mutation = size(streamed);
        let response = size(mutation);
        let answer = size(response);
        let mut out = Vec::with_capacity(size(answer));
        // What answers a body, its response, the mutation of that, and the streamed response.
        for (number, size) in [(3, answer), (1, response), (3, mutation), (3, streamed)] {
            fields::head(&mut out, number, size);
        }
        field(&mut out, 1, body);
        out.extend_from_slice(last);
        out
    }

    /// Whether a request's metadata has the subset's hint.
    pub fn hints(&self, metadata: Option<&Metadata>) -> bool {
        self.hinted(metadata).is_some()
    }

    fn hinted<'a>(&self, metadata: Option<&'a Metadata>) -> Option<&'a Value> {
        let (space, name) = &self.subset;
        metadata.and_then(|it| it.filter_metadata.get(space)).and_then(|it| it.fields.get(name))
    }

    /// The headers that anybody looks at; of several with one name, the last.
    pub fn headers<'py>(&self, py: Python<'py>, map: Option<&HeaderMap>) -> PyResult<Bound<'py, PyDict>> {
        let found = PyDict::new(py);
        for header in map.map_or(&[][..], |map| &map.headers) {
            let name = self.names.get(&header.key).or_else(|| self.names.get(&header.key.to_lowercase()));
            if let Some(name) = name {
                let raw = &header.raw_value;
                let value = if raw.is_empty() { Cow::Borrowed(&*header.value) } else { latin1(raw) };
                found.set_item(name, value)?;
            }
        }
        Ok(found)
    }

    fn hint<'py>(&self, py: Python<'py>, metadata: Option<&Metadata>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        self.hinted(metadata).map(|value| PyTuple::new(py, [plain(py, value)?])).transpose()
    }

    pub fn noted<'py>(&self, py: Python<'py>, metadata: Option<&Metadata>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(Struct { fields }) = metadata.and_then(|it| it.filter_metadata.get(&self.log)) else {
            return Ok(None);
        };
        if !fields.contains_key(self.notes[0].bind(py).to_str()?) {
            return Ok(None);
        }
        let noted = PyDict::new(py);
        for name in &self.notes {
            if let Some(value) = fields.get(name.bind(py).to_str()?) {
                noted.set_item(name, text(value).unwrap_or_default())?;
            }
        }
        Ok(Some(noted))
    }

    /// The endpoint that answered, by the protocol's metadata, else by the proxy's attribute.
    pub fn served(&self, metadata: Option<&Metadata>, attributes: &BTreeMap<String, Struct>) -> Option<String> {
        let (space, name) = &self.served;
        let value = metadata.and_then(|it| it.filter_metadata.get(space)).and_then(|it| it.fields.get(name));
        let said = value.and_then(|value| match &value.kind {
            Some(Kind::ListValue(list)) if list.values.len() == 1 => text(&list.values[0]),
            _ => text(value),
        });
        let (space, name) = &self.address;
        let address = || attributes.get(space).and_then(|it| it.fields.get(name)).and_then(text);
        said.filter(|it| !it.is_empty()).or_else(address).filter(|it| !it.is_empty()).map(str::to_owned)
    }
}

fn text(value: &Value) -> Option<&str> {
    match &value.kind {
        Some(Kind::StringValue(text)) => Some(text),
        _ => None,
    }
}

/// A string or a list of strings; anything else as None.
fn plain<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match &value.kind {
        Some(Kind::ListValue(list)) => PyList::new(py, list.values.iter().map(text))?.into_any(),
        _ => text(value).into_pyobject(py)?,
    })
}

/// A header that is set whatever was there.
fn overwrite(out: &mut Vec<u8>, name: &str, value: &str) {
    fields::message(out, 1, |out| {
        fields::message(out, 1, |out| {
            field(out, 1, name.as_bytes());
            field(out, 3, value.as_bytes());
        });
        out.extend_from_slice(&OVERWRITE);
    });
}

/// What answers the headers of a request that goes on: a mutation in bytes, and what `more` adds to it.
fn sent_on(mutation: &[u8], more: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = Vec::with_capacity(PICKED_BYTES + mutation.len());
    fields::message(&mut out, 1, |out| {
        fields::message(out, 1, |out| {
            fields::message(out, 2, |out| {
                out.extend_from_slice(mutation);
                more(out);
            });
            out.extend_from_slice(&CLEAR_ROUTE_CACHE);
        });
    });
    out
}

/// What is in a map, whose field is 1, as in `Struct`: `value` writes the fields of a message.
fn entry<R>(out: &mut Vec<u8>, name: &str, value: impl FnOnce(&mut Vec<u8>) -> R) -> R {
    fields::message(out, 1, |out| {
        field(out, 1, name.as_bytes());
        fields::message(out, 2, value)
    })
}

/// The fields of a `Struct`: texts and numbers.
fn all(out: &mut Vec<u8>, fields: &Bound<'_, PyDict>) -> PyResult<()> {
    for (name, it) in fields {
        entry(out, name.cast::<PyString>()?.to_str()?, |out| value(out, &it))?;
    }
    Ok(())
}

/// A `Value`: a text or a number.
fn value(out: &mut Vec<u8>, value: &Bound<'_, PyAny>) -> PyResult<()> {
    match value.cast::<PyString>() {
        Ok(text) => field(out, 3, text.to_str()?.as_bytes()),
        Err(_) => {
            out.push(NUMBER);
            out.extend_from_slice(&value.extract::<f64>()?.to_le_bytes());
        }
    }
    Ok(())
}

fn latin1(bytes: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(bytes) {
        Ok(text) if text.is_ascii() => Cow::Borrowed(text),
        _ => Cow::Owned(bytes.iter().map(|&byte| char::from(byte)).collect()),
    }
}
