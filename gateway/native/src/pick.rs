//! Picks: replicas ranked, and that after the look-up of a prompt and the folding of prices. `penstock.gateway.picker.compiled` says
//! what the functions take.

use std::cell::Cell;

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::accounts::Booking;
use crate::arrays::{Table, cells, values};
use crate::coming::Coming;
use crate::folded::Folded;
use crate::index::{ResidencyIndex, names};
use crate::{choice, price};

/// The best rows in order, their scores, the score up to which they count as equal, and the seconds to the first token that the
/// reports of the first promise.
type Order = (Vec<usize>, Vec<f64>, f64, f64);

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
    may: Option<&'a [u8]>,
    last_resorts: Option<&'a [u8]>,
}

impl Known<'_> {
    fn ranked(&self, asked: &Asked) -> PyResult<Order> {
        let (numbers, rows) = (&self.folded, self.folded.rows);
        let given = [self.other_s.as_ref().map(Vec::len), self.may.map(<[u8]>::len), self.last_resorts.map(<[u8]>::len)];
        self.folded.alike(&[self.figures.rows, self.resident.len(), self.seeds.len()])?;
        self.folded.alike(&given.into_iter().flatten().collect::<Vec<_>>())?;
        let correction = |row: usize| self.figures.at(price::CORRECTION, row);
        let wait = |row: usize| self.other_s.as_ref().map_or(0.0, |seconds| seconds[row]);
        let fresh = |row: usize| asked.prompt_tokens - self.resident[row].get();
        let score = |row: usize| {
            if self.may.is_some_and(|may| may[row] == 0) {
                return f64::INFINITY;
            }
            price::cost(|number| numbers.at(number, row), fresh(row), asked.tokens, wait(row) * correction(row))
        };
        let place = |row: usize| choice::Row {
            score: score(row),
            booked_requests: self.figures.at(price::BOOKED_REQUESTS, row),
            resident: self.resident[row].get(),
            last_resort: self.last_resorts.is_some_and(|last| last[row] != 0),
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
    let (may, last_resorts) = (values(py, may.as_ref())?, values(py, last_resorts.as_ref())?);
    let known = Known {
        folded: Table::new(py, &folded, price::NUMBERS)?,
        figures: Table::new(py, &figures, price::FIGURES.len())?,
        resident: cells(py, &resident)?,
        seeds: cells(py, &seeds)?,
        other_s: values(py, other_s.as_ref())?,
        may: may.as_deref(),
        last_resorts: last_resorts.as_deref(),
    };
    known.ranked(&Asked { prompt_tokens, tokens, word, tolerance, most, limit })
}

/// A choice as figures, and those that it was made of.
#[pyclass(frozen)]
pub struct Picked {
    /// The best rows in order, and their scores.
    #[pyo3(get)]
    rows: Vec<usize>,
    #[pyo3(get)]
    scores: Vec<f64>,
    #[pyo3(get)]
    limit: f64,
    #[pyo3(get)]
    ttft_s: f64,
    /// Prompt tokens that each row has.
    resident: Vec<f64>,
    /// The figures of the best rows.
    table: Vec<f64>,
    /// The request at the first of them; None: nobody has asked for it.
    #[pyo3(get)]
    pub booking: Option<Py<Booking>>,
}

#[pymethods]
impl Picked {
    /// Prompt tokens that the first of the best rows has.
    #[getter]
    fn resident_tokens(&self) -> u64 {
        self.rows.first().map_or(0, |&row| self.resident[row] as u64)
    }

    /// float64 [rows].
    fn resident<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        bytes(py, &self.resident)
    }

    /// float64 [figures, best rows].
    fn table<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        bytes(py, &self.table)
    }
}

fn bytes<'py>(py: Python<'py>, values: &[f64]) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<_>>())
}

/// What a request asks of the replicas of its model.
pub struct Wanted<'a, 'py> {
    /// Names of the blocks of its prompt.
    pub hashes: &'a Bound<'py, PyAny>,
    pub block_size: usize,
    /// The rows whose caches count; None: all.
    pub among: Option<&'a [u8]>,
    pub now: f64,
    pub prompt_tokens: usize,
    /// Output tokens whose inter-token time counts.
    pub tokens: f64,
    pub word: u64,
    pub tolerance: f64,
    pub most: usize,
    /// Its id and answers; None: it is not booked.
    pub books: Option<(String, i64)>,
}

