//! The residency index as Python sees it: `penstock.gateway.residency.index.ResidencyIndex`, method by method.

use std::borrow::Cow;
use std::cell::Cell;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::arrays::{cells, writable};
use crate::hashes::BlockHashes;
use crate::residency::{Blocks, Hash, name, ones};

/// Which replica caches which block. See Python's class of the same name.
#[pyclass]
pub struct ResidencyIndex {
    blocks: Blocks,
    /// Bits by replica.
    bits: Py<PyDict>,
    /// Replicas by bit.
    keys: Vec<Option<Py<PyAny>>>,
    knowledge: Py<PyDict>,
    unknown: Py<PyAny>,
}

/// The names of blocks; the whole list is read before anything is changed.
pub fn names<'a>(hashes: &'a Bound<'_, PyAny>) -> PyResult<Cow<'a, [Hash]>> {
    if let Ok(own) = hashes.cast::<BlockHashes>() {
        return Ok(Cow::Borrowed(&own.get().names));
    }
    let mut found = Vec::with_capacity(hashes.len().unwrap_or(0));
    for hash in hashes.try_iter()? {
        found.push(named(&hash?)?);
    }
    Ok(Cow::Owned(found))
}

fn named(hash: &Bound<'_, PyAny>) -> PyResult<Hash> {
    Ok(name(hash.cast::<PyBytes>().map_err(|_| PyTypeError::new_err("a block's hash must be bytes"))?.as_bytes()))
}

impl ResidencyIndex {
    /// Adds to `tokens`, one a row, what each row's cache would supply of a prompt; reads no names behind those that anybody caches.
    pub fn add_to(
        &self,
        hashes: &Bound<'_, PyAny>,
        most: usize,
        block_size: usize,
        row_of: impl Fn(usize) -> i64,
        tokens: &[Cell<f64>],
    ) -> PyResult<()> {
        let add = |bits: &[u64], depth: usize| {
            for bit in ones(bits) {
                if let Some(cell) = usize::try_from(row_of(bit)).ok().and_then(|row| tokens.get(row)) {
                    cell.set(cell.get() + (depth.min(most) * block_size) as f64);
                }
            }
        };
        if let Ok(own) = hashes.cast::<BlockHashes>() {
            self.blocks.walk(own.get().names.iter().copied(), add);
            return Ok(());
        }
        let mut wrong = None;
        let names =
            hashes.try_iter()?.map_while(|hash| hash.and_then(|hash| named(&hash)).map_err(|error| wrong = Some(error)).ok());
        self.blocks.walk(names, add);
        wrong.map_or(Ok(()), Err)
    }

    fn bit(&self, key: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
        self.bits.bind(key.py()).get_item(key)?.map(|bit| bit.extract()).transpose()
    }

    fn bit_or_new(&mut self, key: &Bound<'_, PyAny>) -> PyResult<usize> {
        match self.bit(key)? {
            Some(bit) => Ok(bit),
            None => {
                let bit = self.blocks.open();
                self.place(key, bit)?;
                Ok(bit)
            }
        }
    }

    fn place(&mut self, key: &Bound<'_, PyAny>, bit: usize) -> PyResult<()> {
        if self.keys.len() <= bit {
            self.keys.resize_with(bit + 1, || None);
        }
        self.keys[bit] = Some(key.clone().unbind());
        self.bits.bind(key.py()).set_item(key, bit)
    }
}

#[pymethods]
impl ResidencyIndex {
    /// `per_replica` and `total` are bounds in blocks; `unknown` is what `knowledge` says of replicas that it was not told of.
    #[new]
    fn new(py: Python<'_>, per_replica: usize, total: usize, unknown: Py<PyAny>) -> Self {
        ResidencyIndex {
            blocks: Blocks::new(per_replica, total),
            bits: PyDict::new(py).unbind(),
            keys: Vec::new(),
            knowledge: PyDict::new(py).unbind(),
            unknown,
        }
    }

    fn __len__(&self) -> usize {
        self.blocks.len()
    }

    #[getter]
    fn entries(&self) -> usize {
        self.blocks.entries
    }

    #[getter]
    fn dropped(&self) -> usize {
        self.blocks.dropped
    }

    #[getter]
    pub fn version(&self) -> u64 {
        self.blocks.version
    }

    fn blocks(&self, key: &Bound<'_, PyAny>) -> PyResult<usize> {
        Ok(self.bit(key)?.map_or(0, |bit| self.blocks.blocks(bit)))
    }

