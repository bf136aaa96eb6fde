//! The price of a request at each replica, folded into twelve numbers that no request changes.
//!
//! Python's `penstock.gateway.picker.price` and `folded` are its statement, in the same order of operations: the same figures give
//! the same bits here. Whoever changes one changes the other; `test_compiled_picks.py` holds them together.

/// Names of the figures, in the order of `penstock.gateway.picker.figures.Figures`.
pub const FIGURES: [&str; 30] = [
    "pool",
    "heard_at",
    "running",
    "waiting",
    "batch",
    "rows",
    "rows_free",
    "kv_usage",
    "kv_blocks",
    "blocks_free",
    "held_blocks",
    "backlog_tokens",
    "measured_tokens_per_s",
    "measured_step_s",
    "s_per_token",
    "step_s",
    "lora_slots",
    "lora_free",
    "lora_idle",
    "booked_requests",
    "booked_tokens",
    "booked_transfers",
    "transfer_s",
    "transfer_s_per_token",
    "kv_layout",
    "promised_s",
    "taken_s",
    "correction",
    "ejected_until",
    "allowance",
];
pub const HEARD_AT: usize = 1;
pub const RUNNING: usize = 2;
pub const WAITING: usize = 3;
pub const BATCH: usize = 4;
pub const ROWS: usize = 5;
pub const ROWS_FREE: usize = 6;
pub const KV_USAGE: usize = 7;
pub const KV_BLOCKS: usize = 8;
pub const BLOCKS_FREE: usize = 9;
pub const HELD_BLOCKS: usize = 10;
pub const BACKLOG_TOKENS: usize = 11;
pub const MEASURED_TOKENS_PER_S: usize = 12;
pub const MEASURED_STEP_S: usize = 13;
pub const S_PER_TOKEN: usize = 14;
pub const STEP_S: usize = 15;
pub const LORA_SLOTS: usize = 16;
pub const BOOKED_REQUESTS: usize = 19;
pub const BOOKED_TOKENS: usize = 20;
pub const BOOKED_TRANSFERS: usize = 21;
pub const TRANSFER_S: usize = 22;
pub const TRANSFER_S_PER_TOKEN: usize = 23;
pub const CORRECTION: usize = 27;

const GRACE_S: f64 = 2.0;
const HALF_S: f64 = 5.0;
const ROWS_PER_STEP: f64 = 16.0;
const KV_CLIFF: f64 = 0.9;
const EVICTION: f64 = 1.0;
const NEVER: f64 = -1e12;
const PRIOR_QUEUE_S: f64 = 0.25;

/// How many numbers a replica's price folds into.
pub const NUMBERS: usize = 12;
/// Straight lines over the fresh tokens: their slopes stand first, then where they begin, then below what they do not fall.
const LINES: usize = 3;
const ITL: usize = 9;
const EVICTED: usize = 10;
const CROWDING: usize = 11;

/// What the replicas show together, as far as a price depends on it.
pub struct Rates {
    pub queue_s: f64,
    pub itl_s: f64,
    pub output_tokens: f64,
    /// Seconds that others will wait longer for each token of a prefill and each second until its first token.
    pub crowding: f64,
}

/// The twelve numbers of one replica; see `penstock.gateway.picker.folded.Folded.table`.
///
/// `figure` gives the replica's figures by their numbers in `FIGURES`; `now` is in seconds, as `heard_at` is.
pub fn fold(figure: impl Fn(usize) -> f64, rates: &Rates, block_size: f64, now: f64) -> [f64; NUMBERS] {
    let (heard_at, step_s, s_per_token) = (figure(HEARD_AT), figure(STEP_S), figure(S_PER_TOKEN));
    let (running, waiting, booked_requests) = (figure(RUNNING), figure(WAITING), figure(BOOKED_REQUESTS));
    let (booked_tokens, worth) = (figure(BOOKED_TOKENS), figure(CORRECTION));
    let aged = (now - heard_at - GRACE_S).max(0.0) / HALF_S;
    let trusted = 1.0 / (1.0 + aged * aged);
    let (at_least_one, held) = (running.max(1.0), figure(HELD_BLOCKS).max(1.0));
    let booked = booked_tokens + figure(BOOKED_TRANSFERS);
    let coming = waiting + booked_requests + 1.0;
    let turn_s = trusted * rates.output_tokens * step_s / at_least_one;
    let missing = ((figure(BACKLOG_TOKENS) + booked) / block_size - figure(BLOCKS_FREE)).max(NEVER);
    let (room, again) = (figure(KV_BLOCKS) * block_size, trusted * s_per_token);
    let some = room / room.max(1.0);
    let grown = booked + rates.output_tokens * (running / 2.0 + coming);
    let unheard = if heard_at == f64::NEG_INFINITY { PRIOR_QUEUE_S } else { 0.0 };
    let uncertainty_s = (1.0 - trusted) * rates.queue_s.max(unheard);
    let queue_s = trusted * (figure(BACKLOG_TOKENS) * s_per_token - (now - heard_at) / worth).max(0.0);
    let booked_s = s_per_token * booked_tokens;
    let itl_s = step_s * (ROWS_PER_STEP + 1.0 + running + booked_requests) / (ROWS_PER_STEP + figure(BATCH).max(1.0));
    let assumed_itl_s = rates.itl_s * (ROWS_PER_STEP + 1.0 + booked_requests) / (ROWS_PER_STEP + 1.0);
    let prefill_s = worth * s_per_token;
    [
        worth * (turn_s / (block_size * held)),
        worth * (again * some),
        prefill_s,
        worth * (missing / held * turn_s),
        worth * (again * (some * grown + (figure(KV_USAGE) - KV_CLIFF) * room)),
        worth * (queue_s + booked_s + uncertainty_s),
        worth * ((coming - figure(ROWS_FREE)).max(0.0) * turn_s),
        0.0,
        f64::NEG_INFINITY,
        trusted * itl_s + (1.0 - trusted) * assumed_itl_s,
        EVICTION * prefill_s,
        rates.crowding,
    ]
}

/// Seconds to the first token of a replica, without the wait for an adapter, by what its promises have been worth.
pub fn first_s(number: impl Fn(usize) -> f64, fresh: f64) -> f64 {
    let line = |at: usize| (number(at) * fresh + number(LINES + at)).max(number(2 * LINES + at));
    line(0) + line(1) + line(2)
}

/// What a request costs at a replica, in seconds: see `penstock.gateway.picker.folded.costs`.
pub fn cost(number: impl Fn(usize) -> f64, fresh: f64, tokens: f64, other_s: f64) -> f64 {
    let first = first_s(&number, fresh) + other_s;
    first + (number(CROWDING) * first + number(EVICTED)) * fresh + tokens * number(ITL)
}
