//! Usual requests, from head and body to the booking in one call: what `penstock.gateway.extproc.at_once` says is usual.

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyFrozenSet, PyInt, PyString, PyTuple};

use crate::arrays::values;
use crate::coming::Coming;
use crate::folded::Folded;
use crate::guess::text_bytes;
use crate::hashes::BlockHashes;
use crate::index::ResidencyIndex;
use crate::pick::{Wanted, picked};
use crate::text::TextHasher;

/// Digits of a content length that is no reason to refuse a request.
const MOST_DIGITS: usize = 7;

/// See `penstock.gateway.extproc.at_once.Rules`.
#[derive(FromPyObject)]
struct Rules {
    wanted_headers: Vec<(Py<PyString>, String)>,
    uncommon_headers: Vec<Py<PyString>>,
    length: Py<PyString>,
    request_id: Py<PyString>,
    uncommon: Py<PyFrozenSet>,
    ones: Vec<Py<PyString>>,
    limits: Vec<Py<PyString>>,
    model: Py<PyString>,
    messages: Py<PyString>,
    files: Vec<u8>,
    bytes_per_token: usize,
    most_bytes: usize,
    inline_bytes: usize,
    horizon: i64,
    tolerance: f64,
    ranked: usize,
}

/// What hashes chats; see `penstock.gateway.load.compiled_hasher.UsualChats`.
#[derive(FromPyObject)]
struct Chats {
    texts: Py<TextHasher>,
    skeleton: Py<PyAny>,
    longest: usize,
    encode: Py<PyAny>,
    encode_some: (Py<PyAny>, usize),
    every: Vec<u8>,
    first: Vec<u8>,
}

/// What is the same for all usual requests of one name, as long as its model's replicas are; see
/// `penstock.gateway.picker.compiled.Compiled.Route`.
#[pyclass(frozen)]
pub struct Route {
    of: Py<PyAny>,
    chats: Chats,
    block_size: usize,
    rates: Py<PyAny>,
    prices: Py<Folded>,
    index: Py<ResidencyIndex>,
    coming: Py<Coming>,
    among: Option<Vec<u8>>,
}

#[pymethods]
impl Route {
    #[new]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        of: Py<PyAny>,
        chats: Chats,
        block_size: usize,
        rates: Py<PyAny>,
        prices: Py<Folded>,
        index: Py<ResidencyIndex>,
        coming: Py<Coming>,
        among: Option<PyBuffer<u8>>,
    ) -> PyResult<Self> {
        let among = values(py, among.as_ref())?;
        Ok(Route { of, chats, block_size, rates, prices, index, coming, among })
    }
}

/// What a body asks for.
struct Asks<'py> {
    model: Bound<'py, PyString>,
    messages: Bound<'py, PyAny>,
    max_tokens: Option<i64>,
}

/// Decides usual requests; see `penstock.gateway.picker.compiled.Compiled.Requests`.
#[pyclass(frozen)]
pub struct Requests {
    rules: Rules,
    read: Py<PyAny>,
    route: Py<PyAny>,
    word: Py<PyAny>,
    clock: Py<PyAny>,
    refusals: Py<PyTuple>,
}

#[pymethods]
impl Requests {
    #[new]
    fn new(rules: Rules, read: Py<PyAny>, route: Py<PyAny>, word: Py<PyAny>, clock: Py<PyAny>, refusals: Py<PyTuple>) -> Self {
        Requests { rules, read, route, word, clock, refusals }
    }

