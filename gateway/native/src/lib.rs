//! The compiled parts of Penstock's gateway. Python has the same in plain form, uses it where this is not installed, and tests
//! this against it.

mod arrays;
mod choice;
mod cuts;
mod hashing;
mod index;
mod messages;
mod price;
mod report;
mod residency;
mod text;
mod wire;
mod words;

use arrays::{Table, cells, values};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Folds the prices of `rows`, or of all, into the columns of `folded`, float64 [12, rows].
///
/// `figures` is float64 [30, rows]; the next four are those of `Rates`; `block_size` is in tokens, `now` in seconds.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
fn fold(
    py: Python<'_>,
    figures: PyBuffer<f64>,
    queue_s: f64,
    itl_s: f64,
    output_tokens: f64,
    crowding: f64,
    block_size: f64,
    now: f64,
    rows: Option<Vec<usize>>,
    folded: PyBuffer<f64>,
) -> PyResult<()> {
    let (table, into) = (Table::new(py, &figures, price::FIGURES.len())?, Table::new(py, &folded, price::NUMBERS)?);
    if folded.readonly() || into.rows != table.rows {
        return Err(PyValueError::new_err("folded is read-only, or has other rows than figures"));
    }
    let rates = price::Rates { queue_s, itl_s, output_tokens, crowding };
    for row in rows.unwrap_or_else(|| (0..table.rows).collect()) {
        if row >= table.rows {
            return Err(PyValueError::new_err(format!("there is no row {row}")));
        }
        for (number, value) in price::fold(|figure| table.at(figure, row), &rates, block_size, now).into_iter().enumerate() {
            into.set(number, row, value);
        }
    }
    Ok(())
}

/// Prices a request at all rows and ranks them; returns (the best rows in order, their scores, the score up to which they count as
/// equal, seconds to the first token that the reports of the first promise).
///
/// `folded` is float64 [12, rows], `figures` float64 [30, rows]; the other arrays have one element a row: `resident` prompt tokens,
/// `other_s` seconds for the adapter and the images, `may` and `last_resorts` bytes. `limit`: that of an earlier ranking.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
fn rank(
    py: Python<'_>,
    folded: PyBuffer<f64>,
    figures: PyBuffer<f64>,
    resident: PyBuffer<f64>,
    prompt_tokens: f64,
    tokens: f64,
    seeds: PyBuffer<u64>,
    word: u64,
    tolerance: f64,
    most: usize,
    other_s: Option<PyBuffer<f64>>,
    may: Option<PyBuffer<u8>>,
    last_resorts: Option<PyBuffer<u8>>,
    limit: Option<f64>,
) -> PyResult<(Vec<usize>, Vec<f64>, f64, f64)> {
    let (numbers, known) = (Table::new(py, &folded, price::NUMBERS)?, Table::new(py, &figures, price::FIGURES.len())?);
    let (resident, seeds) = (cells(py, &resident)?, cells(py, &seeds)?);
    let (waits, may) = (values(py, other_s.as_ref())?, values(py, may.as_ref())?);
    let last = values(py, last_resorts.as_ref())?;
    let rows = numbers.rows;
    let given = [waits.as_ref().map(Vec::len), may.as_ref().map(Vec::len), last.as_ref().map(Vec::len)];
    if [known.rows, resident.len(), seeds.len()].into_iter().chain(given.into_iter().flatten()).any(|length| length != rows) {
        return Err(PyValueError::new_err(format!("an array has not {rows} rows")));
    }
    let wait = |row: usize| waits.as_ref().map_or(0.0, |seconds| seconds[row]);
    let score = |row: usize| {
        if may.as_ref().is_some_and(|may| may[row] == 0) {
            return f64::INFINITY;
        }
        let other_s = wait(row) * known.at(price::CORRECTION, row);
        price::cost(|number| numbers.at(number, row), prompt_tokens - resident[row].get(), tokens, other_s)
    };
    let place = |row: usize| choice::Row {
        score: score(row),
        booked_requests: known.at(price::BOOKED_REQUESTS, row),
        resident: resident[row].get(),
        last_resort: last.as_ref().is_some_and(|last| last[row] != 0),
        seed: seeds[row].get(),
    };
    let of = choice::Rows { rows: (0..rows).map(place).collect(), prompt_tokens, word };
    let limit = limit.unwrap_or_else(|| of.limit(tolerance));
    let order = of.ranking(limit, most);
    let promised_s = order.first().map_or(0.0, |&row| {
        let first = price::first_s(|number| numbers.at(number, row), prompt_tokens - resident[row].get());
        first / known.at(price::CORRECTION, row) + wait(row)
    });
    let of_order = order.iter().map(|&row| of.rows[row].score).collect();
    Ok((order, of_order, limit, promised_s))
}

/// The chained hashes of the full blocks of `tokens`, uint32; see `hashing::chain`. Other threads run meanwhile.
#[pyfunction]
fn chain<'py>(
    py: Python<'py>,
    parent: &[u8],
    tokens: PyBuffer<u32>,
    block_size: usize,
    every: &[u8],
    first: &[u8],
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    if block_size == 0 {
        return Err(PyValueError::new_err("a block has no tokens"));
    }
    let tokens: Vec<u32> = cells(py, &tokens)?.iter().map(|cell| cell.get()).collect();
    let names = py.detach(|| hashing::chain(parent, &tokens, block_size, every, first));
    Ok(names.iter().map(|name| PyBytes::new(py, name)).collect())
}

#[pymodule]
fn penstock_gateway_native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // Number of the interface in `penstock.gateway.picker.compiled`.
    module.add("INTERFACE", 6)?;
    module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
    module.add("FIGURES", price::FIGURES)?;
    module.add_class::<index::ResidencyIndex>()?;
    module.add_class::<report::ReportReader>()?;
    module.add_class::<text::TextHasher>()?;
    module.add_class::<wire::Wire>()?;
    module.add_function(wrap_pyfunction!(chain, module)?)?;
    module.add_function(wrap_pyfunction!(fold, module)?)?;
    module.add_function(wrap_pyfunction!(rank, module)?)
}
