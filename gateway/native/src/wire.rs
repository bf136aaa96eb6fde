//! Reads what a proxy says over ext_proc, and writes the answers to requests with a destination: see
//! `penstock.gateway.extproc.wire`, whose forms in Python are the statement.

use std::collections::BTreeMap;

use hashbrown::HashMap;
use prost::Message;
use prost_types::value::Kind;
use prost_types::{Struct, Value};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};

use crate::messages::{
    BodyMutation, CommonResponse, HeaderMap, HeaderMutation, HeaderValue, HeaderValueOption, Metadata, PartResponse,
    ProcessingRequest, ProcessingResponse, Request, StreamedBodyResponse, object,
};

/// `OVERWRITE_IF_EXISTS_OR_ADD`.
const OVERWRITE: i32 = 2;

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
        sets: Vec<(String, String)>,
        removes: Vec<String>,
        metadata: Vec<(String, Bound<'py, PyDict>)>,
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
        sets: Vec<(String, String)>,
        removes: Vec<String>,
        metadata: Vec<(String, Bound<'_, PyDict>)>,
    ) -> PyResult<Vec<u8>> {
        let set = |(key, value): (String, String)| HeaderValueOption {
            header: Some(HeaderValue { key, value: String::new(), raw_value: value.into_bytes() }),
            append_action: OVERWRITE,
        };
        let more = HeaderMutation { set_headers: sets.into_iter().map(set).collect(), remove_headers: removes };
        let header_mutation = [mutation, &more.encode_to_vec()].concat();
        let mut spaces = Vec::with_capacity(metadata.len());
        for (name, fields) in metadata {
            let fields =
                fields.iter().map(|(name, value)| Ok((name.extract()?, kind_of(&value)?))).collect::<PyResult<Vec<_>>>()?;
            spaces.push((name, Kind::StructValue(object(fields))));
        }
        let common = CommonResponse { header_mutation, body_mutation: None, clear_route_cache: true };
        let answer = ProcessingResponse {
            request_headers: Some(PartResponse { response: Some(common) }),
            request_body: None,
            dynamic_metadata: (!spaces.is_empty()).then(|| object(spaces)),
        };
        Ok(answer.encode_to_vec())
    }

    /// See `chunk`.
    pub fn chunk_of(body: &[u8], ends: bool) -> Vec<u8> {
        let streamed = StreamedBodyResponse { body: body.to_vec(), end_of_stream: ends };
        let mutation = BodyMutation { streamed_response: Some(streamed) };
        let common = CommonResponse { header_mutation: Vec::new(), body_mutation: Some(mutation), clear_route_cache: false };
        let answer = ProcessingResponse {
            request_headers: None,
            request_body: Some(PartResponse { response: Some(common) }),
            dynamic_metadata: None,
        };
        answer.encode_to_vec()
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
                let value = if header.raw_value.is_empty() { header.value.clone() } else { latin1(&header.raw_value) };
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

fn kind_of(value: &Bound<'_, PyAny>) -> PyResult<Kind> {
    Ok(match value.cast::<PyString>() {
        Ok(text) => Kind::StringValue(text.to_str()?.to_owned()),
        Err(_) => Kind::NumberValue(value.extract()?),
    })
}

fn latin1(bytes: &[u8]) -> String {
    bytes.iter().map(|&byte| char::from(byte)).collect()
}
