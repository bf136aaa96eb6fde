//! The connection as Python has it: who calls receivers. None is called while the connection is borrowed, since it calls back.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use super::connection::{Core, Next, Told};
use super::events::{deliver, feed, hand_over};
use super::frames::Fault;
use super::head::BlockCache;
use super::limits::Limits;
use super::stream::Stream;
use super::whole::Exchanges;
use crate::wire::Wire;

/// Room for what is to be written that a connection keeps: one large answer must not hold its size for as long as its peer stays.
const KEPT_BYTES: usize = 64 * 1024;

/// See `penstock.gateway.h2.connection.Connection`.
#[pyclass]
pub struct Connection {
    pub(super) core: Core,
    /// None once the connection has ended: it may be what holds the connection.
    pub(super) accept: Option<Py<PyAny>>,
    /// Which exchanges are taken in here, and who hears of them; None where none are, and once the connection has ended.
    pub(super) exchanges: Option<(Py<Exchanges>, Py<PyAny>)>,
    /// The beginning of a frame whose rest has not come.
    buffer: Vec<u8>,
}

#[pymethods]
impl Connection {
    #[new]
    #[pyo3(signature = (accept, cache, now, limits, exchanges=None, taker=None))]
    fn new(
        accept: Py<PyAny>,
        cache: Py<BlockCache>,
        now: f64,
        limits: Limits,
        exchanges: Option<Py<Exchanges>>,
        taker: Option<Py<PyAny>>,
    ) -> Self {
        let exchanges = exchanges.zip(taker);
        Connection { core: Core::new(cache, limits, now), accept: Some(accept), exchanges, buffer: Vec::new() }
    }

