//! numpy's arrays, where they lie.

use std::cell::Cell;

use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The values of a contiguous array; of a table, one column after the other.
pub fn cells<'a, T: Element>(_py: Python<'a>, array: &'a PyBuffer<T>) -> PyResult<&'a [Cell<T>]> {
    let Some(all) = array.as_slice_ptr() else {
        return Err(PyValueError::new_err("an array must be contiguous"));
    };
    // SAFETY: the buffer keeps the memory of so many aligned values alive, and `Cell` has the layout of what is in it. Nobody else
    // reads or writes meanwhile: the gateway's arrays belong to one thread, which holds the interpreter's lock for as long as `py`.
    Ok(unsafe { &*(all.as_ptr() as *const [Cell<T>]) })
}

/// The same, to be written to.
pub fn writable<'a, T: Element>(py: Python<'a>, array: &'a PyBuffer<T>) -> PyResult<&'a [Cell<T>]> {
    if array.readonly() {
        return Err(PyValueError::new_err("an array is read-only"));
    }
    cells(py, array)
}

/// The values of an array, or of none.
pub fn values<T: Element + Copy>(py: Python<'_>, array: Option<&PyBuffer<T>>) -> PyResult<Option<Vec<T>>> {
    array.map(|array| Ok(cells(py, array)?.iter().map(Cell::get).collect())).transpose()
}

/// Columns of numbers, with one element each a row.
pub struct Table<'a> {
    cells: &'a [Cell<f64>],
    pub rows: usize,
}

impl<'a> Table<'a> {
    /// `array` is float64 [columns, rows].
    pub fn new(py: Python<'a>, array: &'a PyBuffer<f64>, columns: usize) -> PyResult<Self> {
        match *array.shape() {
            [found, rows] if found == columns => Ok(Table { cells: cells(py, array)?, rows }),
            _ => Err(PyValueError::new_err(format!("a table of {columns} columns has the shape {:?}", array.shape()))),
        }
    }

    pub fn at(&self, column: usize, row: usize) -> f64 {
        self.cells[column * self.rows + row].get()
    }

    pub fn set(&self, column: usize, row: usize, value: f64) {
        self.cells[column * self.rows + row].set(value);
    }

    /// Raises where one of these has other rows.
    pub fn alike(&self, lengths: &[usize]) -> PyResult<()> {
        if lengths.iter().any(|&length| length != self.rows) {
            return Err(PyValueError::new_err(format!("an array has not {} rows", self.rows)));
        }
        Ok(())
    }
}
