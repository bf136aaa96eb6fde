//! Tokens of texts by the words that they are made of: what the tokenizer has said of a word once is not asked again.
//!
//! A text is cut between words, where the tokens of its words are its own (`penstock.prompt.cuts` has the proof). Words that are not
//! remembered are asked for; see `Words::read`.

use std::hash::BuildHasher;
use std::ops::Range;

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};

/// Bytes of the longest word that is remembered.
const LONGEST: usize = 64;
/// Bytes of a remembered word and its tokens together, four each.
const ROOM: usize = 126;
/// Texts that are asked for one by one in a call. Beyond it the rest of a piece is asked for as one: to the tokenizer many short texts
/// cost more than a long one.
const MOST_ASKED: usize = 64;
/// Letters beyond ASCII after which a word may end, as in `penstock.prompt.cuts`.
const LETTERS: [(char, char); 6] = [('а', 'я'), ('А', 'Я'), ('ぁ', 'ゖ'), ('ァ', 'ヺ'), ('一', '鿿'), ('가', '힣')];

/// A word and its tokens, side by side: looking up words by lot is a matter of how much memory each touches.
#[repr(align(64))]
struct Word {
    length: u8,
    count: u8,
    bytes: [u8; ROOM],
}

impl Word {
    /// None where it is too long.
    fn new(text: &str, ids: &[u32]) -> Option<Self> {
        let mut word = Word { length: text.len().try_into().ok()?, count: ids.len().try_into().ok()?, bytes: [0; ROOM] };
        let (of_text, rest) = word.bytes.split_at_mut_checked(text.len())?;
        of_text.copy_from_slice(text.as_bytes());
        for (at, id) in ids.iter().enumerate() {
            rest.get_mut(4 * at..4 * at + 4)?.copy_from_slice(&id.to_le_bytes());
        }
        Some(word)
    }

    fn text(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }

    fn ids(&self) -> impl Iterator<Item = u32> {
        let ids = self.bytes[usize::from(self.length)..].chunks_exact(4).take(usize::from(self.count));
        ids.map(|id| u32::from_le_bytes([id[0], id[1], id[2], id[3]]))
    }
}

/// The words of one tokenizer, in two generations: when the young one is full it becomes the old one, which is forgotten but for
/// what is used again.
pub struct Words {
    most: usize,
    hasher: DefaultHashBuilder,
    young: HashTable<Word>,
    old: HashTable<Word>,
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

/// What the tokenizer is asked for in one call.
#[derive(Default)]
pub struct Asked<'a> {
    /// The texts, each of which is one word or several.
    pub texts: Vec<&'a str>,
    /// Those that are words to be remembered, by their places in `texts`.
    words: HashMap<&'a str, usize>,
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
    /// At most `most` words a generation.
    pub fn new(most: usize) -> Self {
        Words { most, hasher: DefaultHashBuilder::default(), young: HashTable::new(), old: HashTable::new() }
    }

    /// Reads a piece; adds to `asked` what is not remembered of it.
    pub fn read<'a>(&mut self, piece: &'a str, asked: &mut Asked<'a>) -> Read {
        let mut read = Read::default();
        let mut start = 0;
        while start < piece.len() {
            let word = Range { start, end: end_of_word(piece, start) };
            start = word.end;
            if self.known(&piece[word.clone()], &mut read.ids) {
                continue;
            }
            let which = if asked.texts.len() < MOST_ASKED {
                asked.word(&piece[word])
            } else if let Some(&which) = asked.words.get(&piece[word.clone()]) {
                which
            } else {
                start = piece.len();
                asked.text(&piece[word.start..])
            };
            read.gaps.push((read.ids.len(), which));
        }
        read
    }

    /// Remembers the words among what was asked for.
    pub fn learn(&mut self, asked: &Asked<'_>, answers: &[Vec<u32>]) {
        for (&text, &which) in &asked.words {
            if let Some(word) = answers.get(which).and_then(|ids| Word::new(text, ids)) {
                self.add(word);
            }
        }
    }

    fn known(&mut self, text: &str, ids: &mut Vec<u32>) -> bool {
        let hash = self.hasher.hash_one(text.as_bytes());
        if let Some(found) = self.young.find(hash, |word| word.text() == text.as_bytes()) {
            ids.extend(found.ids());
            return true;
        }
        let Ok(found) = self.old.find_entry(hash, |word| word.text() == text.as_bytes()) else {
            return false;
        };
        let (word, _) = found.remove();
        ids.extend(word.ids());
        self.add(word);
        true
    }

    /// Two threads may learn a word at the same time: it is then kept once.
    fn add(&mut self, word: Word) {
        let hash = self.hasher.hash_one(word.text());
        if self.young.find(hash, |other| other.text() == word.text()).is_some() {
            return;
        }
        if self.young.len() >= self.most {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert_unique(hash, word, |word| self.hasher.hash_one(word.text()));
    }
}

