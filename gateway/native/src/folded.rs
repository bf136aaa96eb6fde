//! The prices of all replicas of a model, folded: `penstock.gateway.picker.folded.Folded`, and what changes and reads the figures
//! where they lie.

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::{Table, writable};
use crate::index::ResidencyIndex;
use crate::price::{self, Rates};

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
    /// Rows by replica, and by the bits of the index in its version.
    rows: Py<PyDict>,
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
        let may = may.contains(&0).then_some(may);
        Ok(Folded {
            figures,
            seeds,
            numbers: into,
            array: numbers,
            may,
            rows,
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
