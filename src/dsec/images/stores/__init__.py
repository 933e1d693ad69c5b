"""Shared stores of layers: a directory of any filesystem, an S3-compatible bucket, an OCI registry."""