    /// Streams that we have not ended yet.
    #[getter]
    fn streams<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let streams = PyDict::new(py);
        for (id, stream) in &self.core.streams {
            streams.set_item(id, stream)?;
        }
        Ok(streams)
    }

    #[getter]
    fn closed(&self) -> bool {
        self.core.closed
    }

    #[getter]
    fn fault(&self) -> &str {
        &self.core.fault
    }

    #[getter]
    fn paused(&self) -> bool {
        self.core.egress.paused
    }

    #[getter]
    fn unsent(&self) -> usize {
        self.core.egress.unsent
    }

    #[getter]
    fn max_frame(&self) -> usize {
        self.core.egress.max_frame
    }

    #[getter]
    fn receive_window(&self) -> i64 {
        self.core.receive_window
    }

    /// Takes in what the peer has sent.
    fn receive(slf: &Bound<'_, Self>, data: &[u8], now: f64) -> PyResult<()> {
        let held = {
            let mut me = slf.borrow_mut();
            if me.core.closed {
                return Ok(());
            }
            me.core.heard(now);
            if !me.buffer.is_empty() {
                me.buffer.extend_from_slice(data);
            }
            std::mem::take(&mut me.buffer)
        };
        let bytes = if held.is_empty() { data } else { &held };
        let mut at = 0;
        while slf.take_in(bytes, &mut at)? {}
        slf.borrow_mut().buffer = bytes[at..].to_vec();
        deliver(slf)
    }

    /// Answers a request that was told of as a whole with its destination, and ends its stream; see `Wire::picked`.
    #[allow(clippy::too_many_arguments)]
    fn routed(
        slf: &Bound<'_, Self>,
        stream: Py<Stream>,
        mutation: &[u8],
        sets: Vec<(PyBackedStr, PyBackedStr)>,
        removes: Vec<PyBackedStr>,
        metadata: Vec<(PyBackedStr, Bound<'_, PyDict>)>,
        body: &[u8],
    ) -> PyResult<()> {
        slf.sent_on(&stream, |_| Wire::picked_of(mutation, sets, removes, metadata), body)
    }

    /// As `routed`, where the answer is as nearly all are; see `Wire::usual_of`.
    fn usual(
        slf: &Bound<'_, Self>,
        stream: Py<Stream>,
        endpoints: &str,
        pool: &str,
        notes: &Bound<'_, PyTuple>,
        body: &[u8],
    ) -> PyResult<()> {
        slf.sent_on(&stream, |of| Wire::usual_of(&of.usual, endpoints, pool, notes), body)
    }

    /// See `Core::consumed`.
    fn consumed(&mut self, stream: &Bound<'_, Stream>, size: i64) {
        self.core.consumed(&mut stream.borrow_mut(), size);
    }

    /// See `Core::message`.
    fn message(slf: &Bound<'_, Self>, stream: Py<Stream>, block: &[u8], message: &[u8]) -> PyResult<()> {
        slf.borrow_mut().core.message(slf.py(), &stream, block, message);
        slf.tell()
    }

    /// See `Core::send`.
    fn send(slf: &Bound<'_, Self>, stream: Py<Stream>, data: &[u8]) -> PyResult<()> {
        slf.borrow_mut().core.send(slf.py(), &stream, &[data]);
        slf.tell()
    }

    /// See `Core::finish`.
    fn end(slf: &Bound<'_, Self>, stream: Py<Stream>, block: &[u8]) -> PyResult<()> {
        slf.borrow_mut().core.finish(slf.py(), &stream, block);
        slf.tell()
    }

    /// See `Core::reset`.
    fn reset(slf: &Bound<'_, Self>, stream_id: u32, code: u32) -> PyResult<()> {
        slf.borrow_mut().core.reset(slf.py(), stream_id, code);
        slf.tell()
    }

    /// Somebody waits for what is to be written.
    #[getter]
    fn urgent(&self) -> bool {
        self.core.egress.urgent()
    }

    /// There is something to write, for which nobody waits.
    #[getter]
    fn patient(&self) -> bool {
        !self.core.egress.out.is_empty() && !self.core.egress.urgent()
    }

    /// What is to be written.
    fn take<'py>(&mut self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let data = PyBytes::new(py, &self.core.egress.out);
        self.core.egress.taken(KEPT_BYTES);
        data
    }

    /// What was taken is written; whether there is more now.
    fn flushed(slf: &Bound<'_, Self>) -> PyResult<bool> {
        slf.borrow_mut().core.flushed(slf.py());
        slf.tell()?;
        Ok(!slf.borrow().core.egress.out.is_empty())
    }

    /// The peer does not read.
    fn pause(&mut self) {
        self.core.egress.paused = true;
    }

    /// See `Core::resume`.
    fn resume(slf: &Bound<'_, Self>) -> PyResult<()> {
        slf.borrow_mut().core.resume(slf.py());
        slf.tell()
    }

    /// See `Core::tick`.
    fn tick(slf: &Bound<'_, Self>, now: f64) -> PyResult<()> {
        slf.borrow_mut().core.tick(slf.py(), now);
        slf.tell()
    }

    /// See `Core::leave`.
    fn leave(&mut self) {
        self.core.leave();
    }

    /// See `Core::fail`.
    fn fail(slf: &Bound<'_, Self>, code: u32, message: &str) -> PyResult<()> {
        slf.borrow_mut().core.fail(slf.py(), code, message);
        slf.tell()
    }
}

/// What calls Python.
pub trait Calls {
    /// Takes in the next frames of `bytes`; whether there may be more.
    fn take_in(&self, bytes: &[u8], at: &mut usize) -> PyResult<bool>;

    /// Tells receivers what they must hear.
    fn tell(&self) -> PyResult<()>;

    /// Whether the new stream is an exchange that is taken in here.
    fn begun(&self, stream: &Py<Stream>) -> PyResult<bool>;

    /// Answers a request with the message that `picked` makes, and sends its body on.
    fn sent_on(&self, stream: &Py<Stream>, picked: impl FnOnce(&Exchanges) -> PyResult<Vec<u8>>, body: &[u8]) -> PyResult<()>;
}