#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub fn pick(
    folded: &Bound<'_, Folded>,
    index: PyRef<'_, ResidencyIndex>,
    coming: &Bound<'_, Coming>,
    hashes: &Bound<'_, PyAny>,
    block_size: usize,
    among: Option<PyBuffer<u8>>,
    rates: &Bound<'_, PyAny>,
    now: f64,
    prompt_tokens: usize,
    tokens: f64,
    word: u64,
    tolerance: f64,
    most: usize,
    books: Option<(String, i64)>,
) -> PyResult<Picked> {
    let among = values(folded.py(), among.as_ref())?;
    let among = among.as_deref();
    picked(
        folded,
        &index,
        coming,
        rates,
        Wanted { hashes, block_size, among, now, prompt_tokens, tokens, word, tolerance, most, books },
    )
}

/// See `penstock.gateway.picker.compiled.Compiled.pick`.
pub fn picked(
    folded: &Bound<'_, Folded>,
    index: &ResidencyIndex,
    coming: &Bound<'_, Coming>,
    rates: &Bound<'_, PyAny>,
    wanted: Wanted<'_, '_>,
) -> PyResult<Picked> {
    let Wanted { hashes, block_size, among, now, prompt_tokens, .. } = wanted;
    let (py, most_blocks) = (folded.py(), prompt_tokens.saturating_sub(1) / block_size.max(1));
    let all = coming.get().bookings(py);
    let mut of = folded.borrow_mut();
    of.fold(py, rates, block_size, now)?;
    let resident = vec![Cell::new(0.0); of.figures(py)?.rows];
    let rows = of.rows_by_bit(py, index)?;
    index.add_to(hashes, most_blocks, block_size, |bit| rows.get(bit).copied().unwrap_or(-1), &resident)?;
    let counts = |row: usize| among.is_none_or(|among| among.get(row).is_some_and(|&it| it != 0));
    resident.iter().enumerate().filter(|&(row, _)| !counts(row)).for_each(|(_, cell)| cell.set(0.0));
    let bookings = all.borrow();
    if bookings.expects() {
        bookings.supplied(folded, &names(hashes)?, |row, blocks| {
            if let Some(cell) = resident.get(row).filter(|_| counts(row)) {
                cell.set(cell.get().max((blocks.min(most_blocks) * block_size) as f64));
            }
        });
    }
    let known = Known {
        folded: of.numbers(py)?,
        figures: of.figures(py)?,
        resident: &resident,
        seeds: cells(py, &of.seeds)?,
        other_s: None,
        may: of.may.as_deref(),
        last_resorts: None,
    };
    let Wanted { tokens, word, tolerance, most, books, .. } = wanted;
    let asked = Asked { prompt_tokens: prompt_tokens as f64, tokens, word, tolerance, most, limit: None };
    let (rows, scores, limit, ttft_s) = known.ranked(&asked)?;
    let table = (0..price::FIGURES.len()).flat_map(|figure| rows.iter().map(move |&row| (figure, row)));
    let table = table.map(|(figure, row)| known.figures.at(figure, row)).collect();
    let key = rows.first().and_then(|&row| of.key(py, row));
    drop((bookings, of));
    let resident = resident.iter().map(Cell::get).collect();
    let mut picked = Picked { rows, scores, limit, ttft_s, resident, table, booking: None };
    if let Some(((request_id, answers), key)) = books.zip(key) {
        let cached = picked.resident_tokens() as usize;
        let booking = all.borrow_mut().book(py, request_id, &key, prompt_tokens as i64 - cached as i64, now, 0, answers)?;
        if all.borrow().tells(&booking.borrow(py)) {
            coming.get().expect(booking.bind(py), hashes, cached / block_size.max(1))?;
        }
        picked.booking = Some(booking);
    }
    Ok(picked)
}
