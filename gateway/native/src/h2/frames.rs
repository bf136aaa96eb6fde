//! HTTP/2 frames as bytes, and the protocol's errors (RFC 9113, sections 4, 6 and 7).

pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const PRIORITY: u8 = 2;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PUSH_PROMISE: u8 = 5;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;
pub const END_STREAM: u8 = 0x1;
pub const ACK: u8 = 0x1;
pub const END_HEADERS: u8 = 0x4;
pub const PADDED: u8 = 0x8;
pub const WITH_PRIORITY: u8 = 0x20;
pub const MAX_ID: u32 = 0x7fff_ffff;
pub const MAX_WINDOW: i64 = 0x7fff_ffff;
pub const DEFAULT_WINDOW: i64 = 65_535;
pub const DEFAULT_TABLE_BYTES: u32 = 4096;
pub const MIN_FRAME_BYTES: usize = 16_384;
pub const MAX_FRAME_BYTES: u32 = 0xff_ffff;
pub const HEAD_BYTES: usize = 9;

/// Why a stream or a connection ends.
pub mod code {
    pub const NO_ERROR: u32 = 0x0;
    pub const PROTOCOL_ERROR: u32 = 0x1;
    pub const INTERNAL_ERROR: u32 = 0x2;
    pub const FLOW_CONTROL_ERROR: u32 = 0x3;
    pub const STREAM_CLOSED: u32 = 0x5;
    pub const FRAME_SIZE_ERROR: u32 = 0x6;
    pub const REFUSED_STREAM: u32 = 0x7;
    pub const COMPRESSION_ERROR: u32 = 0x9;
    pub const ENHANCE_YOUR_CALM: u32 = 0xb;
    /// Of those that there are.
    pub const LAST: u32 = 0xb;
}

pub mod setting {
    pub const HEADER_TABLE_SIZE: u16 = 0x1;
    pub const ENABLE_PUSH: u16 = 0x2;
    pub const MAX_CONCURRENT_STREAMS: u16 = 0x3;
    pub const INITIAL_WINDOW_SIZE: u16 = 0x4;
    pub const MAX_FRAME_SIZE: u16 = 0x5;
    pub const MAX_HEADER_LIST_SIZE: u16 = 0x6;
    pub const NO_RFC7540_PRIORITIES: u16 = 0x9;
}

/// The peer broke the protocol, or floods us.
#[derive(Debug)]
pub enum Fault {
    /// The connection ends with this code and message.
    Connection(u32, String),
    /// One stream ends with this code.
    Stream(u32),
}

pub type Outcome<T = ()> = Result<T, Fault>;

/// A connection's fault.
pub fn broken<T>(code: u32, message: impl Into<String>) -> Outcome<T> {
    Err(Fault::Connection(code, message.into()))
}

/// The nine bytes before a payload of `size` bytes.
pub fn head(out: &mut Vec<u8>, kind: u8, flags: u8, stream_id: u32, size: usize) {
    out.extend_from_slice(&(size as u32).to_be_bytes()[1..]);
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream_id.to_be_bytes());
}

/// A whole frame.
pub fn frame(out: &mut Vec<u8>, kind: u8, flags: u8, stream_id: u32, payload: &[u8]) {
    head(out, kind, flags, stream_id, payload.len());
    out.extend_from_slice(payload);
}

/// A SETTINGS frame.
pub fn settings(out: &mut Vec<u8>, values: &[(u16, u32)]) {
    head(out, SETTINGS, 0, 0, 6 * values.len());
    for (name, value) in values {
        out.extend_from_slice(&name.to_be_bytes());
        out.extend_from_slice(&value.to_be_bytes());
    }
}

/// The settings of a frame that we look at, each as it was said last; of the table every size, since the smallest counts, too.
#[derive(Default)]
pub struct Settings {
    pub tables: Vec<u32>,
    pub window: Option<i64>,
    pub max_frame: Option<usize>,
}

pub fn read_settings(payload: &[u8]) -> Outcome<Settings> {
    if payload.len() % 6 != 0 {
        return broken(code::FRAME_SIZE_ERROR, format!("SETTINGS of {} bytes", payload.len()));
    }
    let mut values = Settings::default();
    for each in payload.chunks_exact(6) {
        let (name, value) = (u16::from_be_bytes([each[0], each[1]]), word(&each[2..]));
        match name {
            setting::HEADER_TABLE_SIZE => values.tables.push(value),
            setting::INITIAL_WINDOW_SIZE if i64::from(value) > MAX_WINDOW => {
                return broken(code::FLOW_CONTROL_ERROR, format!("INITIAL_WINDOW_SIZE {value}"));
            }
            setting::INITIAL_WINDOW_SIZE => values.window = Some(value.into()),
            setting::MAX_FRAME_SIZE if !(MIN_FRAME_BYTES as u32..=MAX_FRAME_BYTES).contains(&value) => {
                return broken(code::PROTOCOL_ERROR, format!("MAX_FRAME_SIZE {value}"));
            }
            setting::MAX_FRAME_SIZE => values.max_frame = Some(value as usize),
            setting::ENABLE_PUSH if value > 1 => return broken(code::PROTOCOL_ERROR, format!("ENABLE_PUSH {value}")),
            _ => {}
        }
    }
    Ok(values)
}

pub fn rst_stream(out: &mut Vec<u8>, stream_id: u32, code: u32) {
    frame(out, RST_STREAM, 0, stream_id, &code.to_be_bytes());
}

/// A WINDOW_UPDATE frame; stream 0 is the connection.
pub fn window_update(out: &mut Vec<u8>, stream_id: u32, increment: i64) {
    frame(out, WINDOW_UPDATE, 0, stream_id, &(increment as u32).to_be_bytes());
}

pub fn goaway(out: &mut Vec<u8>, last_stream_id: u32, code: u32, message: &str) {
    head(out, GOAWAY, 0, 0, 8 + message.len());
    out.extend_from_slice(&last_stream_id.to_be_bytes());
    out.extend_from_slice(&code.to_be_bytes());
    out.extend_from_slice(message.as_bytes());
}

/// The number in four bytes.
pub fn word(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// The one number that RST_STREAM and WINDOW_UPDATE carry.
pub fn only_word(kind: &str, payload: &[u8]) -> Outcome<u32> {
    if payload.len() != 4 {
        return broken(code::FRAME_SIZE_ERROR, format!("{kind} of {} bytes", payload.len()));
    }
    Ok(word(payload))
}

/// The payload of a frame that has the PADDED flag, without the padding.
pub fn unpadded(payload: &[u8]) -> Outcome<&[u8]> {
    let Some((&padding, rest)) = payload.split_first() else {
        return broken(code::FRAME_SIZE_ERROR, "a padded frame without a length of its padding");
    };
    let Some(size) = rest.len().checked_sub(padding.into()) else {
        return broken(code::PROTOCOL_ERROR, "more padding than payload");
    };
    Ok(&rest[..size])
}
