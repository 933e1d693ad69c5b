"""From a store's options to a client of it."""

from dsec.images.stores.artifacts import open_registry
from dsec.images.stores.layout import Store
from dsec.images.stores.objects import open_bucket, open_directory
from dsec.model.errors import InvalidArgument
from dsec.model.stores import StoreOptions, scheme_of

__all__ = ["open_store"]


def open_store(options: StoreOptions, *, create: bool = False) -> Store:
    """A client of the store, made inside a running loop; `create`: for writing, so that a directory may be made. Close it after use.

    Raises InvalidArgument for what is no store's URL, NotFound for a directory that is not there.
    """
    scheme = scheme_of(options.url)
    if scheme == "file":
        return open_directory(options, create=create)
    if scheme == "s3":
        return open_bucket(options)
    if scheme == "oci":
        return open_registry(options, push=create)
    raise InvalidArgument(
        f"{options.url[:200]!a} is no store: file:///path, s3://bucket/prefix or oci://host/repository", field="store"
    )
