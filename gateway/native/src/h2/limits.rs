//! See `penstock.gateway.h2.limits`, which has the figures.

use pyo3::prelude::*;

#[derive(FromPyObject)]
pub struct Limits {
    #[pyo3(attribute("CONNECTION_WINDOW"))]
    pub connection_window: i64,
    #[pyo3(attribute("STREAM_WINDOW"))]
    pub stream_window: i64,
    #[pyo3(attribute("MAX_STREAMS"))]
    pub max_streams: usize,
    #[pyo3(attribute("MAX_BLOCK_BYTES"))]
    pub max_block_bytes: usize,
    #[pyo3(attribute("MAX_BLOCK_FRAMES"))]
    pub max_block_frames: usize,
    #[pyo3(attribute("MAX_LIST_BYTES"))]
    pub max_list_bytes: usize,
    #[pyo3(attribute("MAX_HEADER_BYTES"))]
    pub max_header_bytes: usize,
    #[pyo3(attribute("MAX_UNSENT_BYTES"))]
    pub max_unsent_bytes: usize,
    #[pyo3(attribute("WRITE_BYTES"))]
    pub write_bytes: i64,
    #[pyo3(attribute("ENDED_KEPT"))]
    pub ended_kept: usize,
    #[pyo3(attribute("UPDATES_A_FRAME"))]
    pub updates_a_frame: u64,
    #[pyo3(attribute("IDLE_PING_S"))]
    pub idle_ping_s: f64,
    #[pyo3(attribute("SILENCE_S"))]
    pub silence_s: f64,
    #[pyo3(attribute("STALL_S"))]
    pub stall_s: f64,
    #[pyo3(attribute("CONTROL"))]
    pub control: (f64, f64),
    #[pyo3(attribute("RESIZES"))]
    pub resizes: (f64, f64),
    #[pyo3(attribute("RESETS"))]
    pub resets: (f64, f64),
}

/// Tokens that come back with time. `now` is monotonic seconds and never falls.
pub struct Bucket {
    burst: f64,
    per_s: f64,
    at: f64,
    tokens: f64,
}

impl Bucket {
    pub fn new((burst, per_s): (f64, f64), now: f64) -> Self {
        Bucket { burst, per_s, at: now, tokens: burst }
    }

    /// Takes `count` tokens; false if there are too few.
    pub fn take(&mut self, now: f64, count: f64) -> bool {
        self.tokens = self.burst.min(self.tokens + (now - self.at) * self.per_s);
        self.at = now;
        let enough = self.tokens >= count;
        if enough {
            self.tokens -= count;
        }
        enough
    }

    /// Puts one back.
    pub fn give(&mut self) {
        self.tokens = self.burst.min(self.tokens + 1.0);
    }
}
