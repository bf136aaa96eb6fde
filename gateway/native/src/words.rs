//! Tokens of texts by the words that they are made of: what the tokenizer has said of a word once is not asked again.
//!
//! A text is cut between words, where the tokens of its words are its own (`penstock.prompt.cuts` has the proof). Words that are not
//! remembered are asked for; see `Words::read`.

use std::hash::BuildHasher;
use std::hint::black_box;

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};

use crate::cuts::PieceWords;

/// Bytes of the longest word that is remembered.
const LONGEST: usize = 256;
/// Bytes of a word and its tokens together, four each, that lie in the table itself.
const ROOM: usize = 28;
/// Words that the tokenizer is asked for one by one in a call. Beyond it the rest of a piece is asked for as one: to the tokenizer many
/// short texts cost more than a long one.
const MOST_ASKED: usize = 64;
/// Words that are looked up together.
const TOGETHER: usize = 16;

/// A word and its tokens, side by side: looking up words by lot is a matter of how much memory each touches.
#[repr(align(32))]
struct Word {
    /// Bytes of the text.
    length: u16,
    /// Tokens.
    count: u16,
    /// The text and its tokens; or, where there is no room for them, where they begin among those of long words.
    bytes: [u8; ROOM],
}

impl Word {
    /// The text and its tokens, and what may follow them.
    fn bytes<'a>(&'a self, long: &'a [u8]) -> &'a [u8] {
        if usize::from(self.length) + 4 * usize::from(self.count) <= ROOM {
            return &self.bytes;
        }
        let [a, b, c, d, ..] = self.bytes;
        &long[u32::from_le_bytes([a, b, c, d]) as usize..]
    }

    fn is(&self, text: &[u8], long: &[u8]) -> bool {
        usize::from(self.length) == text.len() && self.bytes(long).starts_with(text)
    }
}

/// Words that have been used since a time.
#[derive(Default)]
struct Generation {
    words: HashTable<Word>,
    /// Texts and tokens of words that are too long for the table.
    long: Vec<u8>,
}

impl Generation {
    /// The tokens of a word, if it is there, four bytes each.
    fn find(&self, hash: u64, text: &[u8]) -> Option<&[u8]> {
        let word = self.words.find(hash, |word| word.is(text, &self.long))?;
        Some(&word.bytes(&self.long)[text.len()..][..4 * usize::from(word.count)])
    }

    /// Adds a word that is not there.
    fn add(&mut self, hasher: &DefaultHashBuilder, text: &[u8], ids: &[u8]) {
        let (Ok(length), Ok(count)) = (text.len().try_into(), (ids.len() / 4).try_into()) else { return };
        let mut word = Word { length, count, bytes: [0; ROOM] };
        if let Some(room) = word.bytes.get_mut(..text.len() + ids.len()) {
            let (of_text, of_ids) = room.split_at_mut(text.len());
            of_text.copy_from_slice(text);
            of_ids.copy_from_slice(ids);
        } else {
            let Ok(at) = u32::try_from(self.long.len()) else { return };
            word.bytes[..4].copy_from_slice(&at.to_le_bytes());
            self.long.extend_from_slice(text);
            self.long.extend_from_slice(ids);
        }
        let long = &self.long;
        let again = |word: &Word| hasher.hash_one(&word.bytes(long)[..usize::from(word.length)]);
        self.words.insert_unique(hasher.hash_one(text), word, again);
    }
}

/// The words of one tokenizer, in two generations: when the young one is full it becomes the old one, which is forgotten but for
/// what is used again.
pub struct Words {
    most: usize,
    most_long: usize,
    hasher: DefaultHashBuilder,
    young: Generation,
    old: Generation,
}

/// A piece of a text, of which not all is known.
#[derive(Default)]
pub struct Read {
    ids: Vec<u32>,
    /// Where ids are missing (before so many of `ids`), and which of the texts that are asked for has them.
    gaps: Vec<(usize, usize)>,
}

