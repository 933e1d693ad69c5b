"""Settings of the image room: mounts, where layers come from, and how much of the disk they may take."""

import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from dsec.model.errors import InvalidArgument
from dsec.model.settings import check_positive, setting
from dsec.model.stores import SCHEMES, StoreOptions, scheme_of

__all__ = ["ImagesSettings", "Stores", "load_stores"]

DEFAULT_STORE = "default"


@dataclass(frozen=True)
class ImagesSettings:
    """Settings of images: their mounts, their loading from a shared store, and the cache of what was loaded."""

    idle_mounts: int = setting(256, "layers that stay mounted though no sandbox holds them, at most")
    idle_seconds: float = setting(600.0, "seconds that a layer stays mounted though no sandbox holds it")
    load: Literal["on-demand", "shared", "whole"] = setting(
        "on-demand",
        "how a layer of a store comes here: on-demand (chunks as they are read), shared (read in place on a shared filesystem), whole (copied first)",
    )
    mechanism: Literal["auto", "fanotify", "fuse"] = setting(
        "auto", "how on-demand reads are caught: auto, fanotify (Linux 6.14 and newer) or fuse"
    )
    store: str = setting("", "URL of the store in which names that are not on this node are looked up; empty: none")
    stores: str = setting(
        "", "TOML file, of mode 0600, with a table for each further store: its url, options and credentials"
    )
    wait_seconds: float = setting(30.0, "seconds that a read waits for a store that does not answer, before it fails")
    fetch_seconds: float = setting(120.0, "seconds that a create waits for the metadata of an image from a store")
    cache_high_mb: int = setting(
        51_200, "MiB of loaded layers on disk at which the least recently used are evicted; 0: never"
    )
    cache_low_mb: int = setting(40_960, "MiB of loaded layers on disk down to which eviction goes")
    cache_interval: float = setting(30.0, "seconds between two looks at the cache")

    def __post_init__(self) -> None:
        check_positive(self, "wait_seconds", "fetch_seconds", "cache_interval")
        if min(self.cache_high_mb, self.cache_low_mb) < 0:
            raise InvalidArgument("not below zero", field="images.cache_high_mb")
        if self.cache_high_mb and self.cache_low_mb > self.cache_high_mb:
            raise InvalidArgument("at most cache_high_mb", field="images.cache_low_mb")
        if self.store and not scheme_of(self.store):
            raise InvalidArgument(f"a URL that begins with one of {', '.join(SCHEMES)}", field="images.store")


class Stores:
    """The operator's stores by name, in the order in which names are looked up in them. Tenants cannot add one or name one."""

    def __init__(self, listed: Mapping[str, StoreOptions]) -> None:
        self._listed = dict(listed)

    def all(self) -> list[StoreOptions]:
        """Each store."""
        return list(self._listed.values())

    def find(self, named: str) -> StoreOptions:
        """The store of that name or URL; an unlisted URL has no credentials. Raises InvalidArgument for anything else."""
        if named in self._listed:
            return self._listed[named]
        for store in self._listed.values():
            if store.url.rstrip("/") == named.rstrip("/"):
                return store
        if not scheme_of(named):
            known = ", ".join(self._listed) or "none"
            raise InvalidArgument(f"{named!a} is neither a store's URL nor a configured store ({known})", field="store")
        return StoreOptions(url=named)


def load_stores(settings: ImagesSettings) -> Stores:
    """The configured stores. Raises InvalidArgument, without a value of the file, for a file that others may read or that is wrong."""
    listed = _listed(Path(settings.stores)) if settings.stores else {}
    if settings.store:
        first = next((name for name, store in listed.items() if store.url == settings.store), DEFAULT_STORE)
        listed = {first: listed.get(first, StoreOptions(url=settings.store)), **listed}
    return Stores(listed)


def _listed(file: Path) -> dict[str, StoreOptions]:
    try:
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise InvalidArgument(f"{file} may be read by others: give it mode 0600", field="images.stores")
        content = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{file} cannot be read: {error}", field="images.stores") from error
    except tomllib.TOMLDecodeError:
        raise InvalidArgument(f"{file} is not TOML", field="images.stores") from None
    found = {}
    for name, table in content.items():
        try:
            found[name] = _checked(msgspec.convert(table, StoreOptions))
        except msgspec.ValidationError:
            # The message could hold what it complains of.
            fields = ", ".join(StoreOptions.__struct_fields__)
            raise InvalidArgument(
                f"store {name}: a url, and of the right types: {fields}", field=f"images.stores.{name}"
            ) from None
        except InvalidArgument as error:
            raise InvalidArgument(f"store {name}: {error.detail}", field=f"images.stores.{name}") from None
    return found


def _checked(store: StoreOptions) -> StoreOptions:
    if not scheme_of(store.url):
        raise InvalidArgument(f"a url that begins with one of {', '.join(SCHEMES)}")
    return replace(store, url=store.url.rstrip("/"))
