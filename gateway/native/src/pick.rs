//! Picks: prices folded, replicas ranked, and both at once after the look-up of a prompt. `penstock.gateway.picker.compiled` says
//! what the functions take.

use std::cell::Cell;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays::{Table, cells, values, writable};
use crate::index::ResidencyIndex;
use crate::{choice, price};

/// The best rows in order, their scores, the score up to which they count as equal, and the seconds to the first token that the
/// reports of the first promise.
type Order = (Vec<usize>, Vec<f64>, f64, f64);
/// Those of `price::Rates`.
type Rates = (f64, f64, f64, f64);

/// What a request asks of the rows.
struct Asked {
    prompt_tokens: f64,
    /// Output tokens whose inter-token time counts.
    tokens: f64,
    word: u64,
    tolerance: f64,
    most: usize,
    limit: Option<f64>,
}

/// What is known of the rows.
struct Known<'a> {
    folded: Table<'a>,
    figures: Table<'a>,
    resident: &'a [Cell<f64>],
    seeds: &'a [Cell<u64>],
    other_s: Option<Vec<f64>>,
    may: Option<Vec<u8>>,
    last_resorts: Option<Vec<u8>>,
}

impl Known<'_> {
    fn ranked(&self, asked: &Asked) -> PyResult<Order> {
        let (numbers, rows) = (&self.folded, self.folded.rows);
        let given =
            [self.other_s.as_ref().map(Vec::len), self.may.as_ref().map(Vec::len), self.last_resorts.as_ref().map(Vec::len)];
        let lengths = [self.figures.rows, self.resident.len(), self.seeds.len()];
        if lengths.into_iter().chain(given.into_iter().flatten()).any(|length| length != rows) {
            return Err(PyValueError::new_err(format!("an array has not {rows} rows")));
        }
        let correction = |row: usize| self.figures.at(price::CORRECTION, row);
        let wait = |row: usize| self.other_s.as_ref().map_or(0.0, |seconds| seconds[row]);
        let fresh = |row: usize| asked.prompt_tokens - self.resident[row].get();
        let score = |row: usize| {
            if self.may.as_ref().is_some_and(|may| may[row] == 0) {
                return f64::INFINITY;
            }
            price::cost(|number| numbers.at(number, row), fresh(row), asked.tokens, wait(row) * correction(row))
        };
        let place = |row: usize| choice::Row {
            score: score(row),
            booked_requests: self.figures.at(price::BOOKED_REQUESTS, row),
            resident: self.resident[row].get(),
            last_resort: self.last_resorts.as_ref().is_some_and(|last| last[row] != 0),
            seed: self.seeds[row].get(),
        };
        let of = choice::Rows { rows: (0..rows).map(place).collect(), prompt_tokens: asked.prompt_tokens, word: asked.word };
        let limit = asked.limit.unwrap_or_else(|| of.limit(asked.tolerance));
        let order = of.ranking(limit, asked.most);
        let promised_s = order
            .first()
            .map_or(0.0, |&row| price::first_s(|number| numbers.at(number, row), fresh(row)) / correction(row) + wait(row));
        let scores = order.iter().map(|&row| of.rows[row].score).collect();
        Ok((order, scores, limit, promised_s))
    }
}

/// Folds the prices of `rows`, or of all, into `into`.
fn folded(
    table: &Table<'_>,
    into: &Table<'_>,
    rates: Rates,
    block_size: f64,
    now: f64,
    rows: Option<Vec<usize>>,
) -> PyResult<()> {
    if into.rows != table.rows {
        return Err(PyValueError::new_err("folded has other rows than figures"));
    }
    let (queue_s, itl_s, output_tokens, crowding) = rates;
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

fn to_fold<'a>(py: Python<'a>, array: &'a PyBuffer<f64>) -> PyResult<Table<'a>> {
    writable(py, array)?;
    Table::new(py, array, price::NUMBERS)
}

#[pyfunction]
pub fn fold(
    py: Python<'_>,
    figures: PyBuffer<f64>,
    rates: Rates,
    block_size: f64,
    now: f64,
    rows: Option<Vec<usize>>,
    into: PyBuffer<f64>,
) -> PyResult<()> {
    let (table, into) = (Table::new(py, &figures, price::FIGURES.len())?, to_fold(py, &into)?);
    folded(&table, &into, rates, block_size, now, rows)
}

#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub fn rank(
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
) -> PyResult<Order> {
    let known = Known {
        folded: Table::new(py, &folded, price::NUMBERS)?,
        figures: Table::new(py, &figures, price::FIGURES.len())?,
        resident: cells(py, &resident)?,
        seeds: cells(py, &seeds)?,
        other_s: values(py, other_s.as_ref())?,
        may: values(py, may.as_ref())?,
        last_resorts: values(py, last_resorts.as_ref())?,
    };
    known.ranked(&Asked { prompt_tokens, tokens, word, tolerance, most, limit })
}

#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub fn pick(
    py: Python<'_>,
    index: PyRef<'_, ResidencyIndex>,
    hashes: &Bound<'_, PyAny>,
    most_blocks: usize,
    block_size: usize,
    rows_by_bit: PyBuffer<i64>,
    among: Option<PyBuffer<u8>>,
    coming: Vec<(usize, f64)>,
    resident: PyBuffer<f64>,
    figures: PyBuffer<f64>,
    prices: PyBuffer<f64>,
    rates: Rates,
    now: f64,
    changed: Option<Vec<usize>>,
    prompt_tokens: f64,
    tokens: f64,
    seeds: PyBuffer<u64>,
    word: u64,
    tolerance: f64,
    most: usize,
    may: Option<PyBuffer<u8>>,
) -> PyResult<Order> {
    let found = writable(py, &resident)?;
    index.add_to(hashes, most_blocks, block_size, cells(py, &rows_by_bit)?, found)?;
    if let Some(among) = values(py, among.as_ref())? {
        for (cell, _) in found.iter().zip(among).filter(|&(_, allowed)| allowed == 0) {
            cell.set(0.0);
        }
    }
    for (row, supplied) in coming {
        let Some(cell) = found.get(row) else { return Err(PyValueError::new_err(format!("there is no row {row}"))) };
        cell.set(cell.get().max(supplied));
    }
    let (figures, prices) = (Table::new(py, &figures, price::FIGURES.len())?, to_fold(py, &prices)?);
    folded(&figures, &prices, rates, block_size as f64, now, changed)?;
    let may = values(py, may.as_ref())?;
    let known =
        Known { folded: prices, figures, resident: found, seeds: cells(py, &seeds)?, other_s: None, may, last_resorts: None };
    known.ranked(&Asked { prompt_tokens, tokens, word, tolerance, most, limit: None })
}
