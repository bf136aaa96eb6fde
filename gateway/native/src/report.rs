//! Reads load reports as engines of ours write them on each response: `penstock.api.load_report`, whose `decode` is the statement.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

const BEGIN: &[u8] = b"TEXT application_utilization=";
/// Digits of a whole number that a double holds.
const MOST_WHOLE: usize = 15;
/// Digits of a figure before its point, after it, and of its exponent.
const MOST_DIGITS: (usize, usize, usize) = (17, 20, 3);

/// The figures of a report, and the waiting requests by the numbers of their reasons.
type Parsed = (Vec<f64>, Vec<(usize, u64)>);

/// Figures that columns are made of, and the two that number a report.
const READ: [&str; 13] = [
    "epoch",
    "seq",
    "num_requests_running",
    "max_num_seqs",
    "kv_cache_usage_perc",
    "kv_blocks_total",
    "kv_blocks_reclaimable",
    "prefill_backlog_tokens",
    "prefill_tokens_per_s",
    "decode_step_s",
    "transfer_s",
    "transfer_s_per_token",
    "lora_slots",
];

/// A figure's name with what stands around it.
struct Field {
    begin: Vec<u8>,
    whole: bool,
}

/// Reads one engine's way to write; see `penstock.gateway.load.own_reports`.
#[pyclass(frozen)]
pub struct ReportReader {
    fields: Vec<Field>,
    /// Waiting requests stand among the fields at this place.
    place: usize,
    /// Where the figures of `READ` stand among the fields.
    read: [usize; READ.len()],
    total: Vec<u8>,
    reasons: Vec<(Vec<u8>, Py<PyString>)>,
    beyond: f64,
}

fn item(name: &str) -> Vec<u8> {
    format!(", named_metrics.{name}=").into_bytes()
}

#[pymethods]
impl ReportReader {
    /// `fields` are names of figures, and whether each is a whole number; see `penstock.gateway.picker.compiled.Compiled`.
    #[new]
    fn new(
        fields: Vec<(String, bool)>,
        waiting: &str,
        reasons: Vec<Bound<'_, PyString>>,
        place: usize,
        beyond: f64,
    ) -> PyResult<Self> {
        let mut read = [0; READ.len()];
        for (place, name) in read.iter_mut().zip(READ) {
            let found = fields.iter().position(|(its, _)| its == name);
            *place = found.ok_or_else(|| PyValueError::new_err(format!("reports have no {name}")))?;
        }
        let fields = fields.into_iter().map(|(name, whole)| Field { begin: item(&name), whole }).collect();
        let reason = |it: Bound<'_, PyString>| Ok((item(&format!("{waiting}_by_reason.{}", it.to_str()?)), it.unbind()));
        let reasons = reasons.into_iter().map(reason).collect::<PyResult<_>>()?;
        Ok(ReportReader { fields, place, read, total: item(waiting), reasons, beyond })
    }

    /// A report; None for any other text, right or wrong, and for figures that no replica can have.
    pub fn read(me: &Bound<'_, Self>, value: &str) -> Option<Said> {
        let (figures, waiting) = me.get().parse(value.as_bytes())?;
        Some(Said { figures, waiting, by: me.clone().unbind() })
    }
}

/// A report that was read. Python sees its fields where somebody asks for them.
#[pyclass(frozen)]
pub struct Said {
    figures: Vec<f64>,
    waiting: Vec<(usize, u64)>,
    by: Py<ReportReader>,
}

#[pymethods]
impl Said {
    #[getter]
    pub fn epoch(&self) -> i64 {
        self.read()[0] as i64
    }

    #[getter]
    pub fn seq(&self) -> i64 {
        self.read()[1] as i64
    }

    /// The fields in order.
    fn fields<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let (by, counts) = (self.by.get(), PyDict::new(py));
        for &(which, count) in &self.waiting {
            counts.set_item(&by.reasons[which].1, count)?;
        }
        let mut found = Vec::with_capacity(self.figures.len() + 1);
        for (field, &figure) in by.fields.iter().zip(&self.figures) {
            found.push(if field.whole {
                (figure as u64).into_pyobject(py)?.into_any()
            } else {
                figure.into_pyobject(py)?.into_any()
            });
        }
        found.insert(by.place.min(found.len()), counts.into_any());
        PyTuple::new(py, found)
    }
}

impl Said {
    /// Those of `READ`.
    pub fn read(&self) -> [f64; READ.len()] {
        self.by.get().read.map(|place| self.figures[place])
    }

    /// All waiting requests, whatever they wait for.
    pub fn waiting(&self) -> u64 {
        self.waiting.iter().map(|(_, count)| count).sum()
    }
}

impl ReportReader {
    fn parse(&self, text: &[u8]) -> Option<Parsed> {
        let (_, mut rest) = figure(text.strip_prefix(BEGIN)?)?;
        let mut figures = Vec::with_capacity(self.fields.len());
        for field in &self.fields {
            let said = rest.strip_prefix(&field.begin[..])?;
            let value;
            (value, rest) = if field.whole { whole(said).map(|(count, rest)| (count as f64, rest))? } else { figure(said)? };
            if value >= self.beyond {
                return None;
            }
            figures.push(value);
        }
        (_, rest) = whole(rest.strip_prefix(&self.total[..])?)?;
        let mut waiting: Vec<(usize, u64)> = Vec::new();
        while !rest.is_empty() {
            let (which, said) =
                self.reasons.iter().enumerate().find_map(|(at, (begin, _))| Some((at, rest.strip_prefix(&begin[..])?)))?;
            let count;
            (count, rest) = whole(said)?;
            if said[0] == b'0' || count as f64 >= self.beyond || waiting.iter().any(|&(other, _)| other == which) {
                return None;
            }
            waiting.push((which, count));
        }
        Some((figures, waiting))
    }
}

/// How many digits `text` begins with.
fn digits(text: &[u8]) -> usize {
    text.iter().take_while(|byte| byte.is_ascii_digit()).count()
}

fn whole(text: &[u8]) -> Option<(u64, &[u8])> {
    let count = digits(text);
    if !(1..=MOST_WHOLE).contains(&count) {
        return None;
    }
    let (number, rest) = text.split_at(count);
    Some((number.iter().fold(0, |sum, digit| 10 * sum + u64::from(digit - b'0')), rest))
}

fn figure(text: &[u8]) -> Option<(f64, &[u8])> {
    let mut end = digits(text);
    if !(1..=MOST_DIGITS.0).contains(&end) {
        return None;
    }
    let part = |from: usize, begin: &[u8], most: usize| match text[from..].strip_prefix(begin).map(digits) {
        Some(count) if (1..=most).contains(&count) => Some(from + begin.len() + count),
        Some(_) => None,
        None => Some(from),
    };
    end = part(end, b".", MOST_DIGITS.1)?;
    end = part(end, b"e-", MOST_DIGITS.2)?;
    let (number, rest) = text.split_at(end);
    Some((std::str::from_utf8(number).ok()?.parse().ok()?, rest))
}
