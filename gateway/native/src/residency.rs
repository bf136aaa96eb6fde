//! Which replica caches which block: `penstock.gateway.residency.index` in memory without Python's objects.
//!
//! Replicas are bits here. A block's hash holds its whole prefix, so the longest cached prefix of a prompt, for all replicas at
//! once, is a walk along its hashes that keeps the bits which no block has cleared yet.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use hashlink::LinkedHashSet;
use sha2::{Digest, Sha256};

/// Name of a block.
pub type Hash = [u8; 32];

/// Blocks of an emptied replica that are swept at a time.
pub const SWEPT_AT_ONCE: usize = 1024;
/// A replica at its bound evicts this fraction of its blocks at once.
const BATCHES: usize = 64;
/// Share of a bound from which on the order of use is kept up to date: below, nothing will be dropped.
const NEARLY: f64 = 0.9;
const WORD: usize = u64::BITS as usize;

/// A block's name as the index knows it. Ours have 32 bytes; others are known by their SHA-256.
pub fn name(of: &[u8]) -> Hash {
    of.try_into().unwrap_or_else(|_| Sha256::digest(of).into())
}

/// The bits of a block. Most blocks are cached once.
enum Mask {
    One(u32),
    // Boxed, so that the mask of a block takes 16 bytes and not 24.
    #[allow(clippy::box_collection)]
    Many(Box<Vec<u64>>),
}

impl Mask {
    fn word(&self, at: usize) -> u64 {
        match self {
            Mask::One(bit) => word_of(*bit as usize, at),
            Mask::Many(words) => words.get(at).copied().unwrap_or(0),
        }
    }

    fn set(&mut self, bit: usize) {
        if let Mask::One(only) = *self {
            let mut words = Vec::new();
            set(&mut words, only as usize);
            *self = Mask::Many(Box::new(words));
        }
        if let Mask::Many(words) = self {
            set(words, bit);
        }
    }

    /// Whether any bit is left without `bit`.
    fn clear(&mut self, bit: usize) -> bool {
        match self {
            Mask::One(only) => *only as usize != bit,
            Mask::Many(words) => {
                if let Some(word) = words.get_mut(bit / WORD) {
                    *word &= !(1 << (bit % WORD));
                }
                words.iter().any(|&word| word != 0)
            }
        }
    }
}

fn word_of(bit: usize, at: usize) -> u64 {
    if bit / WORD == at { 1 << (bit % WORD) } else { 0 }
}

fn set(words: &mut Vec<u64>, bit: usize) {
    if words.len() <= bit / WORD {
        words.resize(bit / WORD + 1, 0);
    }
    words[bit / WORD] |= 1 << (bit % WORD);
}

/// The numbers of the bits in `words`.
pub fn ones(words: &[u64]) -> impl Iterator<Item = usize> {
    words.iter().enumerate().flat_map(|(at, &word)| {
        let mut left = word;
        std::iter::from_fn(move || {
            let bit = (left != 0).then(|| left.trailing_zeros() as usize)?;
            left &= left - 1;
            Some(at * WORD + bit)
        })
    })
}

/// One replica's blocks under one bit.
struct Holder {
    limit: usize,
    /// Place among the replicas by when they became known: of equally large ones the first is evicted from.
    place: u64,
    /// In the order of their last use.
    blocks: LinkedHashSet<Hash>,
}

/// Blocks of all replicas. Both bounds are in blocks; a block counts at each replica that caches it.
pub struct Blocks {
    per_replica: usize,
    total: usize,
    bits: HashMap<Hash, Mask>,
    holders: Vec<Option<Holder>>,
    /// The bits of `holders`.
    live: Vec<u64>,
    free: Vec<usize>,
    /// What emptied replicas have left, by their bits.
    dead: Vec<(usize, LinkedHashSet<Hash>)>,
    places: u64,
    pub entries: usize,
    /// Blocks that the bounds have cost.
    pub dropped: usize,
    /// Rises when a bit gets or loses its replica.
    pub version: u64,
}