impl Read {
    /// The piece's tokens, given those of the texts that were asked for.
    pub fn filled(self, answers: &[Vec<u32>]) -> Option<Vec<u32>> {
        if self.gaps.is_empty() {
            return Some(self.ids);
        }
        let (mut all, mut done) = (Vec::with_capacity(self.ids.len() + 8 * self.gaps.len()), 0);
        for (before, which) in self.gaps {
            all.extend_from_slice(&self.ids[done..before]);
            all.extend_from_slice(answers.get(which)?);
            done = before;
        }
        all.extend_from_slice(&self.ids[done..]);
        Some(all)
    }
}

/// A word of a piece, and what it begins.
#[derive(Clone, Copy, Default)]
struct Next<'a> {
    word: &'a str,
    rest: &'a str,
    hash: u64,
}

/// What the tokenizer is asked for in one call.
#[derive(Default)]
pub struct Asked<'a> {
    /// The texts, each of which is one word or several.
    pub texts: Vec<&'a str>,
    /// Those that are words to be remembered, by their places in `texts`.
    words: HashMap<&'a str, usize>,
    /// Words that only the tokenizer knows.
    hard: usize,
}

impl<'a> Asked<'a> {
    fn word(&mut self, word: &'a str) -> usize {
        if word.len() > LONGEST {
            return self.text(word);
        }
        let next = self.texts.len();
        let which = *self.words.entry(word).or_insert(next);
        if which == next {
            self.texts.push(word);
        }
        which
    }

    fn text(&mut self, text: &'a str) -> usize {
        self.texts.push(text);
        self.texts.len() - 1
    }
}

impl Words {
    /// A generation is full with `most` words, or when those that are long may take more than `most_long` bytes.
    pub fn new(most: usize, most_long: usize) -> Self {
        let (hasher, young, old) = Default::default();
        Words { most, most_long, hasher, young, old }
    }

    /// Reads a piece by its words; adds to `asked` what is not remembered of it. `easy`: whether the tokenizer need not be asked.
    pub fn read<'a>(&mut self, mut words: PieceWords<'a, '_>, asked: &mut Asked<'a>, easy: impl Fn(&str) -> bool) -> Read {
        let mut read = Read { ids: Vec::with_capacity(words.rest().len() / 2), gaps: Vec::new() };
        let mut next = [Next::default(); TOGETHER];
        loop {
            let count = self.fetch(&mut words, &mut next);
            for &Next { word, rest, hash } in &next[..count] {
                if self.known(hash, word.as_bytes(), &mut read.ids) {
                    continue;
                }
                let known = asked.words.get(word).copied();
                let hard = known.is_none() && !easy(word);
                let ends = hard && asked.hard == MOST_ASKED;
                asked.hard += usize::from(hard && !ends);
                let which = known.unwrap_or_else(|| if ends { asked.text(rest) } else { asked.word(word) });
                read.gaps.push((read.ids.len(), which));
                if ends {
                    return read;
                }
            }
            if count < TOGETHER {
                return read;
            }
        }
    }

    /// Fills `next` with the next words; returns how many there are. Has the memory of all their places in the table come at the same
    /// time: to wait for one after the other is what looking up words costs.
    fn fetch<'a>(&self, words: &mut PieceWords<'a, '_>, next: &mut [Next<'a>; TOGETHER]) -> usize {
        let mut count = 0;
        for it in next.iter_mut() {
            let rest = words.rest();
            let Some(word) = words.next() else { break };
            *it = Next { word, rest, hash: self.hasher.hash_one(word.as_bytes()) };
            count += 1;
        }
        for it in &next[..count] {
            black_box(self.young.words.find(it.hash, |_| true).map(|word| word.length));
        }
        count
    }

    /// Remembers the words among what was asked for.
    pub fn learn(&mut self, asked: &Asked<'_>, answers: &[Vec<u32>]) {
        for (&text, &which) in &asked.words {
            if let Some(ids) = answers.get(which) {
                self.add(text.as_bytes(), &ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>());
            }
        }
    }

    fn known(&mut self, hash: u64, text: &[u8], into: &mut Vec<u32>) -> bool {
        if let Some(ids) = self.young.find(hash, text) {
            into.extend(numbers(ids));
            return true;
        }
        let Some(ids) = self.old.find(hash, text).map(<[u8]>::to_vec) else { return false };
        into.extend(numbers(&ids));
        self.add(text, &ids);
        true
    }

    /// Two threads may learn a word at the same time: it is then kept once.
    fn add(&mut self, text: &[u8], ids: &[u8]) {
        if self.young.find(self.hasher.hash_one(text), text).is_some() {
            return;
        }
        if self.young.words.len() >= self.most || self.young.long.len() + text.len() + ids.len() > self.most_long {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.add(&self.hasher, text, ids);
    }
}

