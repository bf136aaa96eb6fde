//! Tokens of words by the merges of a byte-level BPE, for the words in whose reading no two implementations differ.
//! `penstock.gateway.load.merges` has the tokenizers that are read so.

use std::collections::HashMap as Vocabulary;
use std::fmt;

use aho_corasick::{AhoCorasick, BuildError};
use fancy_regex::Regex;
use hashbrown::HashMap;

#[rustfmt::skip]
/// Letters and marks beyond ASCII that are what they are in every version of Unicode, and in every normal form of it that composes.
const READABLE: [(char, char); 13] = [
    ('À', 'Ö'), ('Ø', 'ö'), ('ø', 'ÿ'), ('А', 'я'), ('ぁ', 'ゖ'), ('ァ', 'ヺ'), ('一', '鿌'), ('가', '힣'),
    ('–', '—'), ('‘', '’'), ('“', '”'), ('…', '…'), ('、', '。'),
];
/// Bytes of the longest word that is read: merges take time by its square.
const LONGEST: usize = 256;

/// A merge: what two tokens become, and before which others.
#[derive(Clone, Copy)]
struct Merge {
    rank: u32,
    id: u32,
}

/// The vocabulary of a byte-level BPE.
pub struct Bpe {
    /// Each cuts what the one before it has left.
    splits: Vec<Regex>,
    /// Texts that are no words where they stand in one.
    added: AhoCorasick,
    /// The tokens of single bytes.
    bytes: [u32; 256],
    merges: HashMap<(u32, u32), Merge>,
    /// Words that are tokens, though merges do not lead to them.
    whole: HashMap<Vec<u8>, u32>,
}

/// Why there is no `Bpe`.
#[derive(Debug)]
pub enum Unusable {
    Pattern(Box<fancy_regex::Error>),
    Added(BuildError),
    /// A token that is missing.
    Token(String),
}

impl fmt::Display for Unusable {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unusable::Pattern(error) => error.fmt(to),
            Unusable::Added(error) => error.fmt(to),
            Unusable::Token(token) => write!(to, "the vocabulary has no token {token}"),
        }
    }
}

impl Bpe {
    /// `whole`: a word that is in the vocabulary is one token.
    pub fn new(
        patterns: &[String],
        vocabulary: &Vocabulary<String, u32>,
        merges: &[(String, String)],
        whole: bool,
        added: &[String],
    ) -> Result<Self, Unusable> {
        let splits = patterns.iter().map(|pattern| Regex::new(pattern)).collect::<Result<_, _>>();
        let splits = splits.map_err(|error| Unusable::Pattern(Box::new(error)))?;
        let added = AhoCorasick::new(added).map_err(Unusable::Added)?;
        let token = |text: &str| vocabulary.get(text).copied().ok_or_else(|| Unusable::Token(text.to_string()));
        let letters = letters();
        let mut bytes = [0; 256];
        for (byte, letter) in letters.iter().enumerate() {
            bytes[byte] = token(&letter.to_string())?;
        }
        let mut of_pairs = HashMap::with_capacity(merges.len());
        for (rank, (left, right)) in (0..).zip(merges) {
            let merge = Merge { rank, id: token(&format!("{left}{right}"))? };
            of_pairs.insert((token(left)?, token(right)?), merge); // the last of two counts
        }
        let mut bpe = Bpe { splits, added, bytes, merges: of_pairs, whole: HashMap::new() };
        if whole {
            let of_letters: HashMap<char, u8> = (0..=u8::MAX).map(|byte| (letters[usize::from(byte)], byte)).collect();
            for (text, &id) in vocabulary {
                let Some(text) = text.chars().map(|letter| of_letters.get(&letter).copied()).collect::<Option<Vec<u8>>>() else {
                    continue;
                };
                if bpe.merged(&text) != [id] {
                    bpe.whole.insert(text, id);
                }
            }
        }
        Ok(bpe)
    }

    /// Whether it knows the tokens of a word.
    pub fn reads(&self, word: &str) -> bool {
        word.len() <= LONGEST && readable(word) && !self.added.is_match(word)
    }

    /// The tokens of a text that it `reads`; None for others, whose tokens only the tokenizer knows.
    pub fn tokens(&self, text: &str) -> Option<Vec<u32>> {
        if !self.reads(text) {
            return None;
        }
        let mut parts = vec![text];
        for split in &self.splits {
            let mut finer = Vec::with_capacity(2 * parts.len());
            for part in parts {
                let mut done = 0;
                for found in split.find_iter(part) {
                    let found = found.ok()?; // too hard for it
                    finer.extend([&part[done..found.start()], found.as_str()]);
                    done = found.end();
                }
                finer.push(&part[done..]);
            }
            finer.retain(|part| !part.is_empty());
            parts = finer;
        }
        let mut ids = Vec::with_capacity(text.len() / 2);
        for part in parts {
            match self.whole.get(part.as_bytes()) {
                Some(&id) => ids.push(id),
                None => ids.extend(self.merged(part.as_bytes())),
            }
        }
        Some(ids)
    }

