"""The paths by which a layer of a store can be read on this host, found out by reading one by each of them."""

import asyncio
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsec.config import Config, StateSettings
from dsec.images.importing import BuildArgs, Importer, Quiet
from dsec.images.mounts import NodeImages
from dsec.images.settings import ImagesSettings
from dsec.images.stores.opening import open_store
from dsec.images.stores.push import PushConfig
from dsec.images.stores.transfer import Node, push_images
from dsec.kernel.clock import SystemClock
from dsec.kernel.probe import Mechanism, Rung
from dsec.model.errors import DSecError, ImageUnavailable
from dsec.model.layers import Composition, ImageConfig, LayerKind
from dsec.model.loading import LoadPath
from dsec.model.stores import StoreOptions
from dsec.wiring import loading

__all__ = ["image_paths"]

_NAME = "doctor"
_BYTES = 300_000
_SETTINGS: dict[LoadPath, dict[str, Any]] = {
    LoadPath.FANOTIFY: {"load": "on-demand", "mechanism": "fanotify"},
    LoadPath.FUSE: {"load": "on-demand", "mechanism": "fuse"},
    LoadPath.SHARED: {"load": "shared"},
    LoadPath.WHOLE: {"load": "whole"},
}
_HOW = {
    LoadPath.FANOTIFY: "chunks are fetched as they are read",
    LoadPath.FUSE: "chunks are fetched as they are read, through FUSE until all are here",
    LoadPath.SHARED: "read in place from a filesystem that is mounted here",
    LoadPath.WHOLE: "copied first",
}


def image_paths(config: Config, scratch: Path) -> Mechanism:
    """Makes a small layer and a store below `scratch`, reads it back by each path as a node of its own would, and removes all of it."""
    with tempfile.TemporaryDirectory(prefix="doctor-", dir=scratch) as made:
        rungs = tuple(asyncio.run(_tried(config, Path(made).resolve())))
    using = next((rung.name for rung in rungs if rung.ok), None)
    advice = "Linux 6.14 has pre-content events of fanotify; FUSE needs /dev/fuse"
    return Mechanism(name="image-paths", using=using, rungs=rungs, needed=False, advice=advice)


async def _tried(config: Config, work: Path) -> list[Rung]:
    content = os.urandom(_BYTES)
    url = f"file://{work / 'store'}"
    await _make(replace(config, node=StateSettings(str(work / "maker"))), work / "source", url, content)
    rungs = []
    for path in LoadPath:
        settings = ImagesSettings(store=url, idle_mounts=0, **_SETTINGS[path])
        own = replace(config, node=StateSettings(str(work / path)), images=settings)
        try:
            await _read(own, content)
        except DSecError as error:
            rungs.append(Rung(name=path, ok=False, why=str(error)))
        else:
            rungs.append(Rung(name=path, ok=True, why=_HOW[path]))
    return rungs


async def _make(config: Config, source: Path, url: str, content: bytes) -> None:
    """A store with one layer."""
    await asyncio.to_thread(source.mkdir)
    await asyncio.to_thread((source / "file").write_bytes, content)
    clock = SystemClock()
    parts = loading(config, clock)
    Importer(parts.layers, parts.names, clock).layer(BuildArgs(LayerKind.DATA, _NAME, source), Quiet())
    store = open_store(StoreOptions(url=url), create=True)
    try:
        async for _ in push_images(
            Node(parts.layers, parts.names, clock, Quiet()), store, [_NAME], PushConfig(), plain=True
        ):
            continue
    finally:
        await store.close()


async def _read(config: Config, content: bytes) -> None:
    """Finds the layer in the store, mounts it, and compares what is read. Raises what stands in the way."""
    clock = SystemClock()
    parts = loading(config, clock)
    images = NodeImages(
        config.state, parts.layers, parts.names, clock, config=config.images, remote=parts.remote, on_demand=parts.on_demand
    )  # fmt: skip
    await images.open()
    try:
        digest = (await parts.remote.find(_NAME)).digest
        (mount,) = await images.mounts(Composition(layers=(digest,), config=ImageConfig()), _NAME)
        try:
            found = await asyncio.to_thread((Path(mount.source) / "file").read_bytes)
        except OSError as error:
            raise ImageUnavailable(f"a read failed: {error.strerror}") from error
        finally:
            await images.release(_NAME)
        if found != content:
            raise ImageUnavailable("other bytes were read than were put into the store")
    finally:
        await images.close()
        await parts.process.end()
