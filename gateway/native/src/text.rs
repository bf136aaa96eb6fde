//! From the pieces of a text to token counts and block hashes.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::bpe::Bpe;
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
/// What `Bpe::new` takes.
type Merges = (Vec<String>, HashMap<String, u32>, Vec<(String, String)>, bool, Vec<String>);

/// Hashes texts of one tokenizer, whose words it remembers. Thread-safe.
#[pyclass(frozen)]
pub struct TextHasher {
    block_size: usize,
    apart: Apart,
    bpe: Option<Bpe>,
    words: Mutex<Words>,
}

#[pymethods]
impl TextHasher {
    /// See `penstock.gateway.picker.compiled.Compiled`.
    #[new]
    fn new(block_size: usize, apart: Vec<String>, merges: Option<Merges>) -> PyResult<Self> {
        if block_size == 0 {
            return Err(PyValueError::new_err("a block has no tokens"));
        }
        let apart = Apart::new(&apart).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let bpe =
            merges.map(|(patterns, vocabulary, pairs, whole, added)| Bpe::new(&patterns, &vocabulary, &pairs, whole, &added));
        let bpe = bpe.transpose().map_err(|unusable| PyValueError::new_err(unusable.to_string()))?;
        Ok(TextHasher { block_size, apart, bpe, words: Mutex::new(Words::new(MOST_WORDS, MOST_LONG_BYTES)) })
    }

    /// See `penstock.gateway.picker.compiled.TextHasher`. Other threads run meanwhile, but for `encode`.
    #[allow(clippy::too_many_arguments)]
    fn hashed<'py>(
        &self,
        py: Python<'py>,
        pieces: Vec<Bound<'py, PyString>>,
        encode: &Bound<'py, PyAny>,
        by_words: bool,
        most: Option<usize>,
        before: Vec<u32>,
        after: Vec<u32>,
        parent: &[u8],
        tail: Vec<u32>,
        every: &[u8],
        first: &[u8],
    ) -> PyResult<Vec<Hashed<'py>>> {
        let texts = pieces.iter().map(|piece| piece.to_str()).collect::<PyResult<Vec<&str>>>()?;
        let mut tokens = if by_words { self.by_words(py, &texts, encode, most)? } else { answers(encode, &texts)? };
        if tokens.len() != texts.len() {
            return Err(unanswered());
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
    fn by_words(
        &self,
        py: Python<'_>,
        texts: &[&str],
        encode: &Bound<'_, PyAny>,
        most: Option<usize>,
    ) -> PyResult<Vec<Vec<u32>>> {
        let (reads, asked, mut found) = py.detach(|| {
            let (mut asked, mut words) = (Asked::default(), self.words());
            let easy = |word: &str| self.bpe.as_ref().is_some_and(|bpe| bpe.reads(word));
            let reads: Vec<_> = texts.iter().map(|text| words.read(self.apart.words(text), &mut asked, easy)).collect();
            drop(words); // others need not wait for what takes long
            let found = self.merged(&asked.texts, most);
            (reads, asked, found)
        });
        let missing: Vec<usize> = (0..found.len()).filter(|&at| found[at].is_none()).collect();
        if !missing.is_empty() {
            let answers = answers(encode, &missing.iter().map(|&at| asked.texts[at]).collect::<Vec<_>>())?;
            for (at, answer) in missing.into_iter().zip(answers) {
                found[at] = Some(answer);
            }
        }
        let found = found.into_iter().collect::<Option<Vec<_>>>().ok_or_else(unanswered)?;
        if !found.is_empty() {
            py.detach(|| self.words().learn(&asked, &found));
        }
        let filled: Option<Vec<_>> = reads.into_iter().map(|read| read.filled(&found)).collect();
        filled.ok_or_else(unanswered)
    }

    /// The tokens of those of `texts` that need no tokenizer; of none where there are more than `most` bytes of them.
    fn merged(&self, texts: &[&str], most: Option<usize>) -> Vec<Option<Vec<u32>>> {
        let few = most.is_none_or(|most| texts.iter().map(|text| text.len()).sum::<usize>() <= most);
        let bpe = self.bpe.as_ref().filter(|_| few);
        texts.iter().map(|text| bpe.and_then(|bpe| bpe.tokens(text))).collect()
    }

    fn words(&self) -> MutexGuard<'_, Words> {
        self.words.lock().unwrap_or_else(PoisonError::into_inner)
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

fn unanswered() -> PyErr {
    PyValueError::new_err("encode has not answered each text")
}

fn answers(encode: &Bound<'_, PyAny>, texts: &[&str]) -> PyResult<Vec<Vec<u32>>> {
    encode.call1((texts.to_vec(),))?.extract()
}