impl Blocks {
    pub fn new(per_replica: usize, total: usize) -> Self {
        Blocks {
            per_replica,
            total,
            bits: HashMap::new(),
            holders: Vec::new(),
            live: Vec::new(),
            free: Vec::new(),
            dead: Vec::new(),
            places: 0,
            entries: 0,
            dropped: 0,
            version: 0,
        }
    }

    /// Different blocks, those still to be swept included.
    pub fn len(&self) -> usize {
        self.bits.len()
    }

    /// How many bits there have been at once.
    pub fn width(&self) -> usize {
        self.holders.len()
    }

    /// A bit for a new replica.
    pub fn open(&mut self) -> usize {
        self.places += 1;
        self.put(self.per_replica, self.places)
    }

    fn put(&mut self, limit: usize, place: u64) -> usize {
        let bit = self.free.pop().unwrap_or(self.holders.len());
        if bit == self.holders.len() {
            self.holders.push(None);
        }
        self.holders[bit] = Some(Holder { limit, place, blocks: LinkedHashSet::new() });
        set(&mut self.live, bit);
        self.version += 1;
        bit
    }

    fn holder(&self, bit: usize) -> &Holder {
        self.holders[bit].as_ref().expect("a bit in use")
    }

    fn holder_mut(&mut self, bit: usize) -> &mut Holder {
        self.holders[bit].as_mut().expect("a bit in use")
    }

    /// How many blocks the replica is known to cache.
    pub fn blocks(&self, bit: usize) -> usize {
        self.holder(bit).blocks.len()
    }

    pub fn holds(&self, bit: usize, block: &Hash) -> bool {
        self.holder(bit).blocks.contains(block)
    }

    /// How many blocks of the replica are kept at most.
    pub fn limit(&self, bit: usize) -> usize {
        self.holder(bit).limit
    }

    pub fn per_replica(&self) -> usize {
        self.per_replica
    }

    pub fn set_limit(&mut self, bit: usize, blocks: usize) {
        self.holder_mut(bit).limit = blocks.clamp(1, self.per_replica);
        self.enforce(bit);
    }

    pub fn set_total(&mut self, blocks: usize) {
        self.total = blocks.max(1);
        self.enforce_total();
    }

    /// The replica caches these blocks now; those it cached already have been used.
    pub fn store(&mut self, bit: usize, hashes: impl Iterator<Item = Hash>) {
        let holder = self.holders[bit].as_mut().expect("a bit in use");
        let before = holder.blocks.len();
        for block in hashes {
            if holder.blocks.to_back(&block) {
                continue;
            }
            holder.blocks.insert(block);
            match self.bits.entry(block) {
                Entry::Occupied(mut others) => others.get_mut().set(bit),
                Entry::Vacant(entry) => {
                    entry.insert(Mask::One(bit as u32));
                }
            }
        }
        let after = holder.blocks.len();
        let above = after > holder.limit;
        self.entries += after - before;
        self.sweep(SWEPT_AT_ONCE);
        if above || self.entries > self.total {
            self.enforce(bit);
        }
    }

    /// A request that begins with these blocks runs at the replica: those that are known there are the last to be dropped.
    pub fn used(&mut self, bit: usize, hashes: impl Iterator<Item = Hash>) {
        let holder = self.holder_mut(bit);
        for block in hashes {
            holder.blocks.to_back(&block);
        }
    }

    /// Whether a bound is near enough for the order of use to matter.
    pub fn nearly_full(&self, bit: usize) -> bool {
        let (holder, near) = (self.holder(bit), |count: usize, of: usize| count as f64 >= NEARLY * of as f64);
        near(holder.blocks.len(), holder.limit) || near(self.entries, self.total)
    }

