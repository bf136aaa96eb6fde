//! Bookings: `penstock.gateway.picker.bookings` in compiled form, with the prompts that they compute.

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::accounts::{Account, Booking, PENDING, Place, RELEASED, RUNNING, UNREPORTED};
use crate::coming::Prompts;
use crate::folded::Folded;
use crate::residency::Hash;

/// A replica's key, and the fields of its `Place`.
type Placed<'py> = (Bound<'py, PyAny>, Py<Folded>, usize, Py<PyAny>, String, bool);

/// All bookings of a gateway process. Whoever is told of an end or a move is told when nothing here is borrowed.
#[pyclass]
pub struct Bookings {
    /// Numbers of accounts by replica.
    slots: Py<PyDict>,
    pub accounts: Vec<Option<Account>>,
    free: Vec<usize>,
    pub coming: Prompts,
    /// Seconds after which a booking ends by itself.
    expiry_s: f64,
    made: u64,
    /// Python's names of the states.
    states: Py<PyAny>,
    /// Makes what is outstanding at a replica.
    outstanding: Py<PyAny>,
    #[pyo3(get)]
    released: Py<PyDict>,
    #[pyo3(get)]
    ended: Py<PyList>,
    #[pyo3(get)]
    moved: Py<PyList>,
}

impl Bookings {
    fn slot(&self, key: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
        self.slots.bind(key.py()).get_item(key)?.map(|slot| slot.extract()).transpose()
    }

    fn account(&mut self, slot: usize) -> PyResult<&mut Account> {
        let account = self.accounts.get_mut(slot).and_then(Option::as_mut);
        account.ok_or_else(|| PyValueError::new_err("a booking of other bookings"))
    }

    fn known(&self, key: &Bound<'_, PyAny>) -> PyResult<Option<&Account>> {
        Ok(self.slot(key)?.and_then(|slot| self.accounts[slot].as_ref()))
    }

    fn slot_or_new(&mut self, key: &Bound<'_, PyAny>) -> PyResult<usize> {
        if let Some(slot) = self.slot(key)? {
            return Ok(slot);
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.accounts.push(None);
            self.accounts.len() - 1
        });
        self.accounts[slot] = Some(Account::new(key));
        self.slots.bind(key.py()).set_item(key, slot)?;
        Ok(slot)
    }

    /// Forgets the account of a replica that is of no model and has no bookings.
    fn tidy(&mut self, py: Python<'_>, slot: usize) -> PyResult<()> {
        if self.accounts[slot].as_ref().is_some_and(|it| it.place.is_none() && it.bookings.is_empty()) {
            if let Some(account) = self.accounts[slot].take() {
                self.slots.bind(py).del_item(account.key)?;
                self.free.push(slot);
            }
        }
        Ok(())
    }

    fn close(&mut self, py: Python<'_>, booking: &Py<Booking>) -> PyResult<()> {
        let it = booking.borrow(py);
        self.account(it.slot)?.close(py, booking, &it)
    }

    /// Ends a booking; whether it had not ended already.
    fn end(&mut self, py: Python<'_>, booking: &Py<Booking>, by: &Bound<'_, PyAny>) -> PyResult<bool> {
        if booking.borrow(py).state == RELEASED {
            return Ok(false);
        }
        self.close(py, booking)?;
        let mut it = booking.borrow_mut(py);
        if it.state == RUNNING {
            self.account(it.slot)?.left(py)?;
        }
        it.state = RELEASED;
        self.coming.forget(it.number);
        let released = self.released.bind(py);
        let before: u64 = released.get_item(by)?.map_or(Ok(0), |count| count.extract())?;
        released.set_item(by, before + 1)?;
        self.tidy(py, it.slot)?;
        Ok(true)
    }

    /// The prompt tokens that each row of `folded` will have, of those that compute them now.
    pub fn supplied(&self, folded: &Bound<'_, Folded>, hashes: &[Hash], mut found: impl FnMut(usize, usize)) {
        self.coming.look(hashes, |slot, blocks| {
            let place = self.accounts.get(slot).and_then(Option::as_ref).and_then(|account| account.place.as_ref());
            if let Some(Place { row, .. }) = place.filter(|it| it.folded.is(folded)) {
                found(*row, blocks);
            }
        });
    }

    /// Where the replica of a booking is.
    pub fn place_of(&self, py: Python<'_>, booking: &Booking) -> PyResult<Option<&Place>> {
        let Some(account) = self.accounts.get(booking.slot).and_then(Option::as_ref) else { return Ok(None) };
        // The slot of a booking that has ended may be another replica's by now.
        let its = booking.state != RELEASED || account.key.bind(py).eq(&booking.key)?;
        Ok(account.place.as_ref().filter(|_| its))
    }

    /// Whether the replica of a booking says by events what it caches.
    pub fn tells(&self, booking: &Booking) -> bool {
        let account = self.accounts.get(booking.slot).and_then(Option::as_ref);
        account.and_then(|account| account.place.as_ref()).is_some_and(|place| place.tells)
    }

    pub fn expects(&self) -> bool {
        self.coming.len() > 0
    }

    fn number(&self, py: Python<'_>, state: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.states.bind(py).call_method1(intern!(py, "index"), (state,))?.extract()
    }
}

