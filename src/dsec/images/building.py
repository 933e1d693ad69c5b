"""Builds: a Dockerfile's steps become layers, each made once and found again, and the last one gets the image's name.

COPY, ADD and WORKDIR are made here, from the records of the layers beneath: nothing of an image runs for them. RUN is done by a Runner, in a
sandbox. A step's layer is kept under a name of its own, so that it lives as long as names do: `expire` takes old ones away.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from dsec.images.context import Archives, ContextDirectory, Files, InlineInput, digest_of
from dsec.images.importing import Importer
from dsec.images.inputs import ImportConfig, Input, Notes, Progress
from dsec.images.making import LayerArgs, make_layer
from dsec.images.names import BUILD_PREFIX, NameStore, check_name
from dsec.images.oci import host_platform
from dsec.images.stacked import StackedImage
from dsec.images.store import LayerStore
from dsec.model.build import CopyStep, Dockerfile, RunStep, Step, WorkdirStep
from dsec.model.errors import ImageUnavailable, InvalidArgument, NotFound, Unsupported
from dsec.model.layers import ImageConfig, LayerKind, NameRecord
from dsec.model.tree import EntryKind, TreeEntry
from dsec.ports.clock import Clock
from dsec.rules.buildplan import SCRATCH, cache_key, needed_stages, plan_stage, platform_values, stage_of
from dsec.rules.copying import Target, make_parents, pick, place
from dsec.rules.dockerfile import located
from dsec.rules.patterns import Ignore

__all__ = ["BuildOptions", "Builder", "Image", "Runner", "Watcher", "expire"]

_MOST_LAYERS = 400


class Runner(Protocol):
    """Runs a step in a sandbox of `image` and makes what it changed a layer with `config`, named `name`; gives the layer's digest. Raises
    the platform's errors, CommandFailed for a command that fails; nothing is left then."""

    async def run(self, image: str, step: RunStep, name: str, config: ImageConfig) -> str: ...


class Watcher(Protocol):
    """Told of each step as it begins, and how it was done: "cached", "made", "nothing changed"."""

    def begin(self, number: int, total: int, shown: str) -> None: ...
    def end(self, how: str, digest: str) -> None: ...


class Image(Struct, frozen=True, kw_only=True):
    """A stage as far as it is built: its layers, lowest first (none: scratch), and the config that holds now."""

    layers: tuple[str, ...]
    config: ImageConfig

    @property
    def top(self) -> str:
        """The digest of the topmost layer; "" of none."""
        return self.layers[-1] if self.layers else ""


@dataclass(frozen=True)
class BuildOptions:
    """What a build is asked for. `context`: directory that COPY takes from. `ignore`: text of its .dockerignore. `arguments`: by ARG name.
    `rules`: names of the network rules that RUN has. `cache`: whether layers of earlier builds may be used."""

    context: Path
    ignore: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    rules: Sequence[str] = ()
    cache: bool = True


