//! What the server asks of the pager and what it answers: msgpack maps behind a length of four bytes, little endian.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

/// The longest request: a profile of a layer of 16 TiB would not fit, one of 100 GiB does.
pub const MAX_FRAME: u32 = 64 * 1024 * 1024;
pub const VERSION: u64 = 1;

/// A store as the server names it. Secrets are never written down, and Debug does not show them.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoreSpec {
    pub url: String,
    #[serde(default)]
    pub endpoint: Option<String>,
    #[serde(default)]
    pub region: Option<String>,
    #[serde(default)]
    pub access_key: Option<String>,
    #[serde(default)]
    pub secret_key: Option<String>,
    #[serde(default)]
    pub token: Option<String>,
    #[serde(default)]
    pub username: Option<String>,
    #[serde(default)]
    pub password: Option<String>,
    #[serde(default)]
    pub allow_http: bool,
}

impl std::fmt::Debug for StoreSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreSpec")
            .field("url", &self.url)
            .finish_non_exhaustive()
    }
}

/// How the kernel asks for what is not here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mechanism {
    Fanotify,
    Fuse,
}

/// Bounds of one layer. `wait_seconds`: how long a store may stay away before readers get EIO. `concurrency`: requests at once.
/// `check_seconds`: a chunk that was checked longer ago than this is checked again when the kernel asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    pub wait_seconds: f64,
    pub concurrency: usize,
    pub check_seconds: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            wait_seconds: 30.0,
            concurrency: 8,
            check_seconds: 10.0,
        }
    }
}

impl Limits {
    /// Within what makes sense, whatever was asked: 50 ms to an hour, 1 to 16 requests, at once to a day.
    #[must_use]
    pub fn bounded(self) -> Self {
        let known = Self::default();
        let or = |value: f64, other: f64| if value.is_finite() { value } else { other };
        Self {
            wait_seconds: or(self.wait_seconds, known.wait_seconds).clamp(0.05, 3600.0),
            concurrency: self.concurrency.clamp(1, 16),
            check_seconds: or(self.check_seconds, known.check_seconds).clamp(0.0, 86_400.0),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attach {
    /// The 64 hexadecimal digits of the layer's digest.
    pub layer: String,
    pub directory: String,
    pub store: StoreSpec,
    pub mechanism: Mechanism,
    #[serde(default)]
    pub limits: Limits,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Op {
    Hello {
        version: u64,
    },
    Attach(Attach),
    Detach {
        layer: String,
    },
    Stats {
        #[serde(default)]
        layer: Option<String>,
    },
    /// Chunks [from, to) of each pair, in this order; `depth` requests at once.
    Prefetch {
        layer: String,
        chunks: Vec<(u32, u32)>,
        #[serde(default = "default_depth")]
        depth: usize,
    },
    Fill {
        layer: String,
    },
    Trace {
        layer: String,
        on: bool,
    },
    /// `mounted`: also where something has the data open; `quiet_seconds`: not what was asked for within.
    Evict {
        layer: String,
        ranges: Vec<(u32, u32)>,
        #[serde(default)]
        mounted: bool,
        #[serde(default = "default_quiet")]
        quiet_seconds: f64,
    },
    Store {
        layer: String,
        store: StoreSpec,
    },
    Stop {
        #[serde(default)]
        force: bool,
    },
}

fn default_depth() -> usize {
    8
}

fn default_quiet() -> f64 {
    60.0
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Request {
    pub id: u64,
    #[serde(flatten)]
    pub op: Op,
}

impl Request {
    /// The request as a frame's bytes.
    ///
    /// # Errors
    /// What msgpack cannot hold; there is no such request.
    pub fn encode(&self) -> Result<Vec<u8>, rmp_serde::encode::Error> {
        rmp_serde::to_vec_named(self)
    }
}

/// An error's code: one of `bad_request`, `unknown_layer`, `bad_layer`, `bad_store`, `busy`, `unsupported`, `local`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    pub code: String,
    pub detail: String,
}

impl Refusal {
    pub fn new(code: &str, detail: impl Into<String>) -> Self {
        Self {
            code: code.to_owned(),
            detail: detail.into(),
        }
    }
}

#[derive(Debug, Serialize)]
struct Good<'a> {
    id: u64,
    ok: &'a serde_json::Value,
}

#[derive(Debug, Serialize)]
struct Bad<'a> {
    id: u64,
    error: &'a Refusal,
}

/// A request's bytes as one.
///
/// # Errors
/// `bad_request`, with the place in words.
pub fn decode(bytes: &[u8]) -> Result<Request, Refusal> {
    rmp_serde::from_slice(bytes).map_err(|e| Refusal::new("bad_request", e.to_string()))
}

/// The next frame; None at the end between two.
pub fn read_frame(from: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut head = [0; 4];
    if from.read(&mut head[..1])? == 0 {
        return Ok(None);
    }
    from.read_exact(&mut head[1..])?;
    let length = u32::from_le_bytes(head);
    if length > MAX_FRAME {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a frame that is too long"));
    }
    // Room grows with what really comes: a length alone takes no memory.
    let mut bytes = Vec::new();
    from.take(u64::from(length)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != u64::from(length) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some(bytes))
}

pub fn write_answer(to: &mut impl Write, id: u64, answer: &Result<serde_json::Value, Refusal>) -> io::Result<()> {
    let encoded = match answer {
        Ok(ok) => rmp_serde::to_vec_named(&Good { id, ok }),
        Err(error) => rmp_serde::to_vec_named(&Bad { id, error }),
    };
    let bytes = encoded.map_err(io::Error::other)?;
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    to.write_all(&[&length.to_le_bytes()[..], &bytes].concat())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn frames_that_say_more_than_they_are_are_errors() {
        assert!(read_frame(&mut &[255, 255, 255, 255][..]).is_err());
        assert!(read_frame(&mut &[5, 0, 0, 0, 1][..]).is_err());
        assert!(read_frame(&mut &[5, 0][..]).is_err());
        assert_eq!(read_frame(&mut &[][..]).unwrap(), None);
        assert_eq!(read_frame(&mut &[1, 0, 0, 0, 9][..]).unwrap(), Some(vec![9]));
    }

    #[test]
    fn a_request_is_what_it_was() {
        let op = Op::Prefetch {
            layer: "x".to_owned(),
            chunks: vec![(1, 5)],
            depth: 3,
        };
        let request = Request { id: 7, op };
        let bytes = rmp_serde::to_vec_named(&request).unwrap();
        assert_eq!(decode(&bytes).unwrap(), request);
    }

    #[test]
    fn limits_are_bounded() {
        let limits = Limits {
            wait_seconds: f64::NAN,
            concurrency: 0,
            check_seconds: -1.0,
        }
        .bounded();
        let wanted = Limits {
            wait_seconds: 30.0,
            concurrency: 1,
            check_seconds: 0.0,
        };
        assert_eq!(limits, wanted);
    }
}
