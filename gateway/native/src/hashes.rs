//! The names of a prompt's blocks, which Python sees one by one only where it looks.

use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::residency::{Hash, name};

/// As Python's tuple of `bytes`, as far as anybody uses one.
#[pyclass(frozen, sequence)]
pub struct BlockHashes {
    pub names: Vec<Hash>,
}

#[pymethods]
impl BlockHashes {
    /// `packed`: one name after the other.
    #[new]
    fn new(packed: &[u8]) -> PyResult<Self> {
        let names = packed.chunks_exact(size_of::<Hash>());
        if !names.remainder().is_empty() {
            return Err(PyValueError::new_err(format!("{} bytes are no whole names", packed.len())));
        }
        Ok(BlockHashes { names: names.map(name).collect() })
    }

    fn __len__(&self) -> usize {
        self.names.len()
    }

    fn __getitem__<'py>(&self, py: Python<'py>, at: isize) -> PyResult<Bound<'py, PyBytes>> {
        let from_end = if at < 0 { at + self.names.len() as isize } else { at };
        let found = usize::try_from(from_end).ok().and_then(|at| self.names.get(at));
        found.map(|name| PyBytes::new(py, name)).ok_or_else(|| PyIndexError::new_err(format!("there is no block {at}")))
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> PyResult<bool> {
        if other.len()? != self.names.len() {
            return Ok(false);
        }
        for (name, theirs) in self.names.iter().zip(other.try_iter()?) {
            if theirs?.extract::<&[u8]>()? != name {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
