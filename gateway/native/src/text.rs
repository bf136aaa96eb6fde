//! From the pieces of a text to token counts and block hashes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::bpe::Bpe;
use crate::chats::{self, Chat, Part, Shapes, Skeleton};
use crate::cuts::Apart;
use crate::hashes::BlockHashes;
use crate::hashing::chain;
use crate::prefixes::{End, Known, Namer, Node, Prefixes, pieces};
use crate::residency::Hash;
use crate::words::{Asked, Words};

/// Words a generation, whose table is then full: 2 MB.
const MOST_WORDS: usize = 57_344;
/// Bytes of the long words of a generation.
const MOST_LONG_BYTES: usize = 4 << 20;

/// The tokens of a prompt, and the names of its blocks.
pub type Hashed = (usize, BlockHashes);
/// What `Bpe::new` takes.
type Merges = (Vec<String>, HashMap<String, u32>, Vec<(String, String)>, bool, Vec<String>);

/// What is the same for all pieces of a text.
struct Prompt<'a, 'py> {
    /// The tokens of each of some texts.
    encode: &'a Bound<'py, PyAny>,
    /// Bytes of words that may be read by the merges.
    most: Option<usize>,
    /// Tokens before those of the text, and after.
    before: &'a [u32],
    after: &'a [u32],
    /// What each block holds behind its tokens, and the first one besides.
    every: &'a [u8],
    first: &'a [u8],
}

/// Hashes texts of one tokenizer, whose words and beginnings it remembers. Thread-safe.
#[pyclass(frozen)]
pub struct TextHasher {
    block_size: usize,
    root: Hash,
    /// Bytes of a piece, at least.
    piece: usize,
    apart: Apart,
    bpe: Option<Bpe>,
    words: Mutex<Words>,
    namer: Namer,
    prefixes: Mutex<Prefixes>,
    shapes: Mutex<Shapes>,
}

#[pymethods]
impl TextHasher {
    /// See `penstock.gateway.picker.compiled.Compiled`.
    #[new]
    fn new(
        block_size: usize,
        root: Hash,
        apart: Vec<String>,
        merges: Option<Merges>,
        key: [u8; 16],
        piece: usize,
        most_bytes: usize,
    ) -> PyResult<Self> {
        if block_size == 0 || piece == 0 {
            return Err(PyValueError::new_err("a block has no tokens, or a piece no bytes"));
        }
        let apart = Apart::new(&apart).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let bpe =
            merges.map(|(patterns, vocabulary, pairs, whole, added)| Bpe::new(&patterns, &vocabulary, &pairs, whole, &added));
        let bpe = bpe.transpose().map_err(|unusable| PyValueError::new_err(unusable.to_string()))?;
        let words = Mutex::new(Words::new(MOST_WORDS, MOST_LONG_BYTES));
        let prefixes = Mutex::new(Prefixes::new(most_bytes));
        Ok(TextHasher { block_size, root, piece, apart, bpe, words, namer: Namer::new(key), prefixes, shapes: Mutex::default() })
    }

    /// Bytes of what is remembered of beginnings.
    #[getter]
    fn held(&self) -> usize {
        locked(&self.prefixes).bytes()
    }

    /// See `penstock.gateway.picker.compiled.TextHasher`. Other threads run meanwhile, but for `encode`.
    #[allow(clippy::too_many_arguments)]
    fn text(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyString>,
        encode: &Bound<'_, PyAny>,
        most: Option<usize>,
        every: &[u8],
        first: &[u8],
        before: Vec<u32>,
        after: Vec<u32>,
    ) -> PyResult<Hashed> {
        let prompt = Prompt { encode, most, before: &before, after: &after, every, first };
        self.hashed(py, text.to_str()?, &prompt)
    }

    /// See `penstock.gateway.picker.compiled.TextHasher`. Other threads run meanwhile, but for `encode` and `skeleton`.
    #[allow(clippy::too_many_arguments)]
    pub fn chat(
        &self,
        py: Python<'_>,
        messages: &Bound<'_, PyAny>,
        skeleton: &Bound<'_, PyAny>,
        longest: usize,
        encode: &Bound<'_, PyAny>,
        most: Option<usize>,
        every: &[u8],
        first: &[u8],
    ) -> PyResult<Option<Hashed>> {
        let Some(chat) = Chat::of(messages)? else { return Ok(None) };
        let Some(messages) = chat.texts() else { return Ok(None) };
        let Some(parts) = self.skeleton(&messages, skeleton)? else { return Ok(None) };
        let Some(text) = chats::text(&parts, &messages).filter(|text| text.len() <= longest) else { return Ok(None) };
        let hashed = self.hashed(py, &text, &Prompt { encode, most, before: &[], after: &[], every, first })?;
        Ok(Some(hashed).filter(|&(tokens, _)| tokens > 0))
    }
}

