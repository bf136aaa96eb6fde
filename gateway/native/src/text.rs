//! From the pieces of a text to token counts and block hashes.

use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::cuts::Apart;
use crate::hashing::chain;
use crate::words::{Asked, Words};

/// Words a generation, whose table is then full: 2 MB.
const MOST_WORDS: usize = 57_344;
/// Bytes of the long words of a generation.
const MOST_LONG_BYTES: usize = 4 << 20;

/// A piece's number of tokens, the hashes of the blocks that it completes, and the tokens after them.
type Chained = (usize, Vec<[u8; 32]>, Vec<u32>);
type Hashed<'py> = (usize, Bound<'py, PyBytes>, Vec<u32>);

/// Hashes texts of one tokenizer, whose words it remembers. Thread-safe.
#[pyclass(frozen)]
pub struct TextHasher {
    block_size: usize,
    apart: Apart,
    words: Mutex<Words>,
}

#[pymethods]
impl TextHasher {
    /// `block_size` is in tokens; the texts in `apart` are words wherever they stand.
    #[new]
    fn new(block_size: usize, apart: Vec<String>) -> PyResult<Self> {
        if block_size == 0 {
            return Err(PyValueError::new_err("a block has no tokens"));
        }
        let apart = Apart::new(&apart).map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(TextHasher { block_size, apart, words: Mutex::new(Words::new(MOST_WORDS, MOST_LONG_BYTES)) })
    }

    /// See `penstock.gateway.picker.compiled.TextHasher`. Other threads run meanwhile, but for `encode`.
    #[allow(clippy::too_many_arguments)]
    fn hashed<'py>(
        &self,
        py: Python<'py>,
        pieces: Vec<Bound<'py, PyString>>,
        encode: &Bound<'py, PyAny>,
        by_words: bool,
        before: Vec<u32>,
        after: Vec<u32>,
        parent: &[u8],
        tail: Vec<u32>,
        every: &[u8],
        first: &[u8],
    ) -> PyResult<Vec<Hashed<'py>>> {
        let texts = pieces.iter().map(|piece| piece.to_str()).collect::<PyResult<Vec<&str>>>()?;
        let mut tokens = if by_words { self.by_words(py, &texts, encode)? } else { answers(encode, &texts)? };
        if tokens.len() != texts.len() {
            return Err(PyValueError::new_err("encode has not answered each text"));
        }
        if let Some(piece) = tokens.first_mut() {
            piece.splice(0..0, before);
        }
        if let Some(piece) = tokens.last_mut() {
            piece.extend(after);
        }
        let hashed = py.detach(|| self.chained(tokens, parent, tail, every, first));
        Ok(hashed.into_iter().map(|(count, names, tail)| (count, PyBytes::new(py, names.as_flattened()), tail)).collect())
    }
}

impl TextHasher {
    fn by_words(&self, py: Python<'_>, texts: &[&str], encode: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<u32>>> {
        let (reads, asked) = py.detach(|| {
            let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
            let mut asked = Asked::default();
            let reads: Vec<_> = texts.iter().map(|text| words.read(self.apart.words(text), &mut asked)).collect();
            (reads, asked)
        });
        let found = if asked.texts.is_empty() { Vec::new() } else { answers(encode, &asked.texts)? };
        if !found.is_empty() {
            py.detach(|| self.words.lock().unwrap_or_else(PoisonError::into_inner).learn(&asked, &found));
        }
        let filled: Option<Vec<_>> = reads.into_iter().map(|read| read.filled(&found)).collect();
        filled.ok_or_else(|| PyValueError::new_err("encode has not answered each text"))
    }

    /// The names of the blocks of `tail` and then `pieces`, piece by piece; see `hashing::chain`.
    fn chained(&self, pieces: Vec<Vec<u32>>, parent: &[u8], tail: Vec<u32>, every: &[u8], first: &[u8]) -> Vec<Chained> {
        let mut tokens = tail;
        let ends: Vec<usize> = pieces
            .iter()
            .map(|piece| {
                tokens.extend_from_slice(piece);
                tokens.len()
            })
            .collect();
        let names = chain(parent, &tokens, self.block_size, every, first);
        let mut done = 0;
        let of_pieces = pieces.iter().zip(ends).map(|(piece, end)| {
            let blocks = end / self.block_size;
            let of_piece = names[done..blocks].to_vec();
            done = blocks;
            (piece.len(), of_piece, tokens[blocks * self.block_size..end].to_vec())
        });
        of_pieces.collect()
    }
}

fn answers(encode: &Bound<'_, PyAny>, texts: &[&str]) -> PyResult<Vec<Vec<u32>>> {
    encode.call1((texts.to_vec(),))?.extract()
}