class Builder:
    """Builds one Dockerfile. `progress`: told of bytes written."""

    def __init__(
        self, layers: LayerStore, names: NameStore, importer: Importer, clock: Clock, runner: Runner, watcher: Watcher,
        progress: Progress,
    ) -> None:  # fmt: skip
        self._layers = layers
        self._names = names
        self._importer = importer
        self._clock = clock
        self._runner = runner
        self._watcher = watcher
        self._progress = progress
        self._always = platform_values(host_platform().architecture)

    async def build(self, name: str, file: Dockerfile, options: BuildOptions) -> NameRecord:
        """Builds the target and names it `name`. Raises InvalidArgument, Unsupported and NotFound with `file` and `line`, and what the
        runner raises; layers of the steps before stay, to be used by the next build."""
        check_name(name)
        done = dict[int, Image]()
        needed = needed_stages(file, options.target)
        sources = _Sources(self._layers, self.image, file, options, done)
        try:
            for number in needed:
                await self._stage(number, sources)
        finally:
            sources.close()
        return self._finish(name, done[needed[-1]], f"build:{file.name}")

    async def _stage(self, number: int, sources: "_Sources") -> None:
        file, options = sources.file, sources.options
        stage, image = file.stages[number], self._base(file, number, sources.done)
        plan = plan_stage(file, stage, image.config, options.arguments, self._always)
        for count, (step, config) in enumerate(plan.steps, 1):
            self._watcher.begin(count, len(plan.steps), f"[{stage.name or number}] {step.shown}")
            try:
                image = await self._step(image, step, config, number, sources)
            except (InvalidArgument, Unsupported, NotFound) as error:
                raise located(error, file.name, step.line) from error
        sources.done[number] = replace(image, config=plan.config)

    def _base(self, file: Dockerfile, number: int, done: Mapping[int, Image]) -> Image:
        stage = file.stages[number]
        architecture = host_platform().architecture
        if stage.platform and stage.platform not in (f"linux/{architecture}", "linux"):
            raise Unsupported(
                f"{file.name}:{stage.line}: FROM --platform={stage.platform[:50]}: this host is linux/{architecture}", what="platform",
                file=file.name, line=stage.line,
            )  # fmt: skip
        if stage.base == SCRATCH:
            return Image(layers=(), config=ImageConfig(architecture=architecture, os="linux"))
        earlier = stage_of(file.stages, stage.base, number)
        try:
            return done[earlier] if earlier is not None else self.image(stage.base)
        except NotFound as error:
            raise located(error, file.name, stage.line) from error

    def image(self, name: str) -> Image:
        """The image of the store that `name` is, or `name` with the tag latest. Raises NotFound, Conflict and ImageUnavailable."""
        try:
            digest, manifest = self._names.resolve(name, LayerKind.BASE)
        except NotFound:
            try:
                digest, manifest = self._names.resolve(f"{name}:latest", LayerKind.BASE)
            except (NotFound, InvalidArgument):
                hint = f"`dsec image import {name} SOURCE` makes it one"
                raise NotFound(f"no image here is named {name!a}; {hint}", what="image") from None
        return Image(layers=(*manifest.below, digest), config=manifest.config)

    async def _step(self, image: Image, step: Step, config: ImageConfig, stage: int, sources: "_Sources") -> Image:
        if len(image.layers) >= _MOST_LAYERS:
            raise InvalidArgument(f"an image of more than {_MOST_LAYERS} layers", field="dockerfile")
        if isinstance(step, RunStep):
            return await self._run(image, step, config, sources.options)
        if isinstance(step, WorkdirStep):
            return self._workdir(image, step, config, sources.options)
        return self._copy(image, step, config, stage, sources)

    async def _run(self, image: Image, step: RunStep, config: ImageConfig, options: BuildOptions) -> Image:
        if not image.layers:
            raise InvalidArgument("RUN needs an image: there is nothing in scratch that could run", field="dockerfile")
        name = BUILD_PREFIX + cache_key(image.top, step, config, "", options.rules)
        known = self._known(name, config, options)
        if known is not None:
            return known
        digest = await self._runner.run(image.top, step, name, config)
        self._watcher.end("made", digest)
        return Image(layers=(*image.layers, digest), config=config)

    def _workdir(self, image: Image, step: WorkdirStep, config: ImageConfig, options: BuildOptions) -> Image:
        name = BUILD_PREFIX + cache_key(image.top, step, config, "", ())
        known = self._known(name, config, options)
        if known is not None:
            return known
        stack = StackedImage(self._layers, image.layers)
        tree = make_parents(stack.tree, step.path, stack.owner(step.owner))
        with self._layers.scratch() as folder:
            return self._layer(image, config, tree, [], name, folder)

    def _copy(self, image: Image, step: CopyStep, config: ImageConfig, stage: int, sources: "_Sources") -> Image:
        files = sources.files(step.origin, stage)
        inline = InlineInput(step.inline, files.count)
        picked = pick(files.tree, step.sources)
        inputs = hashlib.sha256((digest_of(inline.picked, inline) + digest_of(picked, files)).encode()).hexdigest()
        name = BUILD_PREFIX + cache_key(image.top, step, config, inputs, ())
        known = self._known(name, config, sources.options)
        if known is not None:
            return known
        stack = StackedImage(self._layers, image.layers)
        target = Target(dest=step.dest, owner=stack.owner(step.owner), mode=step.mode)
        with self._layers.scratch() as folder:
            work = self._importer.workshop(folder, self._progress)
            archives = Archives(files, work, files.count + 1)
            try:
                unpack = archives.unpack if step.extract else _as_it_is
                tree = place(stack.tree, [*inline.picked, *picked], target, unpack)
                reading: list[Input] = [*([files] * files.count), inline, *archives.inputs]
                return self._layer(image, config, tree, reading, name, folder)
            finally:
                archives.close()

    def _known(self, name: str, config: ImageConfig, options: BuildOptions) -> Image | None:
        """What an earlier build made of the step, if all of it is still here; it counts as used now."""
        if not options.cache:
            return None
        try:
            image = self.image(name)
            for digest in image.layers:
                self._layers.manifest(digest)
            self._name(name, image.top)
        except (NotFound, ImageUnavailable):
            return None  # never made, or gone since
        self._watcher.end("cached", image.top)
        return replace(image, config=config)

    def _unchanged(self, name: str, image: Image, config: ImageConfig) -> Image:
        if image.layers:
            self._name(name, image.top)
        self._watcher.end("nothing changed", image.top)
        return replace(image, config=config)

    def _layer(
        self, image: Image, config: ImageConfig, tree: Sequence[TreeEntry], reading: Sequence[Input], name: str, folder: Path
    ) -> Image:  # fmt: skip
        """The image with a layer of `tree` on top, kept under `name`; without one where there is nothing in it."""
        if not tree:
            return self._unchanged(name, image, config)
        made = make_layer(
            tree, reading, LayerArgs(LayerKind.BASE, config, image.layers), folder / "layer", self._progress
        )
        self._layers.publish([made], lambda digest: self._name(name, digest))
        self._watcher.end("made", made.digest)
        return Image(layers=(*image.layers, made.digest), config=config)

    def _name(self, name: str, digest: str, origin: str = "build") -> None:
        self._names.set(NameRecord(name=name, digest=digest, origin=origin, created=self._clock.now()))

    def _finish(self, name: str, image: Image, origin: str) -> NameRecord:
        """Names the image; where its last layer says another config than it has, an empty one on top says it."""
        if image.layers and self._layers.manifest(image.top).config == image.config:
            self._name(name, image.top, origin)
            return self._names.record(name)
        root = [TreeEntry(path=b"", kind=EntryKind.DIR, mode=0o755)]
        with self._layers.scratch() as folder:
            made = make_layer(
                root, [], LayerArgs(LayerKind.BASE, image.config, image.layers), folder / "layer", self._progress
            )
            self._layers.publish([made], lambda digest: self._name(name, digest, origin))
        return self._names.record(name)


