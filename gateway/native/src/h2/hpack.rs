//! Header blocks (HPACK, RFC 7541), read. Answers are plain literals, which need no table.

use std::borrow::Cow;
use std::collections::VecDeque;

/// Bytes that a field counts for besides its name and value.
const OVERHEAD: usize = 32;
const DEFAULT_TABLE_BYTES: usize = 4096;
/// After its prefix: enough for any length of ours.
const MOST_INTEGER_BYTES: usize = 5;

/// A name and a value.
pub type Field = (Cow<'static, [u8]>, Cow<'static, [u8]>);

/// Bytes that a field counts for (section 4.1).
pub fn size((name, value): &Field) -> usize {
    name.len() + value.len() + OVERHEAD
}

/// Why a block has no fields.
#[derive(Debug, PartialEq)]
pub enum Unread {
    Malformed,
    TooLong,
}

/// Reads the blocks of one connection, in the order in which they come.
pub struct Decoder {
    entries: VecDeque<Field>,
    size: usize,
    table_bytes: usize,
    allowed: usize,
    max_list_bytes: usize,
}

impl Decoder {
    pub fn new(max_list_bytes: usize) -> Self {
        let (table_bytes, allowed) = (DEFAULT_TABLE_BYTES, DEFAULT_TABLE_BYTES);
        Decoder { entries: VecDeque::new(), size: 0, table_bytes, allowed, max_list_bytes }
    }

    /// Whether blocks mean the same wherever they stand.
    pub fn stateless(&self) -> bool {
        self.table_bytes == 0
    }

    /// The peer may not grow its table again, which has no size now.
    pub fn forbid_table(&mut self) {
        self.allowed = 0;
    }

    pub fn decode(&mut self, block: &[u8]) -> Result<Vec<Field>, Unread> {
        let mut fields: Vec<Field> = Vec::new();
        let (mut rest, mut size) = (block, 0);
        while let Some(&first) = rest.first() {
            let field = if first & 0x80 != 0 {
                self.entry(integer(&mut rest, 7)?)?
            } else if first & 0x40 != 0 {
                let field = self.literal(&mut rest, 6)?;
                self.insert(field.clone());
                field
            } else if first & 0x20 != 0 {
                let size = integer(&mut rest, 5)?;
                if !fields.is_empty() || size > self.allowed {
                    return Err(Unread::Malformed);
                }
                self.table_bytes = size;
                self.shrink();
                continue;
            } else {
                self.literal(&mut rest, 4)?
            };
            size += self::size(&field);
            if size > self.max_list_bytes {
                return Err(Unread::TooLong);
            }
            fields.push(field);
        }
        Ok(fields)
    }

    fn literal(&self, rest: &mut &[u8], prefix: u32) -> Result<Field, Unread> {
        let name = match integer(rest, prefix)? {
            0 => Cow::Owned(string(rest)?),
            index => self.entry(index)?.0,
        };
        Ok((name, Cow::Owned(string(rest)?)))
    }

    fn entry(&self, index: usize) -> Result<Field, Unread> {
        let index = index.checked_sub(1).ok_or(Unread::Malformed)?;
        if let Some(&(name, value)) = STATIC_TABLE.get(index) {
            return Ok((Cow::Borrowed(name), Cow::Borrowed(value)));
        }
        self.entries.get(index - STATIC_TABLE.len()).cloned().ok_or(Unread::Malformed)
    }

    fn insert(&mut self, field: Field) {
        self.size += size(&field);
        self.entries.push_front(field);
        self.shrink();
    }

    /// Drops the oldest entries for which there is no room.
    fn shrink(&mut self) {
        while self.size > self.table_bytes
            && let Some(oldest) = self.entries.pop_back()
        {
            self.size -= size(&oldest);
        }
    }
}

/// The integer at the start of `rest`, which is moved behind it (section 5.1).
fn integer(rest: &mut &[u8], prefix: u32) -> Result<usize, Unread> {
    let (&first, mut after) = rest.split_first().ok_or(Unread::Malformed)?;
    let most = (1usize << prefix) - 1;
    let mut number = first as usize & most;
    if number == most {
        let mut ended = false;
        for at in 0..MOST_INTEGER_BYTES {
            let (&byte, behind) = after.split_first().ok_or(Unread::Malformed)?;
            after = behind;
            number += (byte as usize & 0x7f) << (7 * at);
            ended = byte < 0x80;
            if ended {
                break;
            }
        }
        if !ended {
            return Err(Unread::Malformed);
        }
    }
    *rest = after;
    Ok(number)
}

