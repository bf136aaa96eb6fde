//! The texts of chats whose templates only copy contents: what stands around those is the same for all chats of one shape, the
//! roles of the messages and which contents are empty. `penstock.prompt.skeleton` finds it.

use std::sync::Arc;

use hashlink::LinkedHashMap;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

/// Messages of the longest chat that has a shape here.
const MOST_MESSAGES: usize = 512;
/// What all shapes together may take.
const MOST_BYTES: usize = 8 << 20;
/// What a shape or a part takes besides its text.
const PART_BYTES: usize = 64;

/// A part of a text: text of the template, or the content of a message.
#[derive(FromPyObject)]
pub enum Part {
    Text(String),
    /// Which, and whether without the spaces around it.
    Content(usize, bool),
}

/// Roles and contents of a chat.
pub struct Chat<'py> {
    messages: Vec<(Bound<'py, PyString>, Bound<'py, PyString>)>,
}

impl<'py> Chat<'py> {
    /// None for what is no list of messages with a role and a content alone, both of them strings.
    pub fn of(messages: &Bound<'py, PyAny>) -> PyResult<Option<Self>> {
        let py = messages.py();
        let Ok(list) = messages.cast_exact::<PyList>() else { return Ok(None) };
        if list.is_empty() || list.len() > MOST_MESSAGES {
            return Ok(None);
        }
        let mut messages = Vec::with_capacity(list.len());
        for message in list {
            let Ok(message) = message.cast_into_exact::<PyDict>() else { return Ok(None) };
            if message.len() != 2 {
                return Ok(None);
            }
            let (role, content) = (message.get_item(intern!(py, "role"))?, message.get_item(intern!(py, "content"))?);
            let (Some(role), Some(content)) = (role, content) else { return Ok(None) };
            let (Ok(role), Ok(content)) = (role.cast_into_exact(), content.cast_into_exact()) else { return Ok(None) };
            messages.push((role, content));
        }
        Ok(Some(Chat { messages }))
    }

    /// Role and content of each message. None where one is no Unicode.
    pub fn texts(&self) -> Option<Vec<(&str, &str)>> {
        self.messages.iter().map(|(role, content)| Some((role.to_str().ok()?, content.to_str().ok()?))).collect()
    }
}

/// The shape of messages, which no others have.
pub fn shape(messages: &[(&str, &str)]) -> Vec<u8> {
    let mut shape = Vec::with_capacity(12 * messages.len());
    for (role, content) in messages {
        shape.extend_from_slice(&role.len().to_le_bytes());
        shape.extend_from_slice(role.as_bytes());
        shape.push(u8::from(content.is_empty()));
    }
    shape
}

/// The text of a chat.
pub fn text(parts: &[Part], messages: &[(&str, &str)]) -> Option<String> {
    let length = |part: &Part| match part {
        Part::Text(text) => text.len(),
        &Part::Content(at, _) => messages.get(at).map_or(0, |(_, content)| content.len()),
    };
    let mut all = String::with_capacity(parts.iter().map(length).sum());
    for part in parts {
        match part {
            Part::Text(text) => all.push_str(text),
            &Part::Content(at, trimmed) => {
                let (_, content) = messages.get(at)?;
                all.push_str(if trimmed { content.trim_matches(is_space) } else { content });
            }
        }
    }
    Some(all)
}

/// What Python's `str.strip` takes away.
fn is_space(letter: char) -> bool {
    letter.is_whitespace() || ('\x1c'..='\x1f').contains(&letter)
}

/// The parts of a shape; None where its texts are Python's.
pub type Skeleton = Option<Arc<Vec<Part>>>;

/// What is known of shapes; those that were used least recently go first.
#[derive(Default)]
pub struct Shapes {
    known: LinkedHashMap<Vec<u8>, Skeleton>,
    bytes: usize,
}

impl Shapes {
    pub fn get(&mut self, shape: &[u8]) -> Option<Skeleton> {
        self.known.to_back(shape).map(|found| found.clone())
    }

    /// Remembers a shape. Two threads may ask for the same: it is then kept once.
    pub fn add(&mut self, shape: Vec<u8>, skeleton: Skeleton) {
        self.bytes += bytes(&shape, &skeleton);
        if let Some(former) = self.known.remove(&shape) {
            self.bytes -= bytes(&shape, &former);
        }
        self.known.insert(shape, skeleton);
        while self.bytes > MOST_BYTES {
            let Some((shape, oldest)) = self.known.pop_front() else { return };
            self.bytes -= bytes(&shape, &oldest);
        }
    }
}

fn bytes(shape: &[u8], skeleton: &Skeleton) -> usize {
    let of_part = |part: &Part| PART_BYTES + if let Part::Text(text) = part { text.len() } else { 0 };
    PART_BYTES + shape.len() + skeleton.iter().flat_map(|parts| parts.iter()).map(of_part).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_go_where_the_template_has_them() {
        let messages = [("system", " a\n"), ("user", "b\u{1c} ")];
        let parts = [Part::Text("<".into()), Part::Content(1, true), Part::Content(0, false), Part::Text(">".into())];
        assert_eq!(text(&parts, &messages).as_deref(), Some("<b a\n>"));
        assert_eq!(text(&[Part::Content(2, false)], &messages), None);
    }

    #[test]
    fn shapes_differ_by_roles_and_empty_contents() {
        let base = shape(&[("user", "x"), ("a", "y")]);
        assert_eq!(base, shape(&[("user", "z"), ("a", "x")]));
        for other in [
            vec![("user", "x")],
            vec![("user", "x"), ("a", "")],
            vec![("user1", "x"), ("", "x")],
            vec![("a", "x"), ("user", "x")],
        ] {
            assert_ne!(base, shape(&other));
        }
    }

    #[test]
    fn shapes_that_were_used_least_recently_go_first() {
        let mut shapes = Shapes::default();
        let large = || Some(Arc::new(vec![Part::Text("x".repeat(MOST_BYTES / 3 - 1000))]));
        for name in [b"a", b"b", b"c"] {
            shapes.add(name.to_vec(), large());
            shapes.add(name.to_vec(), large());
        }
        assert!(shapes.get(b"a").is_some());
        shapes.add(b"d".to_vec(), None);
        shapes.add(b"e".to_vec(), large());
        assert!(shapes.get(b"b").is_none() && shapes.get(b"d").is_some_and(|skeleton| skeleton.is_none()));
        assert!([b"a", b"c", b"e"].into_iter().all(|name| shapes.get(name).is_some()));
    }
}
