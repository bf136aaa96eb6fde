//! What header blocks say (RFC 9113, section 8), and the last of them, remembered.

use hashlink::LruCache;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use super::frames::{Outcome, broken, code};
use super::hpack::{self, Decoder, Field, Unread};

const CACHED_BLOCKS: usize = 256;
const CACHED_BYTES: usize = 1024;
const PSEUDO: [&[u8]; 4] = [b":method", b":scheme", b":path", b":authority"];
const CONNECTION: [&[u8]; 5] = [b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"];
/// Digits of a length that is believed.
const MOST_DIGITS: usize = 15;

/// See `penstock.gateway.h2.blocks.Head`.
#[pyclass(frozen)]
pub struct Head {
    pub(super) regular: Vec<(String, Py<PyString>)>,
    #[pyo3(get)]
    fields: Py<PyTuple>,
    #[pyo3(get)]
    pub(super) pseudo: Py<PyDict>,
    #[pyo3(get)]
    pub content_length: Option<i64>,
    /// It has pseudo-headers, as trailers have not.
    pub any_pseudo: bool,
    /// It lacks pseudo-headers that a request has.
    pub missing: bool,
    pub malformed: bool,
    /// Bytes, counted as RFC 9113 does.
    pub size: usize,
}

#[pymethods]
impl Head {
    /// The first value of a header.
    fn get(&self, py: Python<'_>, name: &str) -> Option<Py<PyString>> {
        self.regular.iter().find(|(its, _)| its == name).map(|(_, value)| value.clone_ref(py))
    }
}

impl Head {
    /// Checks a request's header list, or its trailers.
    fn new(py: Python<'_>, fields: &[Field]) -> PyResult<Self> {
        let pseudo = PyDict::new(py);
        let (mut regular, mut length, mut malformed) = (Vec::new(), None, false);
        for (name, value) in fields {
            let text = PyString::new(py, &latin1(value));
            if name.first() == Some(&b':') {
                let name = latin1(name);
                malformed |= !regular.is_empty() || !PSEUDO.contains(&name.as_bytes()) || pseudo.contains(&name)?;
                pseudo.set_item(name, text)?;
            } else {
                malformed |= !may_stand(name, value);
                if name.as_ref() == b"content-length" {
                    let said = number(value);
                    malformed |= said.is_none() || length.is_some_and(|length| Some(length) != said);
                    length = length.or(said);
                }
                regular.push((latin1(name), text.unbind()));
            }
            malformed |= !is_value(value);
        }
        let mut missing = false;
        for name in &PSEUDO[..3] {
            missing |= !pseudo.get_item(latin1(name))?.is_some_and(|value| value.is_truthy().unwrap_or(false));
        }
        let pairs = regular.iter().map(|(name, value)| (name.as_str(), value));
        let pairs = PyTuple::new(py, pairs.collect::<Vec<_>>())?.unbind();
        let size = fields.iter().map(hpack::size).sum();
        let any_pseudo = !pseudo.is_empty();
        Ok(Head { regular, fields: pairs, pseudo: pseudo.unbind(), content_length: length, any_pseudo, missing, malformed, size })
    }
}

/// The last distinct blocks that depend on no dynamic table. One for all connections.
#[pyclass]
pub struct BlockCache {
    heads: LruCache<Vec<u8>, Py<Head>>,
}

#[pymethods]
impl BlockCache {
    #[new]
    fn new() -> Self {
        BlockCache { heads: LruCache::new(CACHED_BLOCKS) }
    }
}

impl BlockCache {
    /// What `block` says.
    pub fn read(&mut self, py: Python<'_>, decoder: &mut Decoder, block: &[u8], most: usize) -> PyResult<Outcome<Py<Head>>> {
        let stateless = decoder.stateless();
        if stateless && let Some(known) = self.heads.get(block) {
            return Ok(Ok(known.clone_ref(py)));
        }
        let fields = match decoder.decode(block) {
            Ok(fields) => fields,
            Err(Unread::TooLong) => return Ok(broken(code::ENHANCE_YOUR_CALM, format!("headers of more than {most} bytes"))),
            Err(Unread::Malformed) => return Ok(broken(code::COMPRESSION_ERROR, "a header block that cannot be read")),
        };
        let head = Py::new(py, Head::new(py, &fields)?)?;
        if decoder.stateless() {
            decoder.forbid_table(); // the peer has obeyed our settings
            if stateless && block.len() <= CACHED_BYTES {
                self.heads.insert(block.to_vec(), head.clone_ref(py));
            }
        }
        Ok(Ok(head))
    }
}

/// Whether a request, or its trailers, may have this header.
fn may_stand(name: &[u8], value: &[u8]) -> bool {
    let token = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"!#$%&'*+-.^_`|~".contains(byte);
    !name.is_empty() && name.iter().all(token) && !CONNECTION.contains(&name) && (name != b"te" || value == b"trailers")
}

fn is_value(value: &[u8]) -> bool {
    let blank = |byte: Option<&u8>| byte.is_some_and(|byte| b" \t".contains(byte));
    !blank(value.first()) && !blank(value.last()) && !value.iter().any(|byte| b"\0\r\n".contains(byte))
}

fn number(value: &[u8]) -> Option<i64> {
    let fits = value.len() <= MOST_DIGITS && value.iter().all(u8::is_ascii_digit);
    if fits { std::str::from_utf8(value).ok()?.parse().ok() } else { None }
}

fn latin1(bytes: &[u8]) -> String {
    bytes.iter().map(|&byte| char::from(byte)).collect()
}