fn tell(told: &Py<PyList>, booking: &Bound<'_, Booking>, by: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    for listener in told.bind(booking.py()).iter() {
        match by {
            Some(by) => listener.call1((booking, by))?,
            None => listener.call1((booking,))?,
        };
    }
    Ok(())
}

pub fn released(me: &Bound<'_, Bookings>, booking: &Bound<'_, Booking>, by: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = me.py();
    let ended = me.borrow_mut().end(py, booking.as_unbound(), by)?;
    if ended { tell(&me.borrow().ended.clone_ref(py), booking, Some(by)) } else { Ok(()) }
}

#[pymethods]
impl Bookings {
    /// See `penstock.gateway.picker.compiled.Compiled`.
    #[new]
    fn new(py: Python<'_>, states: Py<PyAny>, outstanding: Py<PyAny>, released: Py<PyDict>, expiry_s: f64) -> Self {
        Bookings {
            slots: PyDict::new(py).unbind(),
            accounts: Vec::new(),
            free: Vec::new(),
            coming: Prompts::default(),
            expiry_s,
            made: 0,
            states,
            outstanding,
            released,
            ended: PyList::empty(py).unbind(),
            moved: PyList::empty(py).unbind(),
        }
    }

    /// Where the figures of each replica are: all that are of a model.
    fn placed(&mut self, py: Python<'_>, places: Vec<Placed<'_>>) -> PyResult<()> {
        self.accounts.iter_mut().flatten().for_each(|account| account.place = None);
        for (key, folded, row, columns, address, tells) in places {
            let slot = self.slot_or_new(&key)?;
            self.account(slot)?.place = Some(Place { folded, row, columns, address, tells });
        }
        (0..self.accounts.len()).try_for_each(|slot| self.tidy(py, slot))
    }

    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (request_id, key, prefill_tokens, now, *, transfer_tokens = 0, answers = 1))]
    pub fn book(
        &mut self,
        py: Python<'_>,
        request_id: String,
        key: &Bound<'_, PyAny>,
        prefill_tokens: i64,
        now: f64,
        transfer_tokens: i64,
        answers: i64,
    ) -> PyResult<Py<Booking>> {
        let slot = self.slot_or_new(key)?;
        self.made += 1;
        let booking = Py::new(
            py,
            Booking {
                number: self.made,
                slot,
                state: PENDING,
                states: self.states.clone_ref(py),
                request_id,
                key: key.clone().unbind(),
                prefill_tokens,
                transfer_tokens,
                left: answers,
                made_at: now,
                awaited: None,
                responded_at: None,
            },
        )?;
        self.account(slot)?.open(py, &booking, &booking.borrow(py))?;
        Ok(booking)
    }

    fn outstanding<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let [requests, prefill, transfer] = self.known(key)?.map_or([0; 3], |account| account.outstanding);
        self.outstanding.bind(py).call1((requests, prefill, transfer))
    }

    #[pyo3(signature = (key, *states))]
    fn count(&self, py: Python<'_>, key: &Bound<'_, PyAny>, states: Vec<Bound<'_, PyAny>>) -> PyResult<i64> {
        let Some(account) = self.known(key)? else { return Ok(0) };
        if states.is_empty() {
            return Ok(account.counts.iter().sum());
        }
        states.iter().map(|state| Ok(account.counts[self.number(py, state)?])).sum()
    }

    fn total(&self, py: Python<'_>, state: &Bound<'_, PyAny>) -> PyResult<i64> {
        let state = self.number(py, state)?;
        Ok(self.accounts.iter().flatten().map(|account| account.counts[state]).sum())
    }

    #[pyo3(name = "move")]
    fn move_to(me: &Bound<'_, Self>, booking: &Bound<'_, Booking>, key: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = me.py();
        {
            let it = booking.borrow();
            if it.state == RELEASED || it.key.bind(py).eq(key)? {
                return Ok(());
            }
        }
        {
            let (mut of, own) = (me.borrow_mut(), booking.as_unbound());
            of.close(py, own)?;
            let slot = of.slot_or_new(key)?;
            let (before, number) = {
                let mut it = booking.borrow_mut();
                it.key = key.clone().unbind();
                (std::mem::replace(&mut it.slot, slot), it.number)
            };
            of.account(slot)?.open(py, own, &booking.borrow())?;
            of.coming.moved(number, slot);
            of.tidy(py, before)?;
        }
        tell(&me.borrow().moved.clone_ref(py), booking, None)
    }

    pub fn responded(
        &mut self,
        py: Python<'_>,
        booking: &Bound<'_, Booking>,
        report: Option<(i64, i64)>,
        now: f64,
    ) -> PyResult<()> {
        let slot = {
            let mut it = booking.borrow_mut();
            if it.state != PENDING {
                return Ok(());
            }
            (it.awaited, it.responded_at) = (report, Some(now));
            it.slot
        };
        self.account(slot)?.set(py, booking.as_unbound(), UNREPORTED)
    }

    pub fn reported(&mut self, py: Python<'_>, key: &Bound<'_, PyAny>, epoch: i64, seq: i64, asked_at: f64) -> PyResult<()> {
        let Some(slot) = self.slot(key)? else { return Ok(()) };
        let account = self.account(slot)?;
        let included = account.unreported.values().filter(|it| it.borrow(py).included((epoch, seq), asked_at));
        let included: Vec<_> = included.map(|it| it.clone_ref(py)).collect();
        included.iter().try_for_each(|booking| account.set(py, booking, RUNNING))
    }

    fn included(&mut self, py: Python<'_>, booking: &Bound<'_, Booking>) -> PyResult<()> {
        let (state, slot) = (booking.borrow().state, booking.borrow().slot);
        if state == PENDING { self.account(slot)?.set(py, booking.as_unbound(), RUNNING) } else { Ok(()) }
    }

    fn release(me: &Bound<'_, Self>, booking: &Bound<'_, Booking>, by: &Bound<'_, PyAny>) -> PyResult<()> {
        released(me, booking, by)
    }

    fn finished(me: &Bound<'_, Self>, key: &Bound<'_, PyAny>, request_id: &str) -> PyResult<bool> {
        let py = me.py();
        let oldest = |of: &Bookings| -> PyResult<Option<Py<Booking>>> {
            let same = of.known(key)?.and_then(|account| account.bookings.get(request_id));
            Ok(same.and_then(|same| same.first()).map(|booking| booking.clone_ref(py)))
        };
        let Some(booking) = oldest(&me.borrow())? else { return Ok(false) };
        if booking.borrow(py).left <= 1 {
            released(me, booking.bind(py), intern!(py, "finished").as_any())?;
            return Ok(true);
        }
        let slot = booking.borrow(py).slot;
        let mut of = me.borrow_mut();
        let account = of.account(slot)?;
        account.count(py, &booking, &booking.borrow(py), -1)?;
        booking.borrow_mut(py).left -= 1;
        account.count(py, &booking, &booking.borrow(py), 1)?;
        if booking.borrow(py).state == RUNNING {
            account.left(py)?;
        }
        Ok(true)
    }

    fn release_all(me: &Bound<'_, Self>, key: &Bound<'_, PyAny>, by: &Bound<'_, PyAny>) -> PyResult<()> {
        let all = me.borrow().known(key)?.map(|account| account.all(me.py())).unwrap_or_default();
        all.iter().try_for_each(|booking| released(me, booking.bind(me.py()), by))
    }

    /// Ends the bookings that nothing else has ended.
    fn expire(me: &Bound<'_, Self>, now: f64) -> PyResult<()> {
        let (py, expiry_s) = (me.py(), me.borrow().expiry_s);
        let all: Vec<_> = me.borrow().accounts.iter().flatten().flat_map(|account| account.all(py)).collect();
        for booking in all.iter().filter(|booking| now - booking.borrow(py).made_at >= expiry_s) {
            released(me, booking.bind(py), intern!(py, "expired").as_any())?;
        }
        Ok(())
    }
}
