//! The choice: replicas in order of preference by their scores, ties by what is on its way, what is cached, and lots.
//!
//! `penstock.gateway.picker.choice` is its statement.

/// Scores (seconds) closer than this are equal where differences are tolerated at all.
const NOISE: f64 = 0.001;
const MIX: u64 = 0xFF51_AFD7_ED55_8CCD;
const SHIFT: u32 = 33;

/// One replica.
pub struct Row {
    /// Cost in seconds; infinite where the row may not be picked.
    pub score: f64,
    pub booked_requests: f64,
    /// Prompt tokens that its prefix cache would supply.
    pub resident: f64,
    /// To pick only where there is no other.
    pub last_resort: bool,
    pub seed: u64,
}

/// The rows of a pick.
pub struct Rows {
    pub rows: Vec<Row>,
    pub prompt_tokens: f64,
    /// What the request's lots are drawn from.
    pub word: u64,
}

impl Rows {
    /// The score up to which rows are as good as the best: `tolerance` is a share of the best score.
    pub fn limit(&self, tolerance: f64) -> f64 {
        let least = |rows: &mut dyn Iterator<Item = &Row>| rows.map(|row| row.score).fold(f64::INFINITY, f64::min);
        let sound = least(&mut self.rows.iter().filter(|row| !row.last_resort));
        let best = if sound < f64::INFINITY { sound } else { least(&mut self.rows.iter()) };
        if tolerance == 0.0 { best } else { best + NOISE.max(best.abs() * tolerance) }
    }

    /// The best `most` rows in order, last resorts last; `limit` is the score up to which rows are equal.
    pub fn ranking(&self, limit: f64, most: usize) -> Vec<usize> {
        let mut order = self.order(false, limit, most);
        let more = self.order(true, limit, most - order.len());
        order.extend(more);
        order
    }

    /// Rows as good as the best come first, by rank and then by lot; the others follow by their scores.
    fn order(&self, last_resort: bool, limit: f64, most: usize) -> Vec<usize> {
        if most == 0 {
            return Vec::new();
        }
        let (mut ties, mut rest) = (Vec::with_capacity(self.rows.len()), Vec::with_capacity(self.rows.len()));
        for (at, row) in self.rows.iter().enumerate() {
            if row.score < f64::INFINITY && row.last_resort == last_resort {
                if row.score <= limit { &mut ties } else { &mut rest }.push((row.score, row.seed, at));
            }
        }
        // Bookings and tokens are whole numbers, so that neither outweighs the one before it.
        let of_booked = self.prompt_tokens + 1.0;
        for (rank, seed, at) in &mut ties {
            let row = &self.rows[*at];
            *rank = row.booked_requests * of_booked - row.resident + lot(*seed, self.word);
        }
        let mut order = best(ties, most);
        let more = best(rest, most - order.len());
        order.extend(more);
        order
    }
}

/// The `most` least places in order, without sorting the others.
fn best(mut places: Vec<(f64, u64, usize)>, most: usize) -> Vec<usize> {
    let compare = |a: &(f64, u64, usize), b: &(f64, u64, usize)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2));
    if most == 0 {
        return Vec::new();
    }
    if places.len() > most {
        places.select_nth_unstable_by(most - 1, compare);
        places.truncate(most);
    }
    places.sort_unstable_by(compare);
    places.into_iter().map(|(_, _, row)| row).collect()
}

/// A number in [0, 1) which differs by request and replica: ties spread and yet repeat.
fn lot(seed: u64, word: u64) -> f64 {
    let mut mixed = (seed ^ word).wrapping_mul(MIX);
    mixed = (mixed ^ (mixed >> SHIFT)).wrapping_mul(MIX);
    (mixed >> SHIFT) as f64 * (0.5f64).powi(31)
}