    /// The first merge of all that can be made, and of equal ones the leftmost, until there is none.
    fn merged(&self, text: &[u8]) -> Vec<u32> {
        let mut ids: Vec<u32> = text.iter().map(|&byte| self.bytes[usize::from(byte)]).collect();
        let mut merges: Vec<Option<Merge>> = ids.windows(2).map(|pair| self.merge(pair[0], pair[1])).collect();
        while let Some((at, merge)) = first(&merges) {
            ids[at] = merge.id;
            ids.remove(at + 1);
            merges.remove(at);
            if at > 0 {
                merges[at - 1] = self.merge(ids[at - 1], ids[at]);
            }
            if at < merges.len() {
                merges[at] = self.merge(ids[at], ids[at + 1]);
            }
        }
        ids
    }

    fn merge(&self, left: u32, right: u32) -> Option<Merge> {
        self.merges.get(&(left, right)).copied()
    }
}

fn first(merges: &[Option<Merge>]) -> Option<(usize, Merge)> {
    let found = merges.iter().enumerate().filter_map(|(at, merge)| merge.map(|merge| (at, merge)));
    found.min_by_key(|(_, merge)| merge.rank)
}

fn readable(text: &str) -> bool {
    text.is_ascii()
        || text.chars().all(|letter| letter.is_ascii() || READABLE.iter().any(|&(from, to)| (from..=to).contains(&letter)))
}

/// The letters that stand for bytes in vocabularies: those of Latin-1 that show for themselves, others for the rest in order.
fn letters() -> [char; 256] {
    let mut rest = '\u{100}'..;
    std::array::from_fn(|byte| match char::from(byte as u8) {
        shown @ ('!'..='~' | '¡'..='¬' | '®'..='ÿ') => shown,
        _ => rest.next().unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bpe(merges: &[(&str, &str)], more: &[&str], whole: bool) -> Bpe {
        let mut texts: Vec<String> = letters().iter().map(char::to_string).collect();
        texts.extend(merges.iter().map(|(left, right)| format!("{left}{right}")).chain(more.iter().map(|text| text.to_string())));
        let vocabulary = texts.into_iter().zip(0..).collect();
        let merges: Vec<_> = merges.iter().map(|(left, right)| (left.to_string(), right.to_string())).collect();
        Bpe::new(&[r" ?\p{L}+|\s+(?!\S)|\s+".into()], &vocabulary, &merges, whole, &["<x>".into()]).unwrap()
    }

    #[test]
    fn merges_go_by_rank_and_then_from_the_left() {
        let merges = [("b", "c"), ("a", "b"), ("a", "bc"), ("a", "a"), ("Ġ", "ab")];
        let bpe = bpe(&merges, &[], false);
        let tokens = |text: &str| bpe.tokens(text).unwrap();
        assert_eq!(tokens("abc"), [258]);
        assert_eq!(tokens("aaaab"), [259, bpe.bytes[usize::from(b'a')], 257]);
        assert_eq!(tokens(" ab  ab"), [260, bpe.bytes[usize::from(b' ')], 260]);
        assert!(tokens("").is_empty());
    }

    #[test]
    fn words_that_merges_do_not_lead_to_are_tokens_where_the_vocabulary_has_them() {
        let merges = [("b", "c"), ("a", "b")];
        assert_eq!(bpe(&merges, &["abc"], false).tokens("abc").unwrap().len(), 2);
        let whole = bpe(&merges, &["abc", "ĠdÃ©"], true);
        assert_eq!((whole.tokens("abc").unwrap(), whole.tokens(" dé").unwrap()), (vec![258], vec![259]));
        assert_eq!(whole.whole.len(), 2);
    }

    #[test]
    fn only_words_that_all_read_alike_are_read() {
        let bpe = bpe(&[], &[], false);
        for text in ["e\u{301}", "a<x>", "\u{1f642}", "\u{a0}", "\u{10ffff}", &"a".repeat(LONGEST + 1)] {
            assert!(bpe.tokens(text).is_none(), "{text}");
        }
        assert_eq!(bpe.tokens("“état”—вода…").unwrap().len(), "“état”—вода…".len());
    }

    #[test]
    fn what_is_missing_is_named() {
        let merges = [("a".to_string(), "b".to_string())];
        let mut vocabulary: Vocabulary<String, u32> = letters().iter().map(char::to_string).zip(0..).collect();
        for (missing, patterns) in [("ab", vec![]), ("", vec!["(".to_string()])] {
            let error = Bpe::new(&patterns, &vocabulary, &merges, false, &[]).err().unwrap();
            assert!(matches!(error, Unusable::Token(token) if token == missing) != missing.is_empty());
        }
        vocabulary.remove("!");
        assert!(matches!(Bpe::new(&[], &vocabulary, &[], false, &[]).err(), Some(Unusable::Token(token)) if token == "!"));
    }
}