    /// `route` is a method of who keeps this: the collector must see the circle.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.route)
    }

    /// The way and the pick of a request, and what there is to note of both. None: it is not usual, and nothing has changed.
    fn decide<'py>(&self, fields: &Bound<'py, PyDict>, body: &Bound<'py, PyBytes>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let (py, rules, size) = (fields.py(), &self.rules, body.as_bytes().len());
        let came: f64 = self.clock.call0(py)?.extract(py)?;
        let Some(request_id) = self.request_id(fields)?.filter(|_| size <= rules.most_bytes) else { return Ok(None) };
        let Some(asks) = self.asks(body)? else { return Ok(None) };
        let found = self.route.bind(py).call1((&asks.model, came))?;
        let Ok(found) = found.cast_into::<Route>() else { return Ok(None) };
        let route = found.get();
        let Some((tokens, hashes)) = self.hashed(route, &asks, size)? else { return Ok(None) };
        let now: f64 = self.clock.call0(py)?.extract(py)?;
        let rates = route.rates.bind(py).call1((now,))?;
        let hashes = Bound::new(py, hashes)?.into_any();
        let wanted = Wanted {
            hashes: &hashes,
            block_size: route.block_size,
            among: route.among.as_deref(),
            now,
            prompt_tokens: tokens,
            tokens: asks.max_tokens.map_or(rules.horizon, |most| most.min(rules.horizon)) as f64,
            word: self.word.bind(py).call1((&request_id,))?.extract()?,
            tolerance: rules.tolerance,
            most: rules.ranked,
            books: Some((request_id.to_str()?.to_owned(), 1)),
        };
        let picked = picked(route.prices.bind(py), &route.index.borrow(py), route.coming.bind(py), &rates, wanted)?;
        if picked.booking.is_none() {
            return Ok(None); // nobody may take it
        }
        let guess = text_bytes(body.as_bytes(), &rules.files) / rules.bytes_per_token + 1;
        let times = (came, now);
        Ok(Some((&route.of, picked, rates, (tokens, hashes), request_id, asks.max_tokens, guess, times).into_pyobject(py)?))
    }
}

impl Requests {
    /// The request's id, if its head is usual.
    fn request_id<'py>(&self, fields: &Bound<'py, PyDict>) -> PyResult<Option<Bound<'py, PyString>>> {
        let text = |name: &Py<PyString>| -> PyResult<Option<Bound<'py, PyString>>> {
            Ok(fields.get_item(name)?.and_then(|it| it.cast_into::<PyString>().ok()))
        };
        for (name, wanted) in &self.rules.wanted_headers {
            if !text(name)?.is_some_and(|it| it == wanted.as_str()) {
                return Ok(None);
            }
        }
        for name in &self.rules.uncommon_headers {
            if fields.contains(name)? {
                return Ok(None);
            }
        }
        if text(&self.rules.length)?.is_some_and(|it| it.to_str().map_or(true, |it| it.len() > MOST_DIGITS)) {
            return Ok(None);
        }
        Ok(text(&self.rules.request_id)?.filter(|it| it.to_str().is_ok_and(|it| !it.is_empty())))
    }

    /// What a usual body asks for; None for all others, right or wrong.
    fn asks<'py>(&self, body: &Bound<'py, PyBytes>) -> PyResult<Option<Asks<'py>>> {
        let (py, rules) = (body.py(), &self.rules);
        let fields = match self.read.bind(py).call1((body,)) {
            Err(error) if error.is_instance_of::<PyValueError>(py) => return Ok(None),
            read => read?,
        };
        let Ok(fields) = fields.cast_into_exact::<PyDict>() else { return Ok(None) };
        let uncommon = rules.uncommon.bind(py);
        for name in fields.keys() {
            if uncommon.contains(name)? {
                return Ok(None);
            }
        }
        let number = |value: Bound<'py, PyAny>| value.cast_into_exact::<PyInt>().ok()?.extract::<i64>().ok();
        for name in &rules.ones {
            if fields.get_item(name)?.is_some_and(|value| number(value) != Some(1)) {
                return Ok(None);
            }
        }
        let mut max_tokens = None;
        for name in &rules.limits {
            if let Some(limit) = fields.get_item(name)?.filter(|limit| !limit.is_none()) {
                let Some(limit) = number(limit).filter(|&limit| limit >= 0) else { return Ok(None) };
                max_tokens = Some(limit);
                break;
            }
        }
        let model = fields.get_item(&rules.model)?.and_then(|it| it.cast_into_exact::<PyString>().ok());
        let (Some(model), Some(messages)) = (model, fields.get_item(&rules.messages)?) else { return Ok(None) };
        Ok(Some(Asks { model, messages, max_tokens }))
    }

    /// The tokens and the blocks of a chat; None where that takes long, or Python's words for what is wrong with it.
    fn hashed(&self, route: &Route, asks: &Asks<'_>, size: usize) -> PyResult<Option<(usize, BlockHashes)>> {
        let (py, of) = (asks.messages.py(), &route.chats);
        let (encode, most) = match &of.encode_some {
            (encode, most) if size > self.rules.inline_bytes => (encode, Some(*most)),
            _ => (&of.encode, None),
        };
        let (texts, skeleton, encode) = (of.texts.get(), of.skeleton.bind(py), encode.bind(py));
        match texts.chat(py, &asks.messages, skeleton, of.longest, encode, most, &of.every, &of.first) {
            Err(refusal) if refusal.matches(py, &self.refusals)? => Ok(None),
            hashed => hashed,
        }
    }
}
