"""A Dockerfile as data: its instructions as they were written, its stages, and the steps that a stage comes down to."""

from typing import Literal

from msgspec import Struct

from dsec.model.layers import ImageConfig

__all__ = [
    "CopyStep",
    "Dockerfile",
    "Heredoc",
    "InlineFile",
    "Instruction",
    "RunStep",
    "Stage",
    "StagePlan",
    "Step",
    "WorkdirStep",
]


class Heredoc(Struct, frozen=True, kw_only=True):
    """A here-document: the `name` that ends it, its `text` with a newline after each line, tabs at line starts taken away if that
    was asked for. `expand`: variables in it are replaced, since its name was not quoted."""

    name: str
    text: str
    expand: bool


class Instruction(Struct, frozen=True, kw_only=True):
    """One instruction. `line`: where it begins, from 1. `word`: in capitals. `flags`: its `--name=value` in order. `text`: the rest,
    lines joined. `argv`: its JSON form, None for the shell form."""

    line: int
    word: str
    text: str
    flags: tuple[tuple[str, str], ...] = ()
    argv: tuple[str, ...] | None = None
    heredocs: tuple[Heredoc, ...] = ()


class Stage(Struct, frozen=True, kw_only=True):
    """FROM and what follows it. `base`: an image, a stage's name or number, or "scratch", with the ARGs before the first FROM put in;
    `platform`: asked for, "" if not."""

    line: int
    base: str
    name: str = ""
    platform: str = ""
    instructions: tuple[Instruction, ...] = ()


class Dockerfile(Struct, frozen=True, kw_only=True):
    """All stages. `name`: of the file, for errors. `escape`: the character of line continuations. `globals`: ARGs before the first FROM
    with their values, None for one that has none."""

    name: str
    escape: str
    globals: dict[str, str | None]
    stages: tuple[Stage, ...]


class RunStep(Struct, frozen=True, kw_only=True, tag="run"):
    """A command to be run. `argv`, `env` (all of it, "K=V"), `user` ("" is root) and `cwd` as it gets them. `network`: False where the
    instruction itself asks for none. `shown`: for people."""

    line: int
    argv: tuple[str, ...]
    env: tuple[str, ...]
    user: str
    cwd: str
    network: bool
    shown: str


class InlineFile(Struct, frozen=True, kw_only=True):
    """A file that a here-document holds: its name, if the target is a directory, and its bytes as text."""

    name: str
    text: str


class CopyStep(Struct, frozen=True, kw_only=True, tag="copy"):
    """Files to be put into the image. `sources`: paths or patterns in the context, or in `origin`: a stage's name or number or an image.
    `dest`: absolute; a slash at its end says directory. `owner` ("user:group", "" is 0:0). `mode`: permission bits of all files and
    directories, None: as they are. `extract`: archives among the sources are unpacked (ADD)."""

    line: int
    sources: tuple[str, ...]
    dest: str
    origin: str = ""
    owner: str = ""
    mode: int | None = None
    extract: bool = False
    inline: tuple[InlineFile, ...] = ()
    shown: str = ""


class WorkdirStep(Struct, frozen=True, kw_only=True, tag="workdir"):
    """A directory to be made, owned by `owner` ("" is 0:0), if it is not there."""

    line: int
    path: str
    owner: str = ""
    shown: str = ""


Step = RunStep | CopyStep | WorkdirStep


class StagePlan(Struct, frozen=True, kw_only=True):
    """What a stage comes down to: its steps in order, each with the config that holds after it, and the config at its end."""

    steps: tuple[tuple[Step, ImageConfig], ...]
    config: ImageConfig
    kind: Literal["stage"] = "stage"
