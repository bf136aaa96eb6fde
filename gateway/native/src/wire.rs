//! Reads what a proxy says over ext_proc, and writes the answers to requests with a destination: see
//! `penstock.gateway.extproc.wire`, whose forms in Python are the statement.

use std::borrow::Cow;
use std::collections::BTreeMap;

use hashbrown::HashMap;
use prost::Message;
use prost_types::value::Kind;
use prost_types::{Struct, Value};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};

use crate::fields::{entry, field, head};
use crate::messages::{HeaderMap, Metadata, ProcessingRequest, Request};

/// Fields with their values: of an option for a header that it overwrites what is there or adds, of a response that the route is
/// chosen anew, of a chunk that it is the last.
const OVERWRITE: [u8; 2] = [3 << 3, 2];
const CLEAR_ROUTE_CACHE: [u8; 2] = [5 << 3, 1];
const END_OF_STREAM: [u8; 2] = [2 << 3, 1];
/// What goes before the number of a `Value`.
const NUMBER: u8 = 2 << 3 | 1;

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
        let mut mutation = mutation.to_vec();
        for (name, value) in sets {
            let header = field(1, &[&field(1, &[name.as_bytes()]), &field(3, &[value.as_bytes()])]);
            mutation.extend(field(1, &[&header, &OVERWRITE]));
        }
        removes.iter().for_each(|name| mutation.extend(field(2, &[name.as_bytes()])));
        let response = field(1, &[&field(2, &[&mutation]), &CLEAR_ROUTE_CACHE]);
        let (mut spaces, mut values) = (Vec::new(), Vec::new());
        for (name, fields) in metadata {
            values.clear();
            for (name, value) in fields {
                values.extend(entry(name.cast::<PyString>()?.to_str()?, &value_of(&value)?));
            }
            spaces.extend(entry(&name, &field(5, &[&values])));
        }
        let metadata = if spaces.is_empty() { Vec::new() } else { field(8, &[&spaces]) };
        Ok([field(1, &[&response]), metadata].concat())
    }

    /// See `chunk`.
    pub fn chunk_of(body: &[u8], ends: bool) -> Vec<u8> {
        let last: &[u8] = if ends { &END_OF_STREAM } else { &[] };
        let mut before = head(1, body.len());
        // The streamed response, the mutation that it is of, its response, and what answers a body.
        for number in [3, 3, 1, 3] {
            before = [head(number, before.len() + body.len() + last.len()), before].concat();
        }
        [&before, body, last].concat()
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

/// A `Value`: a text, or a number.
fn value_of(value: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    Ok(match value.cast::<PyString>() {
        Ok(text) => field(3, &[text.to_str()?.as_bytes()]),
        Err(_) => [&[NUMBER][..], &value.extract::<f64>()?.to_le_bytes()].concat(),
    })
}

fn latin1(bytes: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(bytes) {
        Ok(text) if text.is_ascii() => Cow::Borrowed(text),
        _ => Cow::Owned(bytes.iter().map(|&byte| char::from(byte)).collect()),
    }
}
