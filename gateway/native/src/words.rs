//! Tokens of texts by the words that they are made of: what the tokenizer has said of a word once is not asked again.
//!
//! A text is cut between words, where the tokens of its words are its own (`penstock.prompt.cuts` has the proof). Words that are not
//! remembered are asked for; see `Words::read`.

use std::hash::{BuildHasher, Hasher};

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};

use crate::cuts::PieceWords;

/// Bytes of the longest word that is remembered.
const LONGEST: usize = 256;
/// Bytes of a word and its tokens together, four each, that lie in the table itself.
const ROOM: usize = 28;
/// Bytes of a token.
const TOKEN: usize = size_of::<u32>();
/// Bytes of a word that are looked at together, and tokens that are copied so.
const FIRST: usize = size_of::<u128>();
const FEW: usize = 3;
/// Words that the tokenizer is asked for one by one in a call. Beyond it the rest of a piece is asked for as one: to the tokenizer many
/// short texts cost more than a long one.
const MOST_ASKED: usize = 64;
/// Words that are looked up together.
const TOGETHER: usize = 16;

/// A word that is looked up.
#[derive(Clone, Copy, Default)]
struct Key<'a> {
    text: &'a [u8],
    /// Its first bytes, and zeros where it has no so many: to look at each byte by itself takes longer than all the rest.
    first: u128,
    hash: u64,
}

impl<'a> Key<'a> {
    /// The key of the first `size` bytes of `rest`.
    fn of(hasher: &DefaultHashBuilder, rest: &'a [u8], size: usize) -> Self {
        let first = match rest.first_chunk() {
            Some(first) => u128::from_le_bytes(*first),
            None => rest.iter().rev().fold(0, |all, &byte| all << 8 | u128::from(byte)),
        };
        let (text, first, mut hash) = (&rest[..size], first & mask(size), hasher.build_hasher());
        if size <= FIRST {
            hash.write_u128(first);
        } else {
            hash.write(text);
        }
        Key { text, first, hash: hash.finish() }
    }

    fn whole(hasher: &DefaultHashBuilder, text: &'a [u8]) -> Self {
        Key::of(hasher, text, text.len())
    }
}

/// The bits of so many bytes.
fn mask(size: usize) -> u128 {
    if size < FIRST { !(u128::MAX << (8 * size)) } else { u128::MAX }
}

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
        if usize::from(self.length) + TOKEN * usize::from(self.count) <= ROOM {
            return &self.bytes;
        }
        let [a, b, c, d, ..] = self.bytes;
        &long[u32::from_le_bytes([a, b, c, d]) as usize..]
    }

    fn text<'a>(&'a self, long: &'a [u8]) -> &'a [u8] {
        &self.bytes(long)[..usize::from(self.length)]
    }

    #[inline]
    fn is(&self, key: &Key<'_>, long: &[u8]) -> bool {
        let size = key.text.len();
        usize::from(self.length) == size
            && self.bytes(long).first_chunk().is_some_and(|first| u128::from_le_bytes(*first) & mask(size) == key.first)
            && (size <= FIRST || self.text(long) == key.text)
    }

    /// Adds the tokens to `into`.
    fn tokens(&self, long: &[u8], into: &mut Vec<u32>) {
        let (bytes, count) = (&self.bytes(long)[usize::from(self.length)..], usize::from(self.count));
        match bytes.first_chunk::<{ FEW * TOKEN }>() {
            // As many for each, and then those taken back that are none: nobody can foresee where a loop would end.
            Some(few) if count <= FEW => {
                into.extend(numbers(few));
                into.truncate(into.len() + count - FEW);
            }
            _ => into.extend(numbers(&bytes[..TOKEN * count])),
        }
    }
}