impl TextHasher {
    fn skeleton(&self, messages: &[(&str, &str)], ask: &Bound<'_, PyAny>) -> PyResult<Skeleton> {
        let shape = chats::shape(messages);
        if let Some(known) = locked(&self.shapes).get(&shape) {
            return Ok(known);
        }
        let asked: Vec<(&str, bool)> = messages.iter().map(|(role, content)| (*role, content.is_empty())).collect();
        let found = ask.call1((asked,))?.extract::<Option<Vec<Part>>>()?.map(Arc::new);
        locked(&self.shapes).add(shape, found.clone());
        Ok(found)
    }

    fn hashed(&self, py: Python<'_>, text: &str, prompt: &Prompt<'_, '_>) -> PyResult<Hashed> {
        let &Prompt { encode, most, before, after, every, first } = prompt;
        let (pieces, keys, known) = py.detach(|| {
            let pieces = pieces(text, self.piece);
            if text.len() <= self.piece {
                // Its words are remembered: to hash it costs less than to keep it, and only its like would find it.
                return (pieces, Vec::new(), Known::default());
            }
            let last = (!after.is_empty()).then(|| pieces.len() - 1);
            let mut names = self.namer.of(every, first, before);
            let keys: Vec<u128> = pieces.iter().enumerate().map(|(at, piece)| names.next(piece, last == Some(at))).collect();
            let known = locked(&self.prefixes).known(&keys);
            (pieces, keys, known)
        });
        let Known { pieces: done, mut names, end } = known;
        if done == pieces.len() {
            return Ok((end.tokens, BlockHashes { names }));
        }
        let mut tokens = self.by_words(py, &pieces[done..], encode, most)?;
        if let Some(piece) = tokens.first_mut().filter(|_| done == 0) {
            piece.splice(0..0, before.iter().copied());
        }
        if let Some(piece) = tokens.last_mut() {
            piece.extend_from_slice(after);
        }
        let count = end.tokens + tokens.iter().map(Vec::len).sum::<usize>();
        py.detach(|| {
            let added = self.chained(&tokens, end, every, first);
            names.extend(added.iter().flat_map(|node| &node.names));
            if !keys.is_empty() {
                locked(&self.prefixes).add(&keys[done..], added);
            }
        });
        Ok((count, BlockHashes { names }))
    }

    fn by_words(
        &self,
        py: Python<'_>,
        texts: &[&str],
        encode: &Bound<'_, PyAny>,
        most: Option<usize>,
    ) -> PyResult<Vec<Vec<u32>>> {
        let (reads, asked, mut found) = py.detach(|| {
            let (mut asked, mut words) = (Asked::default(), locked(&self.words));
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
            py.detach(|| locked(&self.words).learn(&asked, &found));
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

    /// The nodes of `pieces` in tokens, which go on at `from`; see `hashing::chain`.
    fn chained(&self, pieces: &[Vec<u32>], from: End, every: &[u8], first: &[u8]) -> Vec<Node> {
        let End { tokens: mut count, parent, tail: mut tokens } = from;
        let mut done = 0;
        let ends: Vec<usize> = pieces
            .iter()
            .map(|piece| {
                tokens.extend_from_slice(piece);
                tokens.len()
            })
            .collect();
        let names = match &parent {
            Some(parent) => chain(parent, &tokens, self.block_size, every, &[]),
            None => chain(&self.root, &tokens, self.block_size, every, first),
        };
        let of_pieces = pieces.iter().zip(ends).map(|(piece, end)| {
            let blocks = end / self.block_size;
            let of_piece = names[done..blocks].to_vec();
            count += piece.len();
            done = blocks;
            let parent = names[..blocks].last().copied().or(parent);
            Node { names: of_piece, end: End { tokens: count, parent, tail: tokens[blocks * self.block_size..end].to_vec() } }
        });
        of_pieces.collect()
    }
}

fn locked<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unanswered() -> PyErr {
    PyValueError::new_err("encode has not answered each text")
}

fn answers(encode: &Bound<'_, PyAny>, texts: &[&str]) -> PyResult<Vec<Vec<u32>>> {
    encode.call1((texts.to_vec(),))?.extract()
}