/// Where the word that begins at `start` ends: before a space that follows anything but a space, or a line feed that follows a letter.
fn end_of_word(text: &str, start: usize) -> usize {
    let bytes = text.as_bytes();
    (start + 1..bytes.len())
        .find(|&at| match bytes[at] {
            b' ' => bytes[at - 1].is_ascii_graphic() || ends_in_letter(&text[..at]),
            b'\n' => ends_in_letter(&text[..at]),
            _ => false,
        })
        .unwrap_or(bytes.len())
}

fn ends_in_letter(text: &str) -> bool {
    text.chars().next_back().is_some_and(|last| {
        last.is_ascii_alphabetic() || (!last.is_ascii() && LETTERS.iter().any(|&(from, to)| (from..=to).contains(&last)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<&str> {
        let (mut found, mut start) = (Vec::new(), 0);
        while start < text.len() {
            let end = end_of_word(text, start);
            found.push(&text[start..end]);
            start = end;
        }
        found
    }

    #[test]
    fn words_end_before_spaces() {
        assert_eq!(
            words("Well, two  words\n\nof 7: état вода 水 \n x"),
            ["Well,", " two", "  words", "\n\nof", " 7:", " état", " вода", " 水", " \n x"]
        );
        assert_eq!(words("caf\u{e9} au 1\n2"), ["caf\u{e9} au", " 1\n2"]);
        assert!(words("").is_empty());
    }

    #[test]
    fn generations_forget() {
        let mut memo = Words::new(2);
        for (at, word) in ["a", "b", "c"].into_iter().enumerate() {
            memo.add(Word::new(word, &[at as u32]).unwrap());
        }
        assert!(memo.known("a", &mut Vec::new())); // and is young again
        for word in ["d", "e"] {
            memo.add(Word::new(word, &[9]).unwrap());
        }
        assert!(!memo.known("b", &mut Vec::new()));
        assert!(memo.young.len() <= 2 && memo.old.len() <= 2);
    }

    #[test]
    fn long_words_are_left_out() {
        let ids: Vec<u32> = (0..31).map(|n| u32::MAX - n).collect();
        assert!(Word::new("abc", &ids).is_none());
        let word = Word::new("ab", &ids).unwrap();
        assert_eq!((word.text(), word.ids().collect()), ("ab".as_bytes(), ids));
        assert!(Word::new(&"a".repeat(127), &[]).is_none() && Word::new(&"a".repeat(300), &[1]).is_none());
    }

    #[test]
    fn the_rest_of_a_long_piece_is_asked_for_as_one() {
        let text = (0..200).map(|n| format!(" word{n}x")).collect::<String>();
        let (mut memo, mut asked) = (Words::new(1000), Asked::default());
        let read = memo.read(&text, &mut asked);
        assert_eq!(asked.texts.len(), MOST_ASKED + 1);
        let answers: Vec<Vec<u32>> = asked.texts.iter().map(|text| text.bytes().map(u32::from).collect()).collect();
        memo.learn(&asked, &answers);
        assert_eq!(read.filled(&answers), Some(text.bytes().map(u32::from).collect()));
        assert!(Read { ids: vec![], gaps: vec![(0, 1)] }.filled(&[]).is_none());
        let mut again = Asked::default();
        memo.read(&text, &mut again);
        assert_eq!(again.texts[0], " word64x");
    }
}
