//! The prices of all replicas of a model, folded: `penstock.gateway.picker.folded.Folded`, and what changes and reads the figures
//! where they lie.

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::{Table, writable};
use crate::index::ResidencyIndex;
use crate::price::{self, Rates};
use crate::report::Said;

/// The figures of the replicas of one model, and what they fold into.
#[pyclass]
pub struct Folded {
    figures: PyBuffer<f64>,
    pub seeds: PyBuffer<u64>,
    numbers: PyBuffer<f64>,
    /// `numbers`, as Python has it.
    array: Py<PyAny>,
    /// The rows that may be picked; None: all.
    pub may: Option<Vec<u8>>,
    /// Rows by replica, replicas by row, and rows by the bits of the index in its version.
    rows: Py<PyDict>,
    keys: Vec<Option<Py<PyAny>>>,
    rows_by_bit: Option<(u64, Vec<i64>)>,
    /// Changed rows up to which they alone are folded.
    few: usize,
    /// Makes of rates what a price depends on.
    common: Py<PyAny>,
    changed: Vec<usize>,
    of: Option<(Py<PyAny>, usize)>,
    rates: Rates,
}

#[pymethods]
impl Folded {
    /// See `penstock.gateway.picker.compiled.Compiled`.
    #[new]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        figures: PyBuffer<f64>,
        seeds: PyBuffer<u64>,
        numbers: Py<PyAny>,
        may: Vec<u8>,
        rows: Py<PyDict>,
        few: usize,
        common: Py<PyAny>,
    ) -> PyResult<Self> {
        let into: PyBuffer<f64> = numbers.extract(py)?;
        let (from, to) = (Table::new(py, &figures, price::FIGURES.len())?, Table::new(py, &into, price::NUMBERS)?);
        from.alike(&[to.rows, seeds.item_count(), may.len()])?;
        writable(py, &figures)?;
        writable(py, &into)?;
        let rates = Rates { queue_s: 0.0, itl_s: 0.0, output_tokens: 0.0, crowding: 0.0 };
        let mut keys: Vec<Option<Py<PyAny>>> = (0..to.rows).map(|_| None).collect();
        for (key, row) in rows.bind(py) {
            if let Some(place) = keys.get_mut(row.extract::<usize>()?) {
                *place = Some(key.unbind());
            }
        }
        let may = may.contains(&0).then_some(may);
        Ok(Folded {
            figures,
            seeds,
            numbers: into,
            array: numbers,
            may,
            rows,
            keys,
            rows_by_bit: None,
            few,
            common,
            changed: Vec::new(),
            of: None,
            rates,
        })
    }

    /// The figures in `row` have changed.
    pub fn mark(&mut self, row: usize) {
        if self.changed.len() <= self.few && !self.changed.contains(&row) {
            self.changed.push(row);
        }
    }

    /// The newest report of the replica in `row`, received at `at`: `penstock.gateway.picker.columns.Columns.report`. False, and
    /// nothing is written, where it is the first one, or there are adapters. `rates` are the common speed of prefill and the common
    /// step, `transfer` what a transfer takes where none was measured.
    fn report(
        &mut self,
        py: Python<'_>,
        row: usize,
        report: &Said,
        at: f64,
        rates: (f64, f64),
        transfer: (f64, f64),
    ) -> PyResult<bool> {
        let [_, _, running, most, usage, blocks, reclaimable, backlog, speed, step_s, transfer_s, per_token, slots] =
            report.read();
        let figures = self.figures(py)?;
        if row >= figures.rows || figures.at(price::HEARD_AT, row) == f64::NEG_INFINITY {
            return Ok(false);
        }
        if slots != 0.0 || figures.at(price::LORA_SLOTS, row) != 0.0 {
            return Ok(false);
        }
        let measured = transfer_s != 0.0 || per_token != 0.0;
        let transfer = if measured { (transfer_s, per_token) } else { transfer };
        for (figure, value) in [
            (price::HEARD_AT, at),
            (price::RUNNING, running),
            (price::BATCH, running),
            (price::WAITING, report.waiting() as f64),
            (price::ROWS, most),
            (price::ROWS_FREE, if most != 0.0 { most - running } else { f64::INFINITY }),
            (price::KV_USAGE, usage),
            (price::KV_BLOCKS, blocks),
            (price::BLOCKS_FREE, if blocks != 0.0 { reclaimable } else { f64::INFINITY }),
            (price::HELD_BLOCKS, if running != 0.0 { usage * blocks / running } else { 0.0 }),
            (price::BACKLOG_TOKENS, backlog),
            (price::MEASURED_TOKENS_PER_S, speed),
            (price::MEASURED_STEP_S, step_s),
            (price::TRANSFER_S, transfer.0),
            (price::TRANSFER_S_PER_TOKEN, transfer.1),
            (price::S_PER_TOKEN, 1.0 / (if speed != 0.0 { speed } else { rates.0 }).max(1.0)),
            (price::STEP_S, if step_s != 0.0 { step_s } else { rates.1 }),
        ] {
            figures.set(figure, row, value);
        }
        self.mark(row);
        Ok(true)
    }

    /// Python's array of the numbers, folded.
    fn table(&mut self, py: Python<'_>, rates: &Bound<'_, PyAny>, block_size: usize, now: f64) -> PyResult<Py<PyAny>> {
        self.fold(py, rates, block_size, now)?;
        Ok(self.array.clone_ref(py))
    }
}

