//! What one request to a store costs, measured while it is used: a time for each request and a time for each byte.

use std::time::Duration;

/// How much an observation counts that is 32 observations old: e^-1.
const FORGET: f64 = 1.0 - 1.0 / 32.0;
const LEAST: f64 = 64.0 * 1024.0;
/// The most that one request asks for.
pub const MOST: u64 = 4 * 1024 * 1024;
/// Below this latency a request of a chunk's size is as good as a larger one.
const NEAR_SECONDS: f64 = 0.001;

/// Sums for a line through (bytes, seconds), the older the less.
#[derive(Debug, Clone, Default)]
pub struct Gauge {
    n: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
    least: f64,
}

impl Gauge {
    pub fn observe(&mut self, bytes: u64, took: Duration) {
        let (x, y) = (bytes as f64, took.as_secs_f64());
        self.least = if self.n == 0.0 { y } else { self.least.min(y) };
        for (sum, more) in [
            (&mut self.n, 1.0),
            (&mut self.x, x),
            (&mut self.y, y),
            (&mut self.xx, x * x),
            (&mut self.xy, x * y),
        ] {
            *sum = *sum * FORGET + more;
        }
        // So that one quick answer is not held against a store for ever.
        self.least *= 1.002;
    }

    /// Seconds a request, seconds a byte.
    #[must_use]
    pub fn costs(&self) -> (f64, f64) {
        if self.n == 0.0 {
            return (0.0, 0.0);
        }
        let spread = self.n * self.xx - self.x * self.x;
        let mean = self.y / self.n;
        // Requests of one size tell nothing about the line; then all of the least time is the request's.
        let slope = if spread > self.n * self.n * 4096.0 * 4096.0 {
            ((self.n * self.xy - self.x * self.y) / spread).max(0.0)
        } else {
            (mean - self.least).max(0.0) / (self.x / self.n).max(1.0)
        };
        let latency = (mean - slope * self.x / self.n).max(0.0);
        (latency, slope)
    }

    /// Bytes that a request should ask for when more is likely to be wanted: as many as pass in the time that the request
    /// costs by itself. 0 for a store so near that there is nothing to gain.
    #[must_use]
    pub fn ideal(&self) -> u64 {
        let (latency, slope) = self.costs();
        if latency < NEAR_SECONDS {
            return 0;
        }
        let most = MOST as f64;
        if slope <= 0.0 {
            return MOST;
        }
        (latency / slope).clamp(LEAST, most) as u64
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn gauge(latency: f64, bandwidth: f64) -> Gauge {
        let mut gauge = Gauge::default();
        for n in 0u64..200 {
            let bytes = 16 * 1024 * (1 + n % 40);
            gauge.observe(bytes, Duration::from_secs_f64(latency + bytes as f64 / bandwidth));
        }
        gauge
    }

    #[test]
    fn a_far_store_is_asked_for_what_passes_in_its_latency() {
        let ideal = gauge(0.020, 100e6).ideal();
        assert!((1_900_000..2_100_000).contains(&ideal), "{ideal}");
    }

    #[test]
    fn a_near_store_is_asked_for_no_more_than_is_wanted() {
        assert_eq!(gauge(0.000_05, 2e9).ideal(), 0);
        assert_eq!(Gauge::default().ideal(), 0);
    }

    #[test]
    fn a_store_that_gets_slower_is_seen() {
        let mut gauge = gauge(0.000_05, 2e9);
        for _ in 0..200 {
            gauge.observe(32 * 1024, Duration::from_millis(30));
        }
        assert!(gauge.ideal() >= 64 * 1024);
    }

    #[test]
    fn no_request_is_above_the_limit() {
        assert!(gauge(3.0, 1e9).ideal() <= MOST);
    }
}
