//! A store in a registry: packs are blobs of a repository, read by ranges, with a token where the registry wants one.

use std::sync::Mutex;

use reqwest::header::{AUTHORIZATION, RANGE, WWW_AUTHENTICATE};
use reqwest::{Client, Response, StatusCode, Url};
use serde::Deserialize;

use super::network::{within, CONNECT, REQUEST};
use super::{BadStore, Store, StoreError};
use crate::shared::lock;
use dsec_pages::format::{hex, Hash, MAX_PACK};
use dsec_pages::wire::StoreSpec;

const MAX_TOKEN_ANSWER: usize = 64 * 1024;

pub struct OciStore {
    client: Client,
    blobs: Url,
    repository: String,
    user: Option<(String, String)>,
    allow_http: bool,
    /// The value of the Authorization header that last did.
    authorization: Mutex<Option<String>>,
}

#[derive(Deserialize)]
struct Token {
    #[serde(alias = "access_token")]
    token: String,
}

fn away(error: &reqwest::Error) -> StoreError {
    StoreError::Away(error.to_string())
}

fn is_loopback(url: &Url) -> bool {
    let host = url
        .host_str()
        .unwrap_or_default()
        .trim_start_matches('[')
        .trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

impl OciStore {
    pub fn new(spec: &StoreSpec) -> Result<Self, BadStore> {
        let bad = |why: &str| BadStore {
            url: spec.url.clone(),
            why: why.to_owned(),
        };
        let rest = spec.url.strip_prefix("oci://").unwrap_or_default();
        let (host, repository) = rest.split_once('/').ok_or_else(|| bad("it names no repository"))?;
        let repository = repository.trim_end_matches('/');
        if host.is_empty() || repository.is_empty() {
            return Err(bad("it names no host or no repository"));
        }
        let parse = |scheme: &str| Url::parse(&format!("{scheme}://{host}/v2/{repository}/blobs/"));
        let mut blobs = parse("https").map_err(|e| bad(&e.to_string()))?;
        if spec.allow_http || is_loopback(&blobs) {
            blobs = parse("http").map_err(|e| bad(&e.to_string()))?;
        }
        let builder = Client::builder()
            .connect_timeout(CONNECT)
            .timeout(REQUEST)
            .user_agent("dsec-pager");
        let client = builder.build().map_err(|e| bad(&e.to_string()))?;
        Ok(Self {
            client,
            blobs,
            repository: repository.to_owned(),
            user: spec.username.clone().zip(spec.password.clone()),
            allow_http: spec.allow_http,
            authorization: Mutex::new(spec.token.as_ref().map(|token| format!("Bearer {token}"))),
        })
    }

    async fn get(&self, url: Url, range: &str) -> Result<Response, StoreError> {
        let ask = || {
            let request = self.client.get(url.clone()).header(RANGE, range);
            match &*lock(&self.authorization) {
                Some(value) => request.header(AUTHORIZATION, value),
                None => request,
            }
        };
        let answer = ask().send().await.map_err(|e| away(&e))?;
        if answer.status() != StatusCode::UNAUTHORIZED {
            return Ok(answer);
        }
        let challenge = answer
            .headers()
            .get(WWW_AUTHENTICATE)
            .and_then(|v| v.to_str().ok())
            .unwrap_or_default();
        let value = self.authorize(challenge).await?;
        *lock(&self.authorization) = Some(value);
        ask().send().await.map_err(|e| away(&e))
    }

    /// What the registry wants to see, as its challenge says.
    async fn authorize(&self, challenge: &str) -> Result<String, StoreError> {
        let refused = |why: &str| StoreError::Away(format!("the registry refuses: {why}"));
        if let Some((name, password)) = self.user.as_ref().filter(|_| starts_with(challenge, "basic")) {
            return Ok(format!("Basic {}", base64(format!("{name}:{password}").as_bytes())));
        }
        if !starts_with(challenge, "bearer") {
            return Err(refused("no way to say who asks"));
        }
        let realm = parameter(challenge, "realm").and_then(|text| Url::parse(&text).ok());
        let mut realm = realm.ok_or_else(|| refused("its challenge names no realm"))?;
        let plain = realm.scheme() == "http" && (self.allow_http || is_loopback(&realm));
        if realm.scheme() != "https" && !plain {
            return Err(refused("its tokens come over plain HTTP"));
        }
        if let Some(service) = parameter(challenge, "service") {
            realm.query_pairs_mut().append_pair("service", &service);
        }
        realm
            .query_pairs_mut()
            .append_pair("scope", &format!("repository:{}:pull", self.repository));
        let mut request = self.client.get(realm);
        if let Some((name, password)) = &self.user {
            request = request.basic_auth(name, Some(password));
        }
        let mut answer = request.send().await.map_err(|e| away(&e))?;
        if !answer.status().is_success() {
            return Err(refused("no token"));
        }
        let mut body = Vec::new();
        while let Some(part) = answer.chunk().await.map_err(|e| away(&e))? {
            body.extend_from_slice(&part);
            if body.len() > MAX_TOKEN_ANSWER {
                return Err(refused("its token is too long"));
            }
        }
        let token: Token = serde_json::from_slice(&body).map_err(|e| refused(&e.to_string()))?;
        Ok(format!("Bearer {}", token.token))
    }

    async fn fill(&self, pack: &Hash, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        // "./", since a name with a colon by itself would be an absolute URL.
        let url = self.blobs.join(&format!("./sha256:{}", hex(pack)));
        let url = url.map_err(|e| StoreError::Away(e.to_string()))?;
        let last = offset + into.len() as u64 - 1;
        let mut answer = self.get(url, &format!("bytes={offset}-{last}")).await?;
        let mut skip = match answer.status() {
            StatusCode::PARTIAL_CONTENT => 0,
            // A registry without ranges sends all of the pack.
            StatusCode::OK if offset <= MAX_PACK => offset,
            StatusCode::NOT_FOUND | StatusCode::RANGE_NOT_SATISFIABLE => {
                return Err(StoreError::Missing(answer.status().to_string()));
            }
            other => return Err(StoreError::Away(other.to_string())),
        };
        let mut got = 0;
        while let Some(part) = answer.chunk().await.map_err(|e| away(&e))? {
            let skipped = skip.min(part.len() as u64);
            skip -= skipped;
            let part = part.get(skipped as usize..).unwrap_or_default();
            let taken = part.len().min(into.len() - got);
            into[got..got + taken].copy_from_slice(&part[..taken]);
            got += taken;
            if got == into.len() {
                return Ok(());
            }
        }
        Err(StoreError::Missing("the pack is shorter".to_owned()))
    }
}

impl Store for OciStore {
    fn read(&self, pack: &Hash, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        if into.is_empty() {
            return Ok(());
        }
        within(self.fill(pack, offset, into))?
    }
}

fn starts_with(challenge: &str, scheme: &str) -> bool {
    challenge
        .get(..scheme.len())
        .is_some_and(|start| start.eq_ignore_ascii_case(scheme))
}

/// A quoted parameter of a challenge.
fn parameter(challenge: &str, name: &str) -> Option<String> {
    let start = challenge.find(&format!("{name}=\""))? + name.len() + 2;
    let rest = challenge.get(start..)?;
    rest.get(..rest.find('"')?).map(str::to_owned)
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0u32, |sum, byte| sum << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for n in 0..4 {
            let digit = char::from(DIGITS[(bits >> (18 - 6 * n) & 63) as usize]);
            text.push(if n <= group.len() { digit } else { '=' });
        }
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_read() {
        let text = r#"Bearer realm="https://a.example/token",service="reg",scope="x""#;
        assert_eq!(parameter(text, "realm").as_deref(), Some("https://a.example/token"));
        assert_eq!(parameter(text, "service").as_deref(), Some("reg"));
        assert_eq!(parameter("Bearer realm=\"open", "realm"), None);
        assert!(starts_with(text, "bearer"));
        assert!(!starts_with("", "basic"));
    }

    #[test]
    fn a_realm_in_the_clear_gets_no_password() {
        let text = r#"{"url": "oci://registry.example/a/b", "username": "me", "password": "secret"}"#;
        let store = OciStore::new(&serde_json::from_str(text).unwrap()).unwrap();
        let challenge = r#"Bearer realm="http://elsewhere.example/token""#;
        let refused = within(store.authorize(challenge)).unwrap().unwrap_err();
        assert!(refused.to_string().contains("plain HTTP"), "{refused}");
    }

    #[test]
    fn base64_is_that_of_rfc_4648() {
        for (plain, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(plain.as_bytes()), text);
        }
    }
}