impl Folded {
    pub fn figures<'a>(&'a self, py: Python<'a>) -> PyResult<Table<'a>> {
        Table::new(py, &self.figures, price::FIGURES.len())
    }

    pub fn numbers<'a>(&'a self, py: Python<'a>) -> PyResult<Table<'a>> {
        Table::new(py, &self.numbers, price::NUMBERS)
    }

    /// Folds what has changed, or all where the rates have, or much has.
    pub fn fold(&mut self, py: Python<'_>, rates: &Bound<'_, PyAny>, block_size: usize, now: f64) -> PyResult<()> {
        let same = self.of.as_ref().is_some_and(|(of, size)| of.is(rates) && *size == block_size);
        if !same {
            let (queue_s, itl_s, output_tokens, crowding) = self.common.call1(py, (rates,))?.extract(py)?;
            self.rates = Rates { queue_s, itl_s, output_tokens, crowding };
            self.of = Some((rates.clone().unbind(), block_size));
        }
        let (figures, numbers) = (self.figures(py)?, self.numbers(py)?);
        let fold = |row: usize| {
            let found = price::fold(|figure| figures.at(figure, row), &self.rates, block_size as f64, now);
            found.into_iter().enumerate().for_each(|(number, value)| numbers.set(number, row, value));
        };
        if !same || self.changed.len() > self.few {
            (0..figures.rows).for_each(fold);
        } else {
            self.changed.iter().copied().filter(|&row| row < figures.rows).for_each(fold);
        }
        self.changed.clear();
        Ok(())
    }

    /// The replica in `row`.
    pub fn key<'py>(&self, py: Python<'py>, row: usize) -> Option<Bound<'py, PyAny>> {
        self.keys.get(row)?.as_ref().map(|key| key.bind(py).clone())
    }

    /// The row of each of the index's bits.
    pub fn rows_by_bit(&mut self, py: Python<'_>, index: &ResidencyIndex) -> PyResult<&[i64]> {
        if self.rows_by_bit.as_ref().is_none_or(|(version, _)| *version != index.version()) {
            self.rows_by_bit = Some((index.version(), index.rows_by_bit(py, self.rows.bind(py))?));
        }
        Ok(self.rows_by_bit.as_ref().map_or(&[], |(_, rows)| rows))
    }

    /// Work on its way to the replica in `row` that its reports do not hold yet.
    pub fn booked(
        &mut self,
        py: Python<'_>,
        row: usize,
        requests: i64,
        prefill_tokens: i64,
        transfer_tokens: i64,
    ) -> PyResult<()> {
        let figures = self.figures(py)?;
        figures.set(price::BOOKED_REQUESTS, row, requests as f64);
        figures.set(price::BOOKED_TOKENS, row, prefill_tokens as f64);
        figures.set(price::BOOKED_TRANSFERS, row, transfer_tokens as f64);
        self.mark(row);
        Ok(())
    }

    /// A running request of `row` has ended after the replica's last report.
    pub fn left(&mut self, py: Python<'_>, row: usize) -> PyResult<()> {
        let figures = self.figures(py)?;
        let running = figures.at(price::RUNNING, row);
        if running > 0.0 {
            figures.set(price::RUNNING, row, running - 1.0);
            figures.set(price::ROWS_FREE, row, figures.at(price::ROWS_FREE, row) + 1.0);
            self.mark(row);
        }
        Ok(())
    }
}
