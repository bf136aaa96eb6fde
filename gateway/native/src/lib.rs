//! The compiled parts of Penstock's gateway. Python has the same in plain form, uses it where this is not installed, and tests
//! this against it.

mod accounts;
mod arrays;
mod bookings;
mod bpe;
mod chats;
mod choice;
mod coming;
mod cuts;
mod fields;
mod folded;
mod guess;
mod h2;
mod hashes;
mod hashing;
mod index;
mod messages;
mod pick;
mod prefixes;
mod price;
mod report;
mod requests;
mod residency;
mod responses;
mod text;
mod wire;
mod words;

use arrays::cells;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// The chained hashes of the full blocks of `tokens`, uint32; see `hashing::chain`. Other threads run meanwhile.
#[pyfunction]
fn chain<'py>(
    py: Python<'py>,
    parent: &[u8],
    tokens: PyBuffer<u32>,
    block_size: usize,
    every: &[u8],
    first: &[u8],
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    if block_size == 0 {
        return Err(PyValueError::new_err("a block has no tokens"));
    }
    let tokens: Vec<u32> = cells(py, &tokens)?.iter().map(|cell| cell.get()).collect();
    let names = py.detach(|| hashing::chain(parent, &tokens, block_size, every, first));
    Ok(names.iter().map(|name| PyBytes::new(py, name)).collect())
}

#[pymodule]
fn penstock_gateway_native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // Number of the interface in `penstock.gateway.picker.compiled`.
    module.add("INTERFACE", 21)?;
    module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
    module.add("FIGURES", price::FIGURES)?;
    module.add_class::<bookings::Bookings>()?;
    module.add_class::<coming::Coming>()?;
    module.add_class::<folded::Folded>()?;
    module.add_class::<h2::BlockCache>()?;
    module.add_class::<h2::Connection>()?;
    module.add_class::<h2::Exchanges>()?;
    module.add_class::<h2::Stream>()?;
    module.add_class::<hashes::BlockHashes>()?;
    module.add_class::<index::ResidencyIndex>()?;
    module.add_class::<report::ReportReader>()?;
    module.add_class::<requests::Requests>()?;
    module.add_class::<requests::Route>()?;
    module.add_class::<responses::Heads>()?;
    module.add_class::<responses::Responses>()?;
    module.add_class::<text::TextHasher>()?;
    module.add_class::<wire::Wire>()?;
    module.add_function(wrap_pyfunction!(chain, module)?)?;
    module.add_function(wrap_pyfunction!(guess::text_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(pick::rank, module)?)?;
    module.add_function(wrap_pyfunction!(pick::pick, module)?)
}
