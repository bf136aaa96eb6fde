//! Chained block hashes: `penstock.prompt.hashing.BlockHasher.chain`.

use sha2::{Digest, Sha256};

/// The names of the full blocks of `tokens`, one after the other: each hashes the one before it (`parent` at first), its own tokens,
/// and `every`; the first one `first` too.
pub fn chain(parent: &[u8], tokens: &[u32], block_size: usize, every: &[u8], first: &[u8]) -> Vec<[u8; 32]> {
    let mut names: Vec<[u8; 32]> = Vec::with_capacity(tokens.len() / block_size);
    let mut bytes = Vec::with_capacity(4 * block_size);
    for block in tokens.chunks_exact(block_size) {
        bytes.clear();
        bytes.extend(block.iter().flat_map(|token| token.to_le_bytes()));
        let hash = match names.last() {
            None => Sha256::new().chain_update(parent).chain_update(&bytes).chain_update(every).chain_update(first),
            Some(last) => Sha256::new().chain_update(last).chain_update(&bytes).chain_update(every),
        };
        names.push(hash.finalize().into());
    }
    names
}
