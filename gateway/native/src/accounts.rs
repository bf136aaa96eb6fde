//! What is booked at one replica: `penstock.gateway.picker.bookings` in compiled form, but for what all replicas share. What a booking
//! changes of a replica's figures is written where those lie.

use hashlink::LinkedHashMap;
use pyo3::prelude::*;

use crate::folded::Folded;

/// States, by their numbers.
pub const PENDING: usize = 0;
pub const UNREPORTED: usize = 1;
pub const RUNNING: usize = 2;
pub const RELEASED: usize = 3;
pub const STATES: usize = 4;

/// One request at one replica; see Python's class of the same name.
#[pyclass]
pub struct Booking {
    pub number: u64,
    pub slot: usize,
    pub state: usize,
    pub states: Py<PyAny>,
    #[pyo3(get)]
    pub request_id: String,
    #[pyo3(get)]
    pub key: Py<PyAny>,
    #[pyo3(get)]
    pub prefill_tokens: i64,
    #[pyo3(get)]
    pub transfer_tokens: i64,
    #[pyo3(get)]
    pub left: i64,
    #[pyo3(get)]
    pub made_at: f64,
    #[pyo3(get)]
    pub awaited: Option<(i64, i64)>,
    #[pyo3(get)]
    pub responded_at: Option<f64>,
}

#[pymethods]
impl Booking {
    #[getter]
    fn state<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.states.bind(py).get_item(self.state)
    }

    #[getter]
    fn unanswered(&self) -> bool {
        self.responded_at.is_none() && self.state != RELEASED
    }
}

impl Booking {
    pub fn included(&self, report: (i64, i64), asked_at: f64) -> bool {
        match self.awaited {
            Some(awaited) => report >= awaited,
            None => self.responded_at.is_some_and(|at| asked_at > at),
        }
    }
}

/// Where a replica is.
pub struct Place {
    /// The figures of its model.
    pub folded: Py<Folded>,
    pub row: usize,
    /// The same, as Python has them.
    pub columns: Py<PyAny>,
    /// Empty where it is one of several there.
    pub address: String,
    /// Whether it says by events what it caches.
    pub tells: bool,
}

/// The bookings of one replica.
pub struct Account {
    pub key: Py<PyAny>,
    /// None: it is of no model.
    pub place: Option<Place>,
    pub bookings: LinkedHashMap<String, Vec<Py<Booking>>>,
    pub counts: [i64; STATES],
    pub unreported: LinkedHashMap<u64, Py<Booking>>,
    /// Answers, tokens to prefill and tokens to transfer of those that are pending or not reported.
    pub outstanding: [i64; 3],
}

impl Account {
    pub fn new(key: &Bound<'_, PyAny>) -> Self {
        let (bookings, unreported) = (LinkedHashMap::new(), LinkedHashMap::new());
        Account { key: key.clone().unbind(), place: None, bookings, counts: [0; STATES], unreported, outstanding: [0; 3] }
    }

    /// One more booking in its state, or one less.
    pub fn count(&mut self, py: Python<'_>, booking: &Py<Booking>, it: &Booking, sign: i64) -> PyResult<()> {
        self.mark(py, booking, it, sign);
        if it.state == RUNNING {
            return Ok(());
        }
        for (sum, of) in self.outstanding.iter_mut().zip([it.left, it.prefill_tokens, it.transfer_tokens]) {
            *sum += sign * of;
        }
        let [requests, prefill_tokens, transfer_tokens] = self.outstanding;
        match &self.place {
            Some(Place { folded, row, .. }) => folded.borrow_mut(py).booked(py, *row, requests, prefill_tokens, transfer_tokens),
            None => Ok(()),
        }
    }

    fn mark(&mut self, py: Python<'_>, booking: &Py<Booking>, it: &Booking, sign: i64) {
        self.counts[it.state] += sign;
        if it.state == UNREPORTED {
            if sign > 0 {
                self.unreported.insert(it.number, booking.clone_ref(py));
            } else {
                self.unreported.remove(&it.number);
            }
        }
    }

    pub fn open(&mut self, py: Python<'_>, booking: &Py<Booking>, it: &Booking) -> PyResult<()> {
        match self.bookings.get_mut(&it.request_id) {
            Some(same) => same.push(booking.clone_ref(py)),
            None => drop(self.bookings.insert(it.request_id.clone(), vec![booking.clone_ref(py)])),
        }
        self.count(py, booking, it, 1)
    }

    pub fn close(&mut self, py: Python<'_>, booking: &Py<Booking>, it: &Booking) -> PyResult<()> {
        self.count(py, booking, it, -1)?;
        if let Some(same) = self.bookings.get_mut(&it.request_id) {
            same.retain(|other| !other.is(booking));
            if same.is_empty() {
                self.bookings.remove(&it.request_id);
            }
        }
        Ok(())
    }

    /// From one state to another that is not the end.
    pub fn set(&mut self, py: Python<'_>, booking: &Py<Booking>, state: usize) -> PyResult<()> {
        let mut it = booking.borrow_mut(py);
        if state == RUNNING {
            self.count(py, booking, &it, -1)?;
            it.state = state;
            self.count(py, booking, &it, 1)
        } else {
            self.mark(py, booking, &it, -1);
            it.state = state;
            self.mark(py, booking, &it, 1);
            Ok(())
        }
    }

    pub fn left(&self, py: Python<'_>) -> PyResult<()> {
        self.place.as_ref().map_or(Ok(()), |it| it.folded.borrow_mut(py).left(py, it.row))
    }

    pub fn all(&self, py: Python<'_>) -> Vec<Py<Booking>> {
        self.bookings.values().flatten().map(|booking| booking.clone_ref(py)).collect()
    }
}
