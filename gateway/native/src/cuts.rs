//! Where the words of a text end: before a space that follows anything but a space, or a line feed that follows a letter, and on both
//! sides of added tokens.
//! `penstock.prompt.cuts` has the proof that the tokens of the words are those of the text.

use std::ops::Range;

use aho_corasick::{AhoCorasick, BuildError, FindIter, MatchKind};

/// Letters beyond ASCII after which a word may end, as in `penstock.prompt.cuts`.
const LETTERS: [(char, char); 6] = [('а', 'я'), ('А', 'Я'), ('ぁ', 'ゖ'), ('ァ', 'ヺ'), ('一', '鿿'), ('가', '힣')];
/// Bytes that are looked at together.
const BLOCK: usize = u64::BITS as usize;
const ONES: u64 = u64::MAX / 0xff;

/// Texts that are words wherever they stand.
pub struct Apart(AhoCorasick);

impl Apart {
    pub fn new(texts: &[String]) -> Result<Self, BuildError> {
        AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(texts).map(Apart)
    }

    /// The words of a piece of a text, in order.
    pub fn words<'a, 'p>(&'p self, piece: &'a str) -> PieceWords<'a, 'p> {
        let found = self.0.find_iter(piece);
        let mut words = PieceWords { piece, base: 0, at: 0, cuts: Cuts::of(""), next: None, found };
        words.open(0);
        words
    }
}

/// See `Apart::words`.
pub struct PieceWords<'a, 'p> {
    piece: &'a str,
    /// Where the part of the piece begins that `cuts` goes through.
    base: usize,
    /// Where the next word begins.
    at: usize,
    cuts: Cuts<'a>,
    /// The text apart that ends that part, and those that follow it.
    next: Option<Range<usize>>,
    found: FindIter<'p, 'a>,
}

impl<'a> PieceWords<'a, '_> {
    /// What is left of the piece.
    pub fn rest(&self) -> &'a str {
        &self.piece[self.at..]
    }

    fn open(&mut self, base: usize) {
        self.next = self.found.next().map(|found| found.range());
        let end = self.next.as_ref().map_or(self.piece.len(), |next| next.start);
        (self.base, self.at, self.cuts) = (base, base, Cuts::of(&self.piece[base..end]));
    }
}

impl<'a> Iterator for PieceWords<'a, '_> {
    type Item = &'a str;

    #[inline]
    fn next(&mut self) -> Option<&'a str> {
        if let Some(word) = self.cuts.next() {
            self.at = self.base + word.end;
            return Some(&self.piece[self.base + word.start..self.at]);
        }
        let apart = self.next.take()?;
        self.open(apart.end);
        Some(&self.piece[apart])
    }
}

/// The words of a text without texts apart, in order.
struct Cuts<'a> {
    text: &'a str,
    /// Where the next word begins.
    start: usize,
    /// Spaces and line feeds that are still to be looked at, a bit each, in the block that ends at `seen`.
    marks: u64,
    seen: usize,
}

impl<'a> Cuts<'a> {
    fn of(text: &'a str) -> Self {
        Cuts { text, start: 0, marks: 0, seen: 0 }
    }

    /// The next place for a cut.
    #[inline]
    fn end(&mut self) -> Option<usize> {
        let bytes = self.text.as_bytes();
        loop {
            while self.marks == 0 {
                let block = bytes.get(self.seen..).filter(|rest| !rest.is_empty())?;
                self.marks = marks(block);
                self.seen += BLOCK;
            }
            let at = self.seen - BLOCK + self.marks.trailing_zeros() as usize;
            self.marks &= self.marks - 1;
            if at > 0 && ends(self.text, at) {
                return Some(at);
            }
        }
    }
}

impl Iterator for Cuts<'_> {
    type Item = Range<usize>;

    #[inline]
    fn next(&mut self) -> Option<Range<usize>> {
        let start = self.start;
        self.start = self.end().unwrap_or(self.text.len());
        (start < self.start).then_some(start..self.start)
    }
}

/// Whether a word ends before the space or line feed at `at`.
fn ends(text: &str, at: usize) -> bool {
    let before = text.as_bytes()[at - 1];
    if !before.is_ascii() {
        let last = text[..at].chars().next_back();
        return last.is_some_and(|last| LETTERS.iter().any(|&(from, to)| (from..=to).contains(&last)));
    }
    before.is_ascii_alphabetic() || (before.is_ascii_graphic() && text.as_bytes()[at] == b' ')
}

/// Whether a word ends at `at`, wherever no text apart is.
pub fn ends_word(text: &str, at: usize) -> bool {
    matches!(text.as_bytes()[at], b' ' | b'\n') && ends(text, at)
}

/// Which of the first bytes of `rest` are spaces or line feeds.
fn marks(rest: &[u8]) -> u64 {
    let mut block = [0; BLOCK];
    let count = rest.len().min(BLOCK);
    block[..count].copy_from_slice(&rest[..count]);
    let words = block.chunks_exact(8).map(|bytes| bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte)));
    words.enumerate().fold(0, |marks, (at, word)| marks | (equal(word, b' ') | equal(word, b'\n')) << (8 * at))
}

/// Which of the eight bytes of `word` are `byte`, the lowest first.
fn equal(word: u64, byte: u8) -> u64 {
    const LOW: u64 = !(ONES << 7);
    let differs = word ^ (ONES * u64::from(byte));
    let zeros = !(((differs & LOW) + LOW) | differs | LOW) >> 7;
    zeros.wrapping_mul(0x0102_0408_1020_4080) >> 56
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<&str> {
        Cuts::of(text).map(|word| &text[word]).collect()
    }

    #[test]
    fn words_end_before_spaces() {
        assert_eq!(
            words("Well, two  words\n\nof 7: état вода 水 \n x"),
            ["Well,", " two", "  words", "\n\nof", " 7:", " état", " вода", " 水", " \n x"]
        );
        assert_eq!(words("caf\u{e9} au 1\n2"), ["caf\u{e9} au", " 1\n2"]);
        assert_eq!(words(" x\n"), [" x", "\n"]);
        assert!(words("").is_empty());
    }

    #[test]
    fn texts_apart_are_words_wherever_they_stand() {
        let apart = Apart::new(&["<a>", "<a><b>", "</s>"].map(String::from)).unwrap();
        let text = "<a>one<a><b>two three<b></s>\n</s><a>";
        let mut words = apart.words(text);
        let mut rest = text;
        for word in ["<a>", "one", "<a><b>", "two", " three<b>", "</s>", "\n", "</s>", "<a>"] {
            assert_eq!((words.rest(), words.next()), (rest, Some(word)));
            rest = &rest[word.len()..];
        }
        assert_eq!((words.rest(), words.next(), words.next()), ("", None, None));
    }

    #[test]
    fn words_end_alike_wherever_they_stand() {
        for before in 0..2 * BLOCK {
            let text = "!".repeat(before) + "a b\nc\u{e0a} d\u{ff} \u{120}\nд\nя 8\n9 ";
            let mut expected = vec!["!".repeat(before) + "a"];
            expected.extend([" b", "\nc\u{e0a} d\u{ff} \u{120}\nд", "\nя", " 8\n9", " "].map(String::from));
            assert_eq!(words(&text), expected);
        }
    }
}
