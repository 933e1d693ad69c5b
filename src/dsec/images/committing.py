"""Commits: what a sandbox has changed becomes a layer over those that it was made of, and gets a name."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dsec.images.importing import Quiet
from dsec.images.inputs import ImportConfig, Notes
from dsec.images.making import LayerArgs, Made, make_layer
from dsec.images.names import NameStore, check_name
from dsec.images.store import LayerStore
from dsec.images.upper import Tally, UpperInput
from dsec.model.errors import Busy, ImageUnavailable, NotFound, QuotaExceeded
from dsec.model.layers import Composition, LayerKind, NameRecord
from dsec.model.settings import check_positive, setting
from dsec.model.views import CommitReport, CommitRequest, Portion
from dsec.ports.clock import Clock
from dsec.ports.images import Changed
from dsec.rules.access import ROOT_PROJECT
from dsec.rules.scrub import Scrub

__all__ = ["CommitSettings", "Committer"]

_SHOWN = 50
_MOST_LAYERS = 400
"""Of one image: overlayfs takes 500, and workspaces and toolkits come on top."""


@dataclass(frozen=True)
class CommitSettings:
    """Settings of commits."""

    entries: int = setting(1_000_000, "most changed paths of one commit")
    project_mb: int = setting(65_536, "MiB of layers that the names of one project, root apart, may hold by commits")
    at_once: int = setting(2, "commits under way at any moment; more of them wait")
    waiting: int = setting(16, "commits that may wait; the rest are answered Busy")

    def __post_init__(self) -> None:
        check_positive(self, "entries", "project_mb", "at_once")


class Committer:
    """Implements ports.images.Commits on the stores of a state directory. `close` waits for commits under way."""

    def __init__(self, layers: LayerStore, names: NameStore, clock: Clock, settings: CommitSettings) -> None:
        self._layers = layers
        self._names = names
        self._clock = clock
        self._settings = settings
        self._under_way = 0
        self._workers = ThreadPoolExecutor(settings.at_once, thread_name_prefix="dsec-commit")

    def close(self) -> None:
        """After it nothing can be committed."""
        self._workers.shutdown()

    def check(self, request: CommitRequest) -> None:
        """Raises what can be known before the sandbox is looked at: InvalidArgument for a name or pattern, Busy."""
        check_name(request.name)
        Scrub(request.scrub, request.keep)
        if self._under_way >= self._settings.at_once + self._settings.waiting:
            raise Busy("too many commits wait", retry_after=2.0)

    async def commit(self, request: CommitRequest, changed: Changed) -> CommitReport:
        """Makes, publishes and names the layer. A caller that is cancelled goes when that is done or has failed: the directory is in use
        until then. Raises InvalidArgument, naming the path, QuotaExceeded and ImageUnavailable."""
        self._under_way += 1
        try:
            making = asyncio.get_running_loop().run_in_executor(self._workers, self._commit, request, changed)
            try:
                return await asyncio.shield(making)
            except asyncio.CancelledError:
                await asyncio.wait([making])
                raise
        finally:
            self._under_way -= 1

    def _commit(self, request: CommitRequest, changed: Changed) -> CommitReport:
        now = self._clock.monotonic
        begun = now()
        bounds = ImportConfig(entries=self._settings.entries, content_bytes=changed.most_bytes)
        notes = Notes()
        scrub = Scrub(request.scrub, request.keep, defaults=request.defaults)
        below = self._below(changed.composition)
        # Here, in a worker: it looks at every name that there is.
        self._room(request.name, changed.project, 1)
        source = UpperInput(Path(changed.directory), number=0, config=bounds, notes=notes, scrub=scrub)
        try:
            with self._layers.scratch() as folder:
                tree = list(source.entries())
                read = now()
                config = request.config or changed.composition.config
                args = LayerArgs(LayerKind.BASE, config, below)
                made = make_layer(tree, [source], args, folder / "layer", Quiet())
                written = now()
                self._room(request.name, changed.project, _stored(made))
                self._layers.publish([made], self._namer(request.name, changed, notes))
        except OSError as error:
            raise ImageUnavailable(f"the layer cannot be stored: {error.strerror}") from error
        finally:
            source.close()
        phases = {"read": read - begun, "write": written - read, "publish": now() - written}
        return _report(request.name, made, source, notes, phases)

    def _below(self, composition: Composition) -> tuple[str, ...]:
        if len(composition.layers) >= _MOST_LAYERS:
            raise QuotaExceeded(f"the image would have more than {_MOST_LAYERS} layers", limit=_MOST_LAYERS)
        return composition.layers

    def _namer(self, name: str, changed: Changed, notes: Notes) -> Callable[[str], None]:
        def give_name(digest: str) -> None:
            project = "" if changed.project == ROOT_PROJECT else changed.project
            record = NameRecord(
                name=name, digest=digest, origin=f"sandbox:{changed.sandbox_id}", created=self._clock.now(),
                notes=notes.all(), project=project,
            )  # fmt: skip
            self._names.set(record)

        return give_name

    def _room(self, name: str, project: str, more: int) -> None:
        """Raises QuotaExceeded where the layers that the project's other names stand for leave no room for `more` bytes."""
        if project == ROOT_PROJECT:
            return
        mine = {record.digest for record in self._names.all() if record.project == project and record.name != name}
        held = 0
        for digest in mine:
            try:
                manifest = self._layers.manifest(digest)
            except (NotFound, ImageUnavailable):
                continue  # it holds nothing that this version could read
            held += manifest.data.size + manifest.meta.size
        most = self._settings.project_mb << 20
        if held + more > most:
            raise QuotaExceeded(f"images of {project} hold {held} of {most} bytes; remove some first", project=project)


def _stored(made: Made) -> int:
    return made.manifest.data.size + made.manifest.meta.size


def _portions(tallies: dict[str, Tally]) -> tuple[Portion, ...]:
    largest = sorted(tallies.items(), key=lambda item: (-item[1].bytes, -item[1].entries, item[0]))
    return tuple(Portion(what=name, entries=each.entries, bytes=each.bytes) for name, each in largest[:_SHOWN])


def _report(name: str, made: Made, source: UpperInput, notes: Notes, phases: dict[str, float]) -> CommitReport:
    return CommitReport(
        name=name, digest=made.digest, layers=(*made.manifest.below, made.digest), entries=made.manifest.entries,
        bytes=made.manifest.content_bytes, whiteouts=source.whiteouts, kept=_portions(source.kept),
        scrubbed=_portions(source.scrubbed), notes=notes.all(), phases=phases,
    )  # fmt: skip