fn numbers(ids: &[u8]) -> impl Iterator<Item = u32> {
    ids.chunks_exact(4).map(|id| u32::from_le_bytes([id[0], id[1], id[2], id[3]]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuts::Apart;

    fn read<'a>(memo: &mut Words, text: &'a str, asked: &mut Asked<'a>) -> Read {
        memo.read(Apart::new(&[]).unwrap().words(text), asked, |word| word.starts_with(" easy"))
    }

    fn known(memo: &mut Words, text: &str) -> Option<Vec<u32>> {
        let mut ids = Vec::new();
        memo.known(memo.hasher.hash_one(text.as_bytes()), text.as_bytes(), &mut ids).then_some(ids)
    }

    #[test]
    fn generations_forget() {
        for (most, most_long, long) in [(2, 1000, ""), (1000, 520, &*"x".repeat(230))] {
            let mut memo = Words::new(most, most_long);
            let word = |name: &str| format!("{name}{long}");
            for (at, name) in ["a", "b", "c"].into_iter().enumerate() {
                memo.add(word(name).as_bytes(), &(at as u32).to_le_bytes().repeat(7));
            }
            assert_eq!(known(&mut memo, &word("a")), Some(vec![0; 7])); // and is young again
            for name in ["d", "e"] {
                memo.add(word(name).as_bytes(), &[9; 4]);
            }
            assert_eq!((known(&mut memo, &word("b")), known(&mut memo, &word("e")).is_some()), (None, true));
            assert!(memo.young.words.len() <= 3 && memo.old.words.len() <= 3);
        }
    }

    #[test]
    fn words_of_any_length_keep_their_tokens() {
        let mut memo = Words::new(1000, 1 << 20);
        let words: Vec<String> = (1..=LONGEST).map(|length| "ab".repeat(length)[..length].to_string()).collect();
        let ids = |length: usize| -> Vec<u32> { (0..length % 40).map(|at| u32::MAX - (at * length) as u32).collect() };
        for word in &words {
            let mut asked = Asked::default();
            read(&mut memo, word, &mut asked);
            assert_eq!(asked.texts, [word]);
            memo.learn(&asked, &[ids(word.len())]);
        }
        for word in &words {
            assert_eq!(known(&mut memo, word), Some(ids(word.len())));
        }
        let (long, mut asked) = ("a".repeat(LONGEST + 1), Asked::default());
        read(&mut memo, &long, &mut asked);
        memo.learn(&asked, &[vec![1]]);
        assert_eq!(known(&mut memo, &long), None);
    }

    #[test]
    fn the_rest_of_a_long_piece_is_asked_for_as_one() {
        let text = (0..200).map(|n| format!(" word{n}x")).collect::<String>();
        let (mut memo, mut asked) = (Words::new(1000, 1 << 20), Asked::default());
        let of_text = read(&mut memo, &text, &mut asked);
        assert_eq!(asked.texts.len(), MOST_ASKED + 1);
        let answers: Vec<Vec<u32>> = asked.texts.iter().map(|text| text.bytes().map(u32::from).collect()).collect();
        memo.learn(&asked, &answers);
        assert_eq!(of_text.filled(&answers), Some(text.bytes().map(u32::from).collect()));
        assert!(Read { ids: vec![], gaps: vec![(0, 1)] }.filled(&[]).is_none());
        let mut again = Asked::default();
        read(&mut memo, &text, &mut again);
        assert_eq!(again.texts[0], " word64x");
    }

    #[test]
    fn easy_words_are_asked_for_one_by_one_and_once() {
        let text = (0..200).map(|n| format!(" easy{}x", n % 150)).collect::<String>() + " hard";
        let mut asked = Asked::default();
        read(&mut Words::new(1000, 1 << 20), &text, &mut asked);
        assert_eq!((asked.texts.len(), asked.texts[150], asked.hard), (151, " hard", 1));
    }
}