/// The string at the start of `rest`, which is moved behind it (section 5.2).
fn string(rest: &mut &[u8]) -> Result<Vec<u8>, Unread> {
    let coded = rest.first().is_some_and(|first| first & 0x80 != 0);
    let size = integer(rest, 7)?;
    let (text, after) = rest.split_at_checked(size).ok_or(Unread::Malformed)?;
    *rest = after;
    if coded { plain(text).ok_or(Unread::Malformed) } else { Ok(text.to_vec()) }
}

/// What a text in Huffman's code says; None where it is none.
fn plain(coded: &[u8]) -> Option<Vec<u8>> {
    let mut text = Vec::with_capacity(coded.len() * 8 / SHORTEST);
    let (mut code, mut bits) = (0u32, 0);
    for &byte in coded {
        for shift in (0..8).rev() {
            code = code << 1 | u32::from(byte >> shift & 1);
            bits += 1;
            if bits > LONGEST {
                return None;
            }
            if let Some(symbol) = CODES.symbol(code, bits) {
                if symbol == END {
                    return None;
                }
                text.push(symbol as u8);
                (code, bits) = (0, 0);
            }
        }
    }
    // The rest of the last byte is the beginning of the end's code, which is ones.
    (bits < 8 && code == (1 << bits) - 1).then_some(text)
}

const SYMBOLS: usize = 257;
const END: u16 = 256;
const SHORTEST: usize = 5;
const LONGEST: usize = 30;

/// Huffman's code of section 5.2: among codes of one length those of greater symbols are greater.
struct Codes {
    /// By length: the first code, how many there are, and the place of their first symbol among `symbols`.
    first: [u32; LONGEST + 1],
    count: [u32; LONGEST + 1],
    start: [usize; LONGEST + 1],
    symbols: [u16; SYMBOLS],
}

impl Codes {
    const fn new() -> Self {
        let mut made = Codes { first: [0; LONGEST + 1], count: [0; LONGEST + 1], start: [0; LONGEST + 1], symbols: [0; SYMBOLS] };
        let (mut bits, mut code, mut place) = (1, 0, 0);
        while bits <= LONGEST {
            code <<= 1;
            made.first[bits] = code;
            made.start[bits] = place;
            let mut symbol = 0;
            while symbol < SYMBOLS {
                if LENGTHS[symbol] as usize == bits {
                    made.symbols[place] = symbol as u16;
                    made.count[bits] += 1;
                    place += 1;
                    code += 1;
                }
                symbol += 1;
            }
            bits += 1;
        }
        made
    }

    fn symbol(&self, code: u32, bits: usize) -> Option<u16> {
        let place = code.wrapping_sub(self.first[bits]);
        (place < self.count[bits]).then(|| self.symbols[self.start[bits] + place as usize])
    }
}

static CODES: Codes = Codes::new();

/// The length of each symbol's code (appendix B).
#[rustfmt::skip]
const LENGTHS: [u8; SYMBOLS] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
    6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10,
    13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28,
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23, 24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23, 26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
    30,
];

/// Appendix A.
const STATIC_TABLE: [(&[u8], &[u8]); 61] = [
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    (b":status", b"200"),
    (b":status", b"204"),
    (b":status", b"206"),
    (b":status", b"304"),
    (b":status", b"400"),
    (b":status", b"404"),
    (b":status", b"500"),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    (b"accept-language", b""),
    (b"accept-ranges", b""),
    (b"accept", b""),
    (b"access-control-allow-origin", b""),
    (b"age", b""),
    (b"allow", b""),
    (b"authorization", b""),
    (b"cache-control", b""),
    (b"content-disposition", b""),
    (b"content-encoding", b""),
    (b"content-language", b""),
    (b"content-length", b""),
    (b"content-location", b""),
    (b"content-range", b""),
    (b"content-type", b""),
    (b"cookie", b""),
    (b"date", b""),
    (b"etag", b""),
    (b"expect", b""),
    (b"expires", b""),
    (b"from", b""),
    (b"host", b""),
    (b"if-match", b""),
    (b"if-modified-since", b""),
    (b"if-none-match", b""),
    (b"if-range", b""),
    (b"if-unmodified-since", b""),
    (b"last-modified", b""),
    (b"link", b""),
    (b"location", b""),
    (b"max-forwards", b""),
    (b"proxy-authenticate", b""),
    (b"proxy-authorization", b""),
    (b"range", b""),
    (b"referer", b""),
    (b"refresh", b""),
    (b"retry-after", b""),
    (b"server", b""),
    (b"set-cookie", b""),
    (b"strict-transport-security", b""),
    (b"transfer-encoding", b""),
    (b"user-agent", b""),
    (b"vary", b""),
    (b"via", b""),
    (b"www-authenticate", b""),
];
