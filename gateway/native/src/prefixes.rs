//! What is known of texts by their beginnings, so that a conversation pays for its new part alone: `penstock.prompt.memo`.

use std::hash::Hasher;

use hashlink::LinkedHashMap;
use siphasher::sip128::{Hasher128, SipHasher13};

use crate::cuts::ends_word;
use crate::residency::Hash;

/// What a piece takes besides its hashes and its tail.
const NODE_BYTES: usize = 256;

/// The pieces of a text whose tokens are those of its words. Where two texts begin alike, so do their pieces, but for the last of
/// the shorter. A piece has `least` bytes, and as a rule few more.
pub fn pieces(text: &str, least: usize) -> Vec<&str> {
    let (mut pieces, mut start) = (Vec::with_capacity(text.len() / least + 1), 0);
    while let Some(end) = (start + least..text.len()).find(|&at| ends_word(text, at)) {
        pieces.push(&text[start..end]);
        start = end;
    }
    pieces.push(&text[start..]);
    pieces
}

/// What the next piece needs of those before it.
#[derive(Clone, Default)]
pub struct End {
    /// Tokens from the start of the prompt.
    pub tokens: usize,
    /// Name of the last complete block.
    pub parent: Option<Hash>,
    /// Tokens after that block.
    pub tail: Vec<u32>,
}

/// What is known of a piece.
#[derive(Clone, Default)]
pub struct Node {
    /// Names of the blocks that it completes.
    pub names: Vec<Hash>,
    pub end: End,
}

/// The pieces at the beginning of a text that are remembered.
#[derive(Default)]
pub struct Known {
    /// How many.
    pub pieces: usize,
    /// Names of their blocks.
    pub names: Vec<Hash>,
    pub end: End,
}

/// Pieces by all that stands before them and themselves; those that were used least recently go first.
pub struct Prefixes {
    nodes: LinkedHashMap<u128, Node>,
    bytes: usize,
    most_bytes: usize,
}

impl Prefixes {
    pub fn new(most_bytes: usize) -> Self {
        Prefixes { nodes: LinkedHashMap::new(), bytes: 0, most_bytes }
    }

    /// The longest run of `keys` from the first on that is remembered.
    pub fn known(&mut self, keys: &[u128]) -> Known {
        let mut known = Known::default();
        for key in keys {
            let Some(node) = self.nodes.to_back(key) else { break };
            known.pieces += 1;
            known.names.extend_from_slice(&node.names);
            known.end.clone_from(&node.end);
        }
        known
    }

    /// Remembers pieces. Two threads may read the same: it is then kept once.
    pub fn add(&mut self, keys: &[u128], nodes: Vec<Node>) {
        for (&key, node) in keys.iter().zip(nodes) {
            self.bytes += bytes(&node);
            if let Some(former) = self.nodes.insert(key, node) {
                self.bytes -= bytes(&former);
            }
        }
        while self.bytes > self.most_bytes {
            let Some((_, oldest)) = self.nodes.pop_front() else { return };
            self.bytes -= bytes(&oldest);
        }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

fn bytes(node: &Node) -> usize {
    NODE_BYTES + size_of_val(node.names.as_slice()) + size_of_val(node.end.tail.as_slice())
}

/// Names pieces. Texts are not kept: who could make two of one name could have one be taken for the other, so the names come of a
/// key that nobody else knows.
pub struct Namer(SipHasher13);

impl Namer {
    pub fn new(key: [u8; 16]) -> Self {
        Namer(SipHasher13::new_with_key(&key))
    }

    /// What names the pieces of a text, which is under these keys and has these tokens before it.
    pub fn of(&self, every: &[u8], first: &[u8], before: &[u32]) -> Names {
        let mut hasher = self.0;
        for bytes in [every, first] {
            hasher.write(&bytes.len().to_le_bytes());
            hasher.write(bytes);
        }
        hasher.write(&before.len().to_le_bytes());
        for id in before {
            hasher.write(&id.to_le_bytes());
        }
        Names(hasher)
    }
}

/// Names the pieces of one text, in order.
pub struct Names(SipHasher13);

impl Names {
    /// The name of the next piece; `last`: tokens follow it.
    pub fn next(&mut self, piece: &str, last: bool) -> u128 {
        self.0.write(piece.as_bytes());
        let mut hasher = self.0;
        hasher.write(&[u8::from(last)]);
        hasher.finish128().as_u128()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_between_words() {
        const PIECE: usize = 100;
        let pieces = |text| pieces(text, PIECE);
        let text = "word ".repeat(200);
        let found = pieces(&text);
        assert_eq!(found.concat(), text);
        assert!(found.len() > 3 && found[..found.len() - 1].iter().all(|piece| (PIECE..PIECE + 5).contains(&piece.len())));
        assert!(found[1..].iter().all(|piece| piece.starts_with(" word")));
        let longer = text.clone() + "and more";
        assert_eq!(pieces(&longer)[..found.len() - 1], found[..found.len() - 1]);
        for whole in ["", &"x".repeat(3 * PIECE), &"水".repeat(2 * PIECE), &"1\n".repeat(2 * PIECE)] {
            assert_eq!(pieces(whole), [whole]);
        }
    }

    #[test]
    fn names_differ_by_all_before_by_keys_and_at_the_end() {
        let names = |key: u8, every: &[u8], first: &[u8], before: &[u32], pieces: &[&str], last: bool| -> Vec<u128> {
            let mut names = Namer::new([key; 16]).of(every, first, before);
            pieces.iter().map(|piece| names.next(piece, last)).collect()
        };
        let base = names(7, b"a", b"", &[1], &["x", "y"], false);
        assert_eq!(base, names(7, b"a", b"", &[1], &["x", "y"], false));
        for other in [
            names(8, b"a", b"", &[1], &["x", "y"], false),
            names(7, b"", b"a", &[1], &["x", "y"], false),
            names(7, b"a", b"", &[], &["x", "y"], false),
            names(7, b"a", b"", &[2], &["x", "y"], false),
            names(7, b"a", b"", &[1], &["z", "y"], false),
            names(7, b"a", b"", &[1], &["x", "y"], true),
        ] {
            assert!(other.iter().all(|name| !base.contains(name)));
        }
    }

    #[test]
    fn what_was_used_least_recently_goes_first() {
        let mut prefixes = Prefixes::new(3 * (NODE_BYTES + 32));
        let node = |tokens| Node { names: vec![[tokens; 32]], end: End { tokens: tokens.into(), ..End::default() } };
        prefixes.add(&[0, 1, 2], vec![node(0), node(1), node(2)]);
        assert_eq!(prefixes.known(&[0, 9, 1]).pieces, 1);
        prefixes.add(&[2], vec![node(2)]);
        assert_eq!(prefixes.bytes(), 3 * (NODE_BYTES + 32));
        prefixes.add(&[3], vec![node(3)]);
        let left: Vec<usize> = (0..4).map(|key| prefixes.known(&[key]).pieces).collect();
        assert_eq!(left, [1, 0, 1, 1]);
        let known = prefixes.known(&[0, 3, 1]);
        assert_eq!((known.pieces, known.names, known.end.tokens), (2, vec![[0; 32], [3; 32]], 3));
    }
}
