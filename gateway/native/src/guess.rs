//! About how much text a body has: `penstock.gateway.load.tokenized.text_bytes`.

use memchr::{memchr, memmem};
use pyo3::prelude::*;

/// The bytes of `body` but for the files in it: what begins with `opening` and has no space before its closing quote.
#[pyfunction]
pub fn text_bytes(body: &[u8], opening: &[u8]) -> usize {
    let find = memmem::Finder::new(opening);
    let (mut text, mut at) = (body.len(), 0);
    while let Some(start) = find.find(&body[at..]).map(|found| at + found) {
        let inside = start + opening.len();
        let Some(end) = memchr(b'"', &body[inside..]).map(|found| inside + found) else { break };
        if memchr(b' ', &body[start..end]).is_none() {
            text -= end - start;
        }
        at = end;
    }
    text
}
