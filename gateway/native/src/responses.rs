//! Usual responses: `penstock.gateway.extproc.stages.respond.Respond.take_in`, where the replica that was picked has answered with
//! success, and what it reports is of the process that was heard before.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PySet, PyString};

use crate::accounts::Booking;
use crate::bookings::{Bookings, released};
use crate::report::{ReportReader, Said};

/// See `penstock.gateway.picker.compiled.Compiled.Responses`.
#[pyclass(frozen)]
pub struct Responses {
    bookings: Py<Bookings>,
    reader: Py<ReportReader>,
    heard: Py<PyDict>,
    troubled: Py<PyDict>,
    ours: Py<PyAny>,
    loads: (Py<PyString>, Py<PyString>),
}

/// The report of a response.
struct News<'py> {
    said: Bound<'py, Said>,
    /// What was heard of its replica.
    heard: Bound<'py, PyAny>,
    /// Whether nothing later was heard yet.
    newest: bool,
}

/// Where the figures of a replica are, as Python has them.
type Row<'py> = (Bound<'py, PyAny>, usize);

#[pymethods]
impl Responses {
    #[new]
    fn new(
        bookings: Py<Bookings>,
        reader: Py<ReportReader>,
        heard: Py<PyDict>,
        troubled: Py<PyDict>,
        ours: Py<PyAny>,
        loads: (Py<PyString>, Py<PyString>),
    ) -> Self {
        Responses { bookings, reader, heard, troubled, ours, loads }
    }

    /// Whether the response is streamed; None: it is not usual, and nothing has changed.
    pub fn take_in(
        &self,
        routed: &Bound<'_, PyAny>,
        fields: &Bound<'_, PyDict>,
        served: Option<&str>,
        now: f64,
    ) -> PyResult<Option<bool>> {
        let py = routed.py();
        let booking = &routed.getattr(intern!(py, "booking"))?.cast_into::<Booking>()?;
        let is = |name: &Bound<'_, PyString>, usual: fn(&str) -> Option<bool>| -> PyResult<Option<bool>> {
            Ok(fields.get_item(name)?.and_then(|it| usual(it.cast::<PyString>().ok()?.to_str().ok()?)))
        };
        let good = is(intern!(py, ":status"), |it| it.starts_with('2').then_some(true))?;
        let streamed = is(intern!(py, "content-type"), |it| match it.split(';').next() {
            Some("text/event-stream") => Some(true),
            Some("application/json") => Some(false),
            _ => None,
        })?;
        let (Some(_), Some(streamed), Some((columns, row))) = (good, streamed, self.seat(booking, served)?) else {
            return Ok(None);
        };
        let key = booking.borrow().key.clone_ref(py).into_bound(py);
        if !routed.getattr(intern!(py, "prefill_booking"))?.is_none() || !self.ours.bind(py).call1((&key,))?.is_truthy()? {
            return Ok(None);
        }
        let news = match fields.get_item(&self.loads.0)? {
            _ if fields.contains(&self.loads.1)? => return Ok(None),
            Some(text) => match self.news(&key, &text)? {
                None => return Ok(None),
                news => news,
            },
            None => None,
        };
        let number = news.as_ref().map(|it| (it.said.get().epoch(), it.said.get().seq()));
        let bookings = self.bookings.bind(py);
        if streamed {
            bookings.borrow_mut().responded(py, booking, number, now)?;
        } else {
            released(bookings, booking, intern!(py, "answered").as_any())?;
        }
        if let (Some(News { said, heard, newest }), Some((epoch, seq))) = (news, number) {
            if newest {
                heard.call_method1(intern!(py, "take"), (said, now))?;
            }
            bookings.borrow_mut().reported(py, &key, epoch, seq, now)?;
            if newest {
                columns.call_method1(intern!(py, "heard"), (row, heard))?;
            }
        }
        Ok(Some(streamed))
    }
}

impl Responses {
    /// The row of a booking's replica, if that has answered and nobody is troubled.
    fn seat<'py>(&self, booking: &Bound<'py, Booking>, served: Option<&str>) -> PyResult<Option<Row<'py>>> {
        let (py, bookings) = (booking.py(), self.bookings.borrow(booking.py()));
        let Some(served) = served.filter(|it| !it.is_empty() && self.troubled.bind(py).is_empty()) else { return Ok(None) };
        let place = bookings.place_of(py, &booking.borrow())?.filter(|it| it.address == served);
        Ok(place.map(|it| (it.columns.bind(py).clone(), it.row)))
    }

    /// What a report says; None where it is not usual.
    fn news<'py>(&self, key: &Bound<'py, PyAny>, text: &Bound<'py, PyAny>) -> PyResult<Option<News<'py>>> {
        let py = key.py();
        let Some(said) = ReportReader::read(self.reader.bind(py), text.cast::<PyString>()?.to_str()?) else { return Ok(None) };
        let Some(heard) = self.heard.bind(py).get_item(key)? else { return Ok(None) };
        let before = heard.getattr(intern!(py, "newest"))?;
        let (epoch, seq): (i64, i64) = match before.cast::<Said>() {
            Ok(before) => (before.get().epoch(), before.get().seq()),
            Err(_) => (before.getattr(intern!(py, "epoch"))?.extract()?, before.getattr(intern!(py, "seq"))?.extract()?),
        };
        let (its, number) = (said.epoch(), said.seq());
        Ok((its == epoch).then_some(News { said: Bound::new(py, said)?, heard, newest: number >= seq }))
    }
}

/// Heads of responses by the names of their requests; see `penstock.gateway.picker.compiled.Compiled.Heads`.
#[pyclass(frozen)]
pub struct Heads {
    responses: Py<Responses>,
    routed: Py<PyDict>,
    unwatched: Py<PySet>,
    name: Py<PyString>,
    clock: Py<PyAny>,
    told: Py<PyAny>,
}

#[pymethods]
impl Heads {
    #[new]
    fn new(
        responses: Py<Responses>,
        routed: Py<PyDict>,
        unwatched: Py<PySet>,
        name: Py<PyString>,
        clock: Py<PyAny>,
        told: Py<PyAny>,
    ) -> Self {
        Heads { responses, routed, unwatched, name, clock, told }
    }

    /// Whether the head was usual; if not, nothing has changed.
    pub fn take_in(&self, noted: &Bound<'_, PyDict>, fields: &Bound<'_, PyDict>, served: Option<&str>) -> PyResult<bool> {
        let py = noted.py();
        let Some(name) = noted.get_item(&self.name)? else { return Ok(false) };
        let Some(routed) = self.routed.bind(py).get_item(&name)? else { return Ok(false) };
        let now = self.clock.call0(py)?.extract(py)?;
        let Some(streamed) = self.responses.get().take_in(&routed, fields, served, now)? else { return Ok(false) };
        self.unwatched.bind(py).discard(name)?;
        self.told.call1(py, (routed, fields.get_item(intern!(py, ":status"))?, now, streamed))?;
        Ok(true)
    }
}