def _as_it_is(entry: TreeEntry) -> None:
    return None


class _Sources:
    """Where a build's steps take files from. `done`: the stages that are built; `image`: finds one of the store."""

    def __init__(
        self, layers: LayerStore, image: Callable[[str], Image], file: Dockerfile, options: BuildOptions, done: dict[int, Image]
    ) -> None:  # fmt: skip
        self._layers = layers
        self._image = image
        self.file = file
        self.options = options
        self.done = done
        self._context: ContextDirectory | None = None

    def files(self, origin: str, stage: int) -> Files:
        """The context for "", else a stage's image or one of the store. Raises NotFound."""
        if origin:
            number = stage_of(self.file.stages, origin, stage)
            image = self._image(origin) if number is None else self.done[number]
            return StackedImage(self._layers, image.layers)
        if self._context is None:
            bounds, ignore = ImportConfig(), Ignore(self.options.ignore)
            self._context = ContextDirectory(self.options.context, ignore, config=bounds, notes=Notes())
        return self._context

    def close(self) -> None:
        """Lets go of the context."""
        if self._context is not None:
            self._context.close()


def expire(names: NameStore, before: float) -> int:
    """Forgets what builds kept and last used before that time (Unix seconds); how many. The next collection takes their layers, where no
    image has them."""
    old = [record.name for record in names.all() if record.name.startswith(BUILD_PREFIX) and record.created < before]
    for name in old:
        try:
            names.remove(name)
        except NotFound:
            continue  # by another process, between
    return len(old)
