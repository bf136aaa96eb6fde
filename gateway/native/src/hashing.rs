//! Chained block hashes: `penstock.prompt.hashing.BlockHasher.chain`.

use sha2::{Digest, Sha256};

const PARENT: usize = 32;
const TOKEN: usize = size_of::<u32>();

/// The names of the full blocks of `tokens`, one after the other: each hashes the one before it (`parent` at first), its own tokens,
/// and `every`; the first one `first` too.
pub fn chain(parent: &[u8], tokens: &[u32], block_size: usize, every: &[u8], first: &[u8]) -> Vec<[u8; PARENT]> {
    let mut names: Vec<[u8; PARENT]> = Vec::with_capacity(tokens.len() / block_size);
    let ends = PARENT + TOKEN * block_size;
    let mut message = [&vec![0; ends], every].concat(); // of a block after the first
    for block in tokens.chunks_exact(block_size) {
        for (bytes, token) in message[PARENT..ends].chunks_exact_mut(TOKEN).zip(block) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        let hash = match names.last() {
            None => Sha256::new().chain_update(parent).chain_update(&message[PARENT..]).chain_update(first).finalize(),
            Some(last) => {
                message[..PARENT].copy_from_slice(last);
                Sha256::digest(&message)
            }
        };
        names.push(hash.into());
    }
    names
}
