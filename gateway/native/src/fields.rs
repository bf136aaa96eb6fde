//! Fields of protobuf's messages, written as bytes: whatever has bytes of its own, which are texts and messages, too.

use prost::encode_length_delimiter;

/// What goes before `size` bytes of the field `number`, which is below 16.
pub fn head(number: u8, size: usize) -> Vec<u8> {
    let mut out = vec![number << 3 | 2];
    encode_length_delimiter(size, &mut out).expect("a vector grows");
    out
}

/// The field `number` of these parts, one behind the other.
pub fn field(number: u8, parts: &[&[u8]]) -> Vec<u8> {
    let mut out = head(number, parts.iter().map(|part| part.len()).sum());
    parts.iter().for_each(|part| out.extend_from_slice(part));
    out
}

/// What is in a map: its field is 1, as in `Struct`.
pub fn entry(name: &str, value: &[u8]) -> Vec<u8> {
    field(1, &[&field(1, &[name.as_bytes()]), &field(2, &[value])])
}