    /// The replica caches these blocks no more; unknown ones are ignored.
    pub fn remove(&mut self, bit: usize, hashes: impl Iterator<Item = Hash>) {
        for block in hashes {
            if self.holder_mut(bit).blocks.remove(&block) {
                self.entries -= 1;
                clear_bit(&mut self.bits, block, bit);
            }
        }
    }

    /// The replica caches nothing that is known; its bit from now on.
    pub fn clear(&mut self, bit: usize) -> usize {
        let (limit, place) = (self.limit(bit), self.holder(bit).place);
        if self.blocks(bit) == 0 {
            return bit;
        }
        self.retire(bit);
        self.put(limit, place)
    }

    /// The replica is gone: no walk sees its bit any more, and its blocks are swept later.
    pub fn retire(&mut self, bit: usize) {
        let holder = self.holders[bit].take().expect("a bit in use");
        self.live[bit / WORD] &= !(1 << (bit % WORD));
        self.version += 1;
        let count = holder.blocks.len();
        self.entries -= count;
        self.dead.push((bit, holder.blocks));
        if count <= SWEPT_AT_ONCE {
            self.sweep(count + 1);
        }
    }

    /// Forgets up to `limit` blocks that emptied replicas have left; returns how many are still to go.
    pub fn sweep(&mut self, mut limit: usize) -> usize {
        while limit > 0 {
            let Some((bit, blocks)) = self.dead.last_mut() else { break };
            while limit > 0 {
                let Some(block) = blocks.pop_back() else { break };
                clear_bit(&mut self.bits, block, *bit);
                limit -= 1;
            }
            if blocks.is_empty() {
                self.free.push(*bit);
                self.dead.pop();
            }
        }
        self.dead.iter().map(|(_, blocks)| blocks.len()).sum()
    }

    /// Calls `end` with the bits of the replicas that cache just so many leading blocks of `hashes`, and that number: each replica
    /// that caches any is in one of these calls.
    pub fn walk(&self, hashes: impl Iterator<Item = Hash>, mut end: impl FnMut(&[u64], usize)) {
        let mut alive = self.live.clone();
        let mut ended = vec![0; alive.len()];
        let mut depth = 0;
        for block in hashes {
            let Some(mask) = self.bits.get(&block) else { break };
            let mut changed = false;
            for (at, word) in alive.iter_mut().enumerate() {
                let still = *word & mask.word(at);
                ended[at] = *word ^ still;
                changed |= ended[at] != 0;
                *word = still;
            }
            if changed {
                if depth > 0 {
                    end(&ended, depth);
                }
                if alive.iter().all(|&word| word == 0) {
                    return;
                }
            }
            depth += 1;
        }
        if depth > 0 {
            end(&alive, depth);
        }
    }

    /// Drops what has been used least recently: at a replica above its bound, then at the one with most blocks.
    fn enforce(&mut self, bit: usize) {
        let (limit, count) = (self.limit(bit), self.blocks(bit));
        if count > limit {
            self.evict(bit, (count - limit).max(limit / BATCHES));
        }
        self.enforce_total();
    }

    fn enforce_total(&mut self) {
        while self.entries > self.total {
            let holders = self.holders.iter().enumerate().filter_map(|(bit, holder)| Some((bit, holder.as_ref()?)));
            let Some((largest, _)) = holders.max_by_key(|(_, holder)| (holder.blocks.len(), u64::MAX - holder.place)) else {
                break;
            };
            self.evict(largest, (self.entries - self.total).max(self.total / BATCHES));
        }
    }

    fn evict(&mut self, bit: usize, count: usize) {
        for _ in 0..count {
            let Some(block) = self.holder_mut(bit).blocks.pop_front() else { break };
            self.entries -= 1;
            self.dropped += 1;
            clear_bit(&mut self.bits, block, bit);
        }
    }
}

fn clear_bit(bits: &mut HashMap<Hash, Mask>, block: Hash, bit: usize) {
    if let Entry::Occupied(mut mask) = bits.entry(block) {
        if !mask.get_mut().clear(bit) {
            mask.remove();
        }
    }
}
