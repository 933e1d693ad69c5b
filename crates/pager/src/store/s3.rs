//! A store in a bucket of an S3-compatible object store.

use std::time::Duration;

use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{ClientOptions, Error, ObjectStore, RetryConfig};

use super::network::{within, CONNECT, REQUEST};
use super::{BadStore, Store, StoreError};
use dsec_pages::format::{hex, Hash};
use dsec_pages::wire::StoreSpec;

pub struct S3Store {
    client: AmazonS3,
    packs: Path,
}

impl S3Store {
    /// Keys come from `spec`, or from the environment where it has none. Retries are the caller's.
    pub fn new(spec: &StoreSpec) -> Result<Self, BadStore> {
        let bad = |why: String| BadStore {
            url: spec.url.clone(),
            why,
        };
        let rest = spec.url.strip_prefix("s3://").unwrap_or_default();
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(bad("it names no bucket".to_owned()));
        }
        let options = ClientOptions::new()
            .with_connect_timeout(CONNECT)
            .with_timeout(REQUEST)
            .with_allow_http(spec.allow_http);
        let retry = RetryConfig {
            max_retries: 0,
            retry_timeout: Duration::ZERO,
            ..RetryConfig::default()
        };
        let mut builder = match spec.access_key {
            Some(_) => AmazonS3Builder::new(),
            None => AmazonS3Builder::from_env(),
        };
        builder = builder
            .with_bucket_name(bucket)
            .with_client_options(options)
            .with_retry(retry);
        builder = builder.with_region(spec.region.as_deref().unwrap_or("us-east-1"));
        if let Some(endpoint) = &spec.endpoint {
            if endpoint.starts_with("http://") && !spec.allow_http {
                return Err(bad("its endpoint is plain HTTP and allow_http is not set".to_owned()));
            }
            builder = builder.with_endpoint(endpoint);
        }
        if let (Some(key), Some(secret)) = (&spec.access_key, &spec.secret_key) {
            builder = builder.with_access_key_id(key).with_secret_access_key(secret);
        }
        if let Some(token) = &spec.token {
            builder = builder.with_token(token);
        }
        let client = builder.build().map_err(|e| bad(e.to_string()))?;
        let packs = Path::from(prefix).child("v2").child("packs");
        Ok(Self { client, packs })
    }
}

impl Store for S3Store {
    fn read(&self, pack: &Hash, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let path = self.packs.child(hex(pack));
        let range = offset..offset + into.len() as u64;
        let got = within(self.client.get_range(&path, range))?.map_err(|error| match error {
            Error::NotFound { .. } => StoreError::Missing(error.to_string()),
            _ => StoreError::Away(error.to_string()),
        })?;
        if got.len() != into.len() {
            return Err(StoreError::Missing("the pack is shorter".to_owned()));
        }
        into.copy_from_slice(&got);
        Ok(())
    }
}
