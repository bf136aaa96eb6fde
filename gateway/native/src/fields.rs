//! Fields of protobuf's messages, written as bytes: whatever has bytes of its own, which are texts and messages, too. Their numbers
//! are below 16.

use prost::encode_length_delimiter;

/// Sizes below this take one byte.
const LONG: usize = 0x80;

/// What goes before `size` bytes of the field `number`.
pub fn head(out: &mut Vec<u8>, number: u8, size: usize) {
    out.push(number << 3 | 2);
    encode_length_delimiter(size, out).expect("a vector grows");
}

/// The field `number` of these bytes.
pub fn field(out: &mut Vec<u8>, number: u8, bytes: &[u8]) {
    head(out, number, bytes.len());
    out.extend_from_slice(bytes);
}

/// The field `number` of what `write` adds, in place: most are short, and a long one moves by a byte or two for its size.
pub fn message<R>(out: &mut Vec<u8>, number: u8, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
    out.push(number << 3 | 2);
    let at = out.len();
    out.push(0);
    let result = write(out);
    let size = out.len() - at - 1;
    if size < LONG {
        out[at] = size as u8;
    } else {
        let mut length = Vec::with_capacity(5);
        encode_length_delimiter(size, &mut length).expect("a vector grows");
        out.splice(at..=at, length);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_the_bytes_of_fields() {
        for size in [0, 1, LONG - 1, LONG, LONG * LONG - 1, LONG * LONG, 70_000] {
            let (bytes, mut plain, mut inside) = (vec![7; size], vec![1, 2], vec![1, 2]);
            field(&mut plain, 3, &bytes);
            let given = message(&mut inside, 3, |out| {
                out.extend_from_slice(&bytes);
                size
            });
            assert_eq!((inside, given), (plain, size));
        }
    }
}