/// Has memory come that will be looked at soon. Nobody waits for it.
fn prefetch<T>(what: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: it is a hint, which no address makes wrong.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(std::ptr::from_ref(what).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::hint::black_box(what);
}

/// Words that have been used since a time.
#[derive(Default)]
struct Generation {
    words: HashTable<Word>,
    /// Texts and tokens of words that are too long for the table.
    long: Vec<u8>,
}

impl Generation {
    /// Adds the tokens of a word to `into`; whether it is there.
    fn read(&self, key: &Key<'_>, into: &mut Vec<u32>) -> bool {
        let word = self.words.find(key.hash, |word| word.is(key, &self.long));
        word.map(|word| word.tokens(&self.long, into)).is_some()
    }

    /// Adds a word that is not there.
    fn add(&mut self, hasher: &DefaultHashBuilder, key: &Key<'_>, ids: &[u32]) {
        let (Ok(length), Ok(count)) = (key.text.len().try_into(), ids.len().try_into()) else { return };
        let (mut word, ids) = (Word { length, count, bytes: [0; ROOM] }, ids.iter().flat_map(|id| id.to_le_bytes()));
        let all: Vec<u8> = key.text.iter().copied().chain(ids).collect();
        if let Some(room) = word.bytes.get_mut(..all.len()) {
            room.copy_from_slice(&all);
        } else {
            let Ok(at) = u32::try_from(self.long.len()) else { return };
            word.bytes[..4].copy_from_slice(&at.to_le_bytes());
            self.long.extend_from_slice(&all);
        }
        let long = &self.long;
        self.words.insert_unique(key.hash, word, |word| Key::whole(hasher, word.text(long)).hash);
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
    key: Key<'a>,
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
        let (mut batches, mut counts) = ([[Next::default(); TOGETHER]; 2], [0; 2]);
        for turn in (0..2).cycle() {
            counts[turn] = self.fetch(&mut words, &mut batches[turn]);
            let before = 1 - turn;
            for &Next { word, rest, ref key } in &batches[before][..counts[before]] {
                if self.known(key, &mut read.ids) {
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
            if counts[turn] == 0 {
                break;
            }
        }
        read
    }

    /// Fills `next` with the next words; returns how many there are. Has the memory of all their places in the table come while the
    /// words before them are looked up: to wait for it is what looking up words costs.
    fn fetch<'a>(&self, words: &mut PieceWords<'a, '_>, next: &mut [Next<'a>; TOGETHER]) -> usize {
        let mut count = 0;
        for it in next.iter_mut() {
            let rest = words.rest();
            let Some(word) = words.next() else { break };
            *it = Next { word, rest, key: Key::of(&self.hasher, rest.as_bytes(), word.len()) };
            count += 1;
        }
        next[..count].iter().filter_map(|it| self.young.words.find(it.key.hash, |_| true)).for_each(prefetch);
        count
    }

    /// Remembers the words among what was asked for.
    pub fn learn(&mut self, asked: &Asked<'_>, answers: &[Vec<u32>]) {
        for (text, &which) in &asked.words {
            if let Some(ids) = answers.get(which) {
                self.add(&Key::whole(&self.hasher, text.as_bytes()), ids);
            }
        }
    }

    fn known(&mut self, key: &Key<'_>, into: &mut Vec<u32>) -> bool {
        if self.young.read(key, into) {
            return true;
        }
        let before = into.len();
        let found = self.old.read(key, into);
        if found {
            self.add(key, &into[before..]);
        }
        found
    }

    /// Two threads may learn a word at the same time: it is then kept once.
    fn add(&mut self, key: &Key<'_>, ids: &[u32]) {
        if self.young.words.find(key.hash, |word| word.is(key, &self.young.long)).is_some() {
            return;
        }
        let size = key.text.len() + TOKEN * ids.len();
        if self.young.words.len() >= self.most || self.young.long.len() + size > self.most_long {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.add(&self.hasher, key, ids);
    }
}

fn numbers(ids: &[u8]) -> impl Iterator<Item = u32> {
    ids.chunks_exact(TOKEN).map(|id| u32::from_le_bytes([id[0], id[1], id[2], id[3]]))
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
        memo.known(&Key::whole(&memo.hasher.clone(), text.as_bytes()), &mut ids).then_some(ids)
    }

    fn add(memo: &mut Words, text: &str, ids: &[u32]) {
        memo.add(&Key::whole(&memo.hasher.clone(), text.as_bytes()), ids);
    }

    #[test]
    fn generations_forget() {
        for (most, most_long, long) in [(2, 1000, ""), (1000, 520, &*"x".repeat(230))] {
            let mut memo = Words::new(most, most_long);
            let word = |name: &str| format!("{name}{long}");
            for (at, name) in ["a", "b", "c"].into_iter().enumerate() {
                add(&mut memo, &word(name), &[at as u32; 7]);
            }
            assert_eq!(known(&mut memo, &word("a")), Some(vec![0; 7])); // and is young again
            for name in ["d", "e"] {
                add(&mut memo, &word(name), &[9]);
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
    fn words_of_one_hash_differ_by_each_of_their_bytes() {
        let mut memo = Words::new(1000, 1 << 20);
        for (length, tokens) in [1, 7, 15, 16, 17, 40].into_iter().flat_map(|length| [(length, 0), (length, 4), (length, 9)]) {
            let word = vec![b'x' + tokens as u8; length];
            let hash = Key::whole(&memo.hasher, &word).hash;
            let read = |memo: &Words, text: &[u8]| {
                let (key, mut ids) = (Key { hash, ..Key::whole(&memo.hasher, text) }, vec![5]);
                memo.young.read(&key, &mut ids).then_some(ids)
            };
            memo.add(&Key::whole(&memo.hasher.clone(), &word), &vec![8; tokens]);
            assert_eq!(read(&memo, &word), Some([&[5][..], &vec![8; tokens]].concat()));
            for at in 0..length {
                let mut other = word.clone();
                other[at] = b'!';
                assert_eq!(read(&memo, &other), None);
            }
            assert_eq!(read(&memo, &[&word[..], b"\0"].concat()), None);
        }
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
