//! What exchanges have come to, told to Python: one call for each. None is made while the connection is borrowed.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::connection::Core;
use super::frames::Fault;
use super::peer::{Calls, Connection};
use super::stream::Stream;
use super::whole::{Event, Exchanges};

/// What is to be done about an exchange.
enum Then {
    Tell(Event, Option<Py<PyAny>>),
    /// It is not complete.
    Keep(usize),
    Nothing,
}

/// What an exchange has come to, which is then no longer looked at here.
fn then(py: Python<'_>, stream: &Py<Stream>) -> Then {
    let mut it = stream.borrow_mut(py);
    let ended = it.ended;
    let Some(exchange) = it.exchange.as_mut() else { return Then::Nothing };
    match exchange.event.take() {
        None if exchange.fields.is_some() && !ended => Then::Keep(exchange.body.len()),
        None | Some(Event::Unusual) => Then::Tell(Event::Unusual, None),
        Some(event) => {
            it.exchange = None;
            Then::Tell(event, it.receiver.take())
        }
    }
}

/// Tells of the exchanges that the last bytes belong to.
pub fn deliver(me: &Bound<'_, Connection>) -> PyResult<()> {
    let py = me.py();
    let touched = std::mem::take(&mut me.borrow_mut().core.touched);
    for stream in touched {
        let known = me.borrow().exchanges.as_ref().map(|(of, taker)| (of.clone_ref(py), taker.clone_ref(py)));
        let Some((of, taker)) = known else { break };
        match then(py, &stream) {
            Then::Nothing => {}
            Then::Keep(bytes) => keep(me, &stream, taker.bind(py), bytes)?,
            Then::Tell(Event::Unusual, _) => hand_over(me, &stream)?,
            Then::Tell(Event::Request(fields, body), begun) => {
                let asked = taker.call_method1(py, intern!(py, "request"), (&stream, fields, body, begun))?;
                stream.borrow_mut(py).receiver = (!asked.is_none(py)).then_some(asked);
            }
            Then::Tell(Event::Response(fields, noted, served), _) => {
                let message = match noted {
                    Some(noted) if of.get().takes(noted.bind(py), fields.bind(py), served.as_deref()) => py.None(),
                    Some(noted) => taker.call_method1(py, intern!(py, "response"), (noted, fields, served))?,
                    None => py.None(),
                };
                let message = message.bind(py).cast::<PyBytes>().ok();
                let said = message.map(|it| it.as_bytes());
                of.get().answered(py, &mut me.borrow_mut().core, &stream, said);
                me.tell()?;
            }
        }
    }
    Ok(())
}

/// The request goes on in a later read, if whoever takes requests has room for so much of it.
fn keep(me: &Bound<'_, Connection>, stream: &Py<Stream>, taker: &Bound<'_, PyAny>, bytes: usize) -> PyResult<()> {
    let py = me.py();
    let begun = stream.borrow(py).receiver.as_ref().map(|it| it.clone_ref(py));
    let goes_on = match begun {
        Some(begun) => begun.call_method1(py, intern!(py, "grew"), (bytes,))?.is_truthy(py)?,
        None => {
            let fields = stream.borrow(py).exchange.as_ref().and_then(|it| it.fields.as_ref().map(|it| it.clone_ref(py)));
            let begun = taker.call_method1(intern!(py, "begun"), (fields, bytes))?;
            let takes = !begun.is_none();
            stream.borrow_mut(py).receiver = takes.then(|| begun.unbind());
            takes
        }
    };
    if goes_on { Ok(()) } else { hand_over(me, stream) }
}

/// A call of Python's goes on with the stream, with all that has come.
pub fn hand_over(me: &Bound<'_, Connection>, stream: &Py<Stream>) -> PyResult<()> {
    let py = me.py();
    let (exchange, begun) = {
        let mut it = stream.borrow_mut(py);
        (it.exchange.take(), it.receiver.take())
    };
    if let Some(begun) = begun {
        begun.call_method0(py, intern!(py, "close"))?;
    }
    let accept = me.borrow().accept.as_ref().map(|accept| accept.clone_ref(py));
    let receiver = accept.map(|accept| accept.call1(py, (stream,))).transpose()?.filter(|it| !it.is_none(py));
    let Some(receiver) = receiver else {
        let id = stream.borrow(py).id;
        let outcome = me.borrow_mut().core.refused(py, id);
        if let Err(Fault::Connection(code, message)) = outcome {
            me.borrow_mut().core.fail(py, code, &message);
        }
        return me.tell();
    };
    stream.borrow_mut(py).receiver = Some(receiver.clone_ref(py));
    let raw = exchange.map(|it| it.raw).unwrap_or_default();
    if !raw.is_empty() {
        receiver.call_method1(py, intern!(py, "data"), (PyBytes::new(py, &raw),))?;
    }
    if stream.borrow(py).ended && stream.borrow(py).open {
        receiver.call_method0(py, intern!(py, "end"))?;
    }
    Ok(())
}

/// Takes in bytes of an exchange; whether it is usual so far. None: the stream is none.
pub fn feed(
    py: Python<'_>,
    core: &mut Core,
    of: Option<&Py<Exchanges>>,
    stream: &Py<Stream>,
    data: &[u8],
) -> PyResult<Option<bool>> {
    let mut it = stream.borrow_mut(py);
    let Some((exchange, of)) = it.exchange.as_mut().zip(of) else { return Ok(None) };
    let usual = exchange.feed(py, of.get(), data)?;
    if !core.touched.last().is_some_and(|last| last.is(stream)) {
        core.touched.push(stream.clone_ref(py));
    }
    Ok(Some(usual))
}
