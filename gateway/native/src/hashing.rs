//! Chained block hashes: `penstock.prompt.hashing.BlockHasher.chain`.

use std::slice;

use sha2::digest::generic_array::GenericArray;
use sha2::{Digest, Sha256, compress256};

const PARENT: usize = 32;
const TOKEN: usize = size_of::<u32>();
/// Bytes that SHA-256 reads at a time, and what it begins with.
const PART: usize = 64;
#[rustfmt::skip]
const START: [u32; 8] = [
    0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19,
];

/// The names of the full blocks of `tokens`, one after the other: each hashes the one before it (`parent` at first), its own tokens,
/// and `every`; the first one `first` too.
pub fn chain(parent: &[u8], tokens: &[u32], block_size: usize, every: &[u8], first: &[u8]) -> Vec<[u8; PARENT]> {
    let mut names: Vec<[u8; PARENT]> = Vec::with_capacity(tokens.len() / block_size);
    let ends = PARENT + TOKEN * block_size;
    let mut message = padded(ends + every.len()); // of a block after the first
    message[ends..ends + every.len()].copy_from_slice(every);
    for block in tokens.chunks_exact(block_size) {
        for (bytes, token) in message[PARENT..ends].chunks_exact_mut(TOKEN).zip(block) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        names.push(match names.last() {
            None => {
                let rest = &message[PARENT..ends + every.len()];
                Sha256::new().chain_update(parent).chain_update(rest).chain_update(first).finalize().into()
            }
            Some(last) => {
                message[..PARENT].copy_from_slice(last);
                digest(&message)
            }
        });
    }
    names
}

/// Zeros in place of a message, with what SHA-256 puts behind it, which is the same for all messages of one size: a bit, zeros, and the
/// number of the message's bits.
fn padded(size: usize) -> Vec<u8> {
    let length = (8 * size as u64).to_be_bytes();
    let mut message = vec![0; (size + 1 + length.len()).next_multiple_of(PART)];
    message[size] = 0x80;
    let end = message.len() - length.len();
    message[end..].copy_from_slice(&length);
    message
}

/// The SHA-256 of a message that is padded.
fn digest(message: &[u8]) -> [u8; PARENT] {
    let (mut state, mut name) = (START, [0; PARENT]);
    for part in message.chunks_exact(PART) {
        compress256(&mut state, slice::from_ref(GenericArray::from_slice(part)));
    }
    name.chunks_exact_mut(size_of::<u32>()).zip(state).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_be_bytes()));
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_any_size_have_their_digests() {
        for size in 0..3 * PART {
            let mut message = padded(size);
            message[..size].fill(7);
            assert_eq!(digest(&message)[..], Sha256::digest(vec![7; size])[..], "{size}");
        }
    }
}
