//! Prompts in flight: `penstock.gateway.picker.coming` in compiled form.

use hashbrown::HashMap;
use hashlink::LinkedHashMap;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::accounts::Booking;
use crate::bookings::Bookings;
use crate::index::names;
use crate::residency::Hash;

/// Which of the prompts in flight one is: its first block that was to be computed; then the replica, the last block, and the
/// position of the first. Equal for equal prompts at one replica.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Name {
    first: Hash,
    slot: usize,
    last: Hash,
    depth: usize,
}

/// Equal prompts under way at one replica.
struct Under {
    hashes: Vec<Hash>,
    bookings: usize,
}

/// Those of all replicas. A replica is a number, a booking too.
#[derive(Default)]
pub struct Prompts {
    by_first: HashMap<Hash, HashMap<Name, Under>>,
    /// How many prompts start to compute at each position.
    depths: HashMap<usize, usize>,
    /// By booking, the oldest first.
    of: LinkedHashMap<u64, Name>,
}

impl Prompts {
    pub fn len(&self) -> usize {
        self.of.len()
    }

    /// A booking at `slot` computes the blocks `hashes` but for the first `depth`, which are fewer.
    pub fn file(&mut self, booking: u64, slot: usize, hashes: Vec<Hash>, depth: usize) {
        let (Some(&first), Some(&last)) = (hashes.get(depth), hashes.last()) else { return };
        let name = Name { first, slot, last, depth };
        let same = self.by_first.entry(first).or_default();
        let depths = &mut self.depths;
        let under = same.entry(name).or_insert_with(|| {
            *depths.entry(depth).or_default() += 1;
            Under { hashes, bookings: 0 }
        });
        under.bookings += 1;
        self.of.insert(booking, name);
    }

    /// The one that was filed first.
    pub fn oldest(&self) -> Option<u64> {
        self.of.front().map(|(&booking, _)| booking)
    }

    /// The booking computes it no more.
    pub fn forget(&mut self, booking: u64) {
        let Some(name) = self.of.remove(&booking) else { return };
        let Some(same) = self.by_first.get_mut(&name.first) else { return };
        let Some(under) = same.get_mut(&name) else { return };
        under.bookings -= 1;
        if under.bookings > 0 {
            return;
        }
        same.remove(&name);
        if same.is_empty() {
            self.by_first.remove(&name.first);
        }
        if let Some(count) = self.depths.get_mut(&name.depth) {
            *count -= 1;
            if *count == 0 {
                self.depths.remove(&name.depth);
            }
        }
    }

    /// Another replica computes it.
    pub fn moved(&mut self, booking: u64, slot: usize) {
        let Some(name) = self.of.get(&booking).copied() else { return };
        let hashes = self.by_first.get(&name.first).and_then(|same| same.get(&name)).map(|under| under.hashes.clone());
        self.forget(booking);
        self.file(booking, slot, hashes.unwrap_or_default(), name.depth);
    }

    /// Tells `found` of each replica's leading blocks that it will have of a prompt; of a replica several times.
    pub fn look(&self, hashes: &[Hash], mut found: impl FnMut(usize, usize)) {
        for &depth in self.depths.keys() {
            let same = hashes.get(depth).and_then(|first| self.by_first.get(first));
            for (name, under) in same.into_iter().flatten() {
                found(name.slot, shared(hashes, &under.hashes, depth + 1));
            }
        }
    }
}

/// Leading blocks that both have, which are `least` or more.
fn shared(one: &[Hash], other: &[Hash], mut least: usize) -> usize {
    let mut most = one.len().min(other.len());
    while least < most {
        let middle = (least + most).div_ceil(2);
        if one[middle - 1] == other[middle - 1] { least = middle } else { most = middle - 1 }
    }
    least
}

/// The prompts that bookings compute: `penstock.gateway.picker.coming.Coming`.
#[pyclass(frozen)]
pub struct Coming {
    of: Py<Bookings>,
    /// Prompts under way that are known at most.
    most: usize,
}

impl Coming {
    pub fn bookings<'py>(&self, py: Python<'py>) -> &Bound<'py, Bookings> {
        self.of.bind(py)
    }
}

#[pymethods]
impl Coming {
    #[new]
    fn new(of: Py<Bookings>, most: usize) -> Self {
        Coming { of, most }
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.of.borrow(py).coming.len()
    }

    pub fn expect(&self, booking: &Bound<'_, Booking>, hashes: &Bound<'_, PyAny>, resident_blocks: usize) -> PyResult<()> {
        if resident_blocks >= hashes.len()? {
            return Ok(());
        }
        let (names, it) = (names(hashes)?.into_owned(), booking.borrow());
        let coming = &mut self.of.borrow_mut(booking.py()).coming;
        coming.file(it.number, it.slot, names, resident_blocks);
        if coming.len() > self.most {
            coming.oldest().into_iter().for_each(|oldest| coming.forget(oldest));
        }
        Ok(())
    }

    fn found(
        &self,
        prompt: &Bound<'_, PyAny>,
        block_size: usize,
        rows: &Bound<'_, PyDict>,
        among: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<(usize, f64)>> {
        let py = rows.py();
        let (tokens, of) = (prompt.getattr(intern!(py, "tokens"))?.extract::<usize>()?, self.of.borrow(py));
        let (most, mut spans) = (tokens.saturating_sub(1) / block_size, Vec::new());
        let hashes = prompt.getattr(intern!(py, "block_hashes"))?;
        of.coming.look(&names(&hashes)?, |slot, blocks| spans.push((slot, (blocks.min(most) * block_size) as f64)));
        let mut found = Vec::with_capacity(spans.len());
        for (slot, supplied) in spans {
            let Some(account) = of.accounts[slot].as_ref() else { continue };
            if let Some(row) = rows.get_item(&account.key)? {
                if among.map_or(Ok(true), |among| among.contains(&account.key))? {
                    found.push((row.extract()?, supplied));
                }
            }
        }
        Ok(found)
    }
}