    fn holds(&self, key: &Bound<'_, PyAny>, block: &[u8]) -> PyResult<bool> {
        Ok(self.bit(key)?.is_some_and(|bit| self.blocks.holds(bit, &name(block))))
    }

    fn knowledge(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        Ok(self.knowledge.bind(py).get_item(key)?.map_or_else(|| self.unknown.clone_ref(py), Bound::unbind))
    }

    fn set_knowledge(&self, py: Python<'_>, key: &Bound<'_, PyAny>, knowledge: &Bound<'_, PyAny>) -> PyResult<()> {
        self.knowledge.bind(py).set_item(key, knowledge)
    }

    fn set_limit(&mut self, key: &Bound<'_, PyAny>, blocks: i64) -> PyResult<()> {
        let bit = self.bit_or_new(key)?;
        self.blocks.set_limit(bit, blocks.max(1) as usize);
        Ok(())
    }

    fn set_total(&mut self, blocks: usize) {
        self.blocks.set_total(blocks);
    }

    fn limit(&self, key: &Bound<'_, PyAny>) -> PyResult<usize> {
        Ok(self.bit(key)?.map_or(self.blocks.per_replica(), |bit| self.blocks.limit(bit)))
    }

    fn store(&mut self, key: &Bound<'_, PyAny>, hashes: &Bound<'_, PyAny>) -> PyResult<()> {
        let names = names(hashes)?;
        let bit = self.bit_or_new(key)?;
        self.blocks.store(bit, names.iter().copied());
        Ok(())
    }

    fn used(&mut self, key: &Bound<'_, PyAny>, hashes: &Bound<'_, PyAny>) -> PyResult<()> {
        if let Some(bit) = self.bit(key)? {
            if self.blocks.nearly_full(bit) {
                self.blocks.used(bit, names(hashes)?.iter().copied());
            }
        }
        Ok(())
    }

    fn remove(&mut self, key: &Bound<'_, PyAny>, hashes: &Bound<'_, PyAny>) -> PyResult<()> {
        if let Some(bit) = self.bit(key)? {
            self.blocks.remove(bit, names(hashes)?.iter().copied());
        }
        Ok(())
    }

    fn clear(&mut self, key: &Bound<'_, PyAny>) -> PyResult<()> {
        if let Some(bit) = self.bit(key)? {
            let new = self.blocks.clear(bit);
            if new != bit {
                self.keys[bit] = None;
                self.place(key, new)?;
            }
        }
        Ok(())
    }

    fn drop(&mut self, key: &Bound<'_, PyAny>) -> PyResult<()> {
        let known = self.knowledge.bind(key.py());
        if known.contains(key)? {
            known.del_item(key)?;
        }
        if let Some(bit) = self.bit(key)? {
            self.bits.bind(key.py()).del_item(key)?;
            self.keys[bit] = None;
            self.blocks.retire(bit);
        }
        Ok(())
    }

    fn sweep(&mut self, limit: usize) -> usize {
        self.blocks.sweep(limit)
    }

    fn longest_prefix<'py>(&self, py: Python<'py>, hashes: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
        let mut spans = Vec::new();
        self.blocks.walk(names(hashes)?.iter().copied(), |bits, depth| spans.extend(ones(bits).map(|bit| (bit, depth))));
        let found = PyDict::new(py);
        for (bit, depth) in spans {
            if let Some(key) = &self.keys[bit] {
                found.set_item(key, depth)?;
            }
        }
        Ok(found)
    }

    pub fn rows_by_bit(&self, py: Python<'_>, rows: &Bound<'_, PyDict>) -> PyResult<Vec<i64>> {
        let row = |key: &Option<Py<PyAny>>| match key {
            Some(key) => rows.get_item(key.bind(py))?.map_or(Ok(-1), |row| row.extract()),
            None => Ok(-1),
        };
        (0..self.blocks.width()).map(|bit| row(self.keys.get(bit).unwrap_or(&None))).collect()
    }

    /// Adds to `tokens`, float64 [rows], what each row's cache would supply of a prompt: whole blocks, `most` of them at most.
    ///
    /// `rows`: int64 [bits], from `rows_by_bit`.
    fn add_tokens(
        &self,
        py: Python<'_>,
        hashes: &Bound<'_, PyAny>,
        most: usize,
        block_size: usize,
        rows: PyBuffer<i64>,
        tokens: PyBuffer<f64>,
    ) -> PyResult<()> {
        let rows = cells(py, &rows)?;
        self.add_to(hashes, most, block_size, |bit| rows.get(bit).map_or(-1, Cell::get), writable(py, &tokens)?)
    }
}