impl Calls for Bound<'_, Connection> {
    fn sent_on(&self, stream: &Py<Stream>, picked: impl FnOnce(&Exchanges) -> PyResult<Vec<u8>>, body: &[u8]) -> PyResult<()> {
        {
            let mut me = self.borrow_mut();
            let Connection { core, exchanges, .. } = &mut *me;
            if let Some((of, _)) = exchanges {
                let of = of.get();
                of.routed(self.py(), core, stream, &picked(of)?, body);
            }
        }
        self.tell()
    }

    fn take_in(&self, bytes: &[u8], at: &mut usize) -> PyResult<bool> {
        let py = self.py();
        let next = self.borrow_mut().core.frames(py, bytes, at)?;
        let outcome = match next {
            Ok(None) => return Ok(false),
            Ok(Some(Next::Tell)) => Ok(()),
            Ok(Some(Next::Data(stream, data, ends))) => {
                let taken = {
                    let mut me = self.borrow_mut();
                    let Connection { core, exchanges, .. } = &mut *me;
                    feed(py, core, exchanges.as_ref().map(|(of, _)| of), &stream, data)?
                };
                if taken == Some(false) {
                    hand_over(self, &stream)?;
                }
                let receiver = stream.borrow(py).receiver.as_ref().map(|receiver| receiver.clone_ref(py));
                if let Some(receiver) = receiver.filter(|_| taken.is_none()) {
                    receiver.call_method1(py, intern!(py, "data"), (PyBytes::new(py, data),))?;
                }
                if ends { self.borrow_mut().core.data_taken(py, &stream) } else { Ok(()) }
            }
            Ok(Some(Next::Open(stream, ends))) if !ends && self.begun(&stream)? => Ok(()),
            Ok(Some(Next::Open(stream, ends))) => {
                let accept = {
                    let me = self.borrow();
                    let room = me.core.has_room(stream.borrow(py).head.get());
                    me.accept.as_ref().filter(|_| room).map(|accept| accept.clone_ref(py))
                };
                let receiver = accept.map(|accept| accept.call1(py, (&stream,))).transpose()?;
                let receiver = receiver.filter(|receiver| !receiver.is_none(py));
                self.borrow_mut().core.opened(py, stream, receiver, ends)
            }
            Err(fault) => Err(fault),
        };
        if let Err(Fault::Connection(code, message)) = outcome {
            self.borrow_mut().core.fail(py, code, &message);
        }
        self.tell()?;
        Ok(true)
    }

    fn begun(&self, stream: &Py<Stream>) -> PyResult<bool> {
        let (py, mut me) = (self.py(), self.borrow_mut());
        let Connection { core, exchanges, .. } = &mut *me;
        let Some((of, _)) = exchanges else { return Ok(false) };
        let exchange = {
            let it = stream.borrow(py);
            let head = it.head.get();
            if !core.has_room(head) {
                return Ok(false);
            }
            of.get().begun(py, head)?
        };
        let Some(exchange) = exchange else { return Ok(false) };
        stream.borrow_mut(py).exchange = Some(Box::new(exchange));
        core.admitted(py, stream);
        core.touched.push(stream.clone_ref(py));
        Ok(true)
    }

    fn tell(&self) -> PyResult<()> {
        let py = self.py();
        loop {
            let (told, _over) = {
                let mut me = self.borrow_mut();
                let over = me.core.closed.then(|| (me.accept.take(), me.exchanges.take()));
                (std::mem::take(&mut me.core.told), over)
            };
            if told.is_empty() {
                return Ok(());
            }
            for it in told {
                match it {
                    Told::End(receiver) => receiver.call_method0(py, intern!(py, "end"))?,
                    Told::Reset(receiver, code) => receiver.call_method1(py, intern!(py, "reset"), (code,))?,
                    Told::Sent(receiver) => receiver.call_method0(py, intern!(py, "sent"))?,
                };
            }
        }
    }
}
