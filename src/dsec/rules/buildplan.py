"""From a Dockerfile's stages to steps: which stages are needed, what each instruction does, and what a step's result is known by.

ENV goes before ARG; an instruction sees the values from before it. Of what a base image says, environment, user, directory, entrypoint,
command, labels and ports go on; a stage that begins anew has none of another's ARGs.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import asdict, replace

from dsec.model.build import CopyStep, Dockerfile, InlineFile, Instruction, RunStep, Stage, StagePlan, Step, WorkdirStep
from dsec.model.errors import InvalidArgument, NotFound, Unsupported
from dsec.model.layers import ImageConfig
from dsec.rules.dockerfile import located
from dsec.rules.dockerwords import expand, split_words

__all__ = [
    "PREDEFINED",
    "SCRATCH",
    "cache_key",
    "needed_stages",
    "plan_stage",
    "platform_values",
    "stage_of",
    "unused_arguments",
]

SCRATCH = "scratch"
DEFAULT_SHELL = ("/bin/sh", "-c")
PREDEFINED = frozenset(
    name
    for upper in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
    for name in (upper, upper.lower())
)
"""Build arguments that RUN sees without an ARG, and that make no difference to what is cached."""

_PORT = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?(?:/(tcp|udp))?")
_MODE = re.compile(r"[0-7]{3,4}")
_OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?::[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_VARIABLE = re.compile(r"[^=\0]+")
_SHOWN = 200
_KEY_VERSION = 1


def platform_values(architecture: str) -> dict[str, str]:
    """The values of Docker's platform ARGs where linux/`architecture` builds for itself."""
    values = {}
    for prefix in ("TARGET", "BUILD"):
        values[f"{prefix}PLATFORM"] = f"linux/{architecture}"
        values[f"{prefix}OS"], values[f"{prefix}ARCH"], values[f"{prefix}VARIANT"] = "linux", architecture, ""
    return values


def stage_of(stages: Sequence[Stage], reference: str, before: int) -> int | None:
    """The stage that `reference`, a name or number, stands for among the first `before`; None: it is no stage's."""
    for number in reversed(range(before)):
        if stages[number].name and stages[number].name == reference.lower():
            return number
    return int(reference) if reference.isdecimal() and len(reference) < 4 and int(reference) < before else None


def needed_stages(file: Dockerfile, target: str | None) -> tuple[int, ...]:
    """The numbers of the stages that `target` (a name or number; None: the last) comes from, in their order, itself last.

    Raises NotFound for a target that is none.
    """
    stages = file.stages
    last = len(stages) - 1 if target is None else stage_of(stages, target, len(stages))
    if last is None:
        raise NotFound(f"{file.name} has no stage {target!a}", what="stage")
    needed, waiting = set[int](), [last]
    while waiting:
        number = waiting.pop()
        if number in needed:
            continue
        needed.add(number)
        references = [stages[number].base]
        references += [dict(one.flags).get("from", "") for one in stages[number].instructions]
        found = [stage_of(stages, each, number) for each in references if each]
        waiting.extend(each for each in found if each is not None)
    return tuple(sorted(needed))


def unused_arguments(file: Dockerfile, given: Mapping[str, str]) -> list[str]:
    """Build arguments that no ARG asks for: most often misspelt."""
    asked = set(file.globals) | PREDEFINED
    for stage in file.stages:
        for one in stage.instructions:
            if one.word == "ARG":
                asked.update(word.partition("=")[0] for word in split_words(one.text, file.escape))
    return sorted(set(given) - asked)


class _Planner:
    """Goes through one stage. `given`: build arguments; `always`: values that ARG may declare without one (platforms)."""

    def __init__(
        self, file: Dockerfile, base: ImageConfig, given: Mapping[str, str], always: Mapping[str, str]
    ) -> None:
        self._file = file
        self._given = given
        self._always = always
        self._args: dict[str, str] = {}
        self._env: dict[str, str] = {name: value for name, _, value in (pair.partition("=") for pair in base.env)}
        self._shell: tuple[str, ...] = DEFAULT_SHELL
        self._own_command = False
        self.config = base
        self.steps: list[tuple[Step, ImageConfig]] = []

    def _values(self) -> dict[str, str]:
        return {**self._args, **self._env}

    def _expand(self, text: str) -> str:
        found = expand(text, self._values(), self._file.escape)
        if "\0" in found:
            raise InvalidArgument("a NUL in a value", field="dockerfile")
        return found

    def _words(self, text: str) -> list[str]:
        return [self._expand(word) for word in split_words(text, self._file.escape)]

    def _pairs(self, one: Instruction) -> list[tuple[str, str]]:
        """NAME=VALUE ..., or the old form NAME VALUE."""
        words = split_words(one.text, self._file.escape)
        if "=" not in words[0]:
            name, _, value = one.text.partition(" ")
            if not value.strip():
                raise InvalidArgument(f"{one.word} is NAME=VALUE", field="dockerfile")
            return [(self._expand(name), self._expand(value.strip()))]
        found = []
        for word in words:
            name, sign, value = word.partition("=")
            if not sign or not name:
                raise InvalidArgument(f"{one.word} {word[:100]!a} is not NAME=VALUE", field="dockerfile")
            found.append((self._expand(name), self._expand(value)))
        return found

    def arg(self, one: Instruction) -> None:
        for word in split_words(one.text, self._file.escape):
            name, sign, default = word.partition("=")
            name = self._expand(name)
            if not _VARIABLE.fullmatch(name):
                raise InvalidArgument("ARG without a name", field="dockerfile")
            value = self._given.get(name)
            if value is None and sign:
                value = self._expand(default)
            elif value is None:
                value = self._file.globals.get(name, self._always.get(name))
            if value is not None:
                self._args[name] = value

    def label(self, one: Instruction) -> None:
        self.config = replace(self.config, labels={**self.config.labels, **dict(self._pairs(one))})

    def user(self, one: Instruction) -> None:
        user = self._expand(one.text)
        if not user or any(letter.isspace() for letter in user):
            raise InvalidArgument(f"USER {user[:100]!a} is no user", field="dockerfile")
        self.config = replace(self.config, user=user)

    def _shell_form(self, one: Instruction) -> tuple[str, ...]:
        return one.argv if one.argv is not None else (*self._shell, one.text)

    def shell(self, one: Instruction) -> None:
        if one.argv is None:
            raise InvalidArgument('SHELL needs its JSON form: ["program", "argument"]', field="dockerfile")
        self._shell = one.argv

    def cmd(self, one: Instruction) -> None:
        self._own_command = True
        self.config = replace(self.config, cmd=self._shell_form(one))

    def entrypoint(self, one: Instruction) -> None:
        # The base's command was meant for the base's entrypoint.
        kept = self.config.cmd if self._own_command else ()
        self.config = replace(self.config, entrypoint=self._shell_form(one), cmd=kept)

    def expose(self, one: Instruction) -> None:
        ports = list(self.config.exposed_ports)
        for word in self._words(one.text):
            match = _PORT.fullmatch(word)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
            if match is None or not 0 < first <= last <= 65535:
                raise InvalidArgument(f"EXPOSE {word[:100]!a} is no port", field="dockerfile")
            ports += [f"{port}/{match[3] or 'tcp'}" for port in range(first, last + 1)]
        self.config = replace(self.config, exposed_ports=tuple(dict.fromkeys(ports)))

    def workdir(self, one: Instruction) -> None:
        path = self._placed(self._expand(one.text)).rstrip("/") or "/"
        self.config = replace(self.config, working_dir=path)
        if path != "/":
            shown = f"WORKDIR {path}"
            self._add(WorkdirStep(line=one.line, path=path, owner=self.config.user, shown=shown))

    def _placed(self, path: str) -> str:
        """An absolute path: below the stage's directory where it is not. A slash at its end stays."""
        if not path:
            raise InvalidArgument("an empty path", field="dockerfile")
        joined = path if path.startswith("/") else f"{self.config.working_dir or '/'}/{path}"
        parts: list[str] = []
        for part in joined.split("/"):
            if part == "..":
                parts = parts[:-1]
            elif part not in ("", "."):
                parts.append(part)
        slash = "/" if path.endswith(("/", "/.")) or path == "." or not parts else ""
        return ("/" + "/".join(parts)).rstrip("/") + slash

    def run(self, one: Instruction) -> None:
        network = dict(one.flags).get("network", "default")
        if network not in ("default", "none"):
            raise Unsupported(f"RUN --network={network[:50]}: default or none; rules are the build's", what="flag")
        predefined = {name: value for name, value in self._given.items() if name in PREDEFINED}
        env = {**predefined, **self._args, **self._env}
        step = RunStep(
            line=one.line,
            argv=self._command(one),
            env=tuple(f"{name}={value}" for name, value in env.items()),
            user=self.config.user,
            cwd=self.config.working_dir or "/",
            network=network == "default",
            shown=f"RUN {one.text}"[:_SHOWN],
        )
        self._add(step)

    def _command(self, one: Instruction) -> tuple[str, ...]:
        """What is run: with here-documents, they follow the text as the shell reads them; one alone is the script itself."""
        if not one.heredocs:
            return self._shell_form(one)
        if len(one.heredocs) == 1 and re.fullmatch(r"<<-?\S+", one.text):
            script = one.heredocs[0].text
            return _interpreted(script) if script.startswith("#!") else (*self._shell, script)
        documents = "".join(f"{each.text}{each.name}\n" for each in one.heredocs)
        return (*self._shell, f"{one.text}\n{documents}")

    def copy(self, one: Instruction) -> None:
        flags = {name: self._expand(value) for name, value in one.flags}
        mode, owner = flags.get("chmod", ""), flags.get("chown", "")
        if mode and not _MODE.fullmatch(mode):
            raise InvalidArgument(
                f"{one.word} --chmod={mode[:50]!a} is not three or four octal digits", field="dockerfile"
            )
        if owner and not _OWNER.fullmatch(owner):
            raise InvalidArgument(f"{one.word} --chown={owner[:50]!a} is not USER or USER:GROUP", field="dockerfile")
        words = self._copy_words(one)
        if len(words) < 2:
            raise InvalidArgument(f"{one.word} needs a source and a destination", field="dockerfile")
        inline, plain = self._inline(one), [word for word in words[:-1] if not word.startswith("<<")]
        remote = next((word for word in plain if re.match(r"[a-z+]+://|git@", word)), None)
        if one.word == "ADD" and remote is not None:
            raise Unsupported(
                f"ADD of {remote[:100]!a}: only files of the context; fetch it in a RUN with network rules",
                what="source",
            )
        dest = self._placed(words[-1])
        if len(words) > 2 and not dest.endswith("/"):
            raise InvalidArgument(
                f"{one.word} of several sources needs a destination that ends with a slash", field="dockerfile"
            )
        step = CopyStep(
            line=one.line, sources=tuple(plain), dest=dest, origin=flags.get("from", ""), owner=owner,
            mode=int(mode, 8) if mode else None, extract=one.word == "ADD", inline=inline,
            shown=f"{one.word} {one.text}"[:_SHOWN],
        )  # fmt: skip
        self._add(step)

    def _copy_words(self, one: Instruction) -> list[str]:
        if one.argv is not None:
            return [self._expand(word) for word in one.argv]
        return [
            word if word.startswith("<<") else self._expand(word) for word in split_words(one.text, self._file.escape)
        ]

    def _inline(self, one: Instruction) -> tuple[InlineFile, ...]:
        def text_of(text: str) -> str:
            return expand(text, self._values(), self._file.escape, quotes=False)

        return tuple(
            InlineFile(name=each.name, text=text_of(each.text) if each.expand else each.text) for each in one.heredocs
        )

    def env(self, one: Instruction) -> None:
        pairs = self._pairs(one)
        for name, value in pairs:
            if not _VARIABLE.fullmatch(name):
                raise InvalidArgument(f"ENV {name[:100]!a} is no name", field="dockerfile")
            self._env[name] = value
        self.config = replace(self.config, env=tuple(f"{name}={value}" for name, value in self._env.items()))

    def _add(self, step: Step) -> None:
        self.steps.append((step, self.config))


_TAKE: dict[str, Callable[[_Planner, Instruction], None]] = {
    "ADD": _Planner.copy,
    "ARG": _Planner.arg,
    "CMD": _Planner.cmd,
    "COPY": _Planner.copy,
    "ENTRYPOINT": _Planner.entrypoint,
    "ENV": _Planner.env,
    "EXPOSE": _Planner.expose,
    "LABEL": _Planner.label,
    "RUN": _Planner.run,
    "SHELL": _Planner.shell,
    "USER": _Planner.user,
    "WORKDIR": _Planner.workdir,
}


def _interpreted(script: str) -> tuple[str, ...]:
    """The command line of a script by its first line: its text is an argument, so that it is no file of the image."""
    words = script[2:].split("\n", 1)[0].split()
    if not words:
        raise InvalidArgument("a script whose first line names no interpreter", field="dockerfile")
    named = [word for word in words if not word.startswith("-")][-1].rpartition("/")[2]
    return (*words, "-e" if named in ("perl", "ruby", "node") else "-c", script)


def plan_stage(
    file: Dockerfile, stage: Stage, base: ImageConfig, given: Mapping[str, str], always: Mapping[str, str]
) -> StagePlan:
    """The steps of `stage` on an image of config `base`. `given`: build arguments. `always`: values that an ARG may declare (platforms).

    Raises InvalidArgument and Unsupported, both with `file` and `line`.
    """
    planner = _Planner(file, base, given, always)
    for one in stage.instructions:
        try:
            _TAKE[one.word](planner, one)
        except (InvalidArgument, Unsupported) as error:
            raise located(error, file.name, one.line) from error
    return StagePlan(steps=tuple(planner.steps), config=planner.config)


def cache_key(parent: str, step: Step, config: ImageConfig, inputs: str, rules: Sequence[str]) -> str:
    """What the layer of a step is known by, 64 hex digits: equal where its result may be used again.

    `parent`: digest of the layer beneath, "" for none. `inputs`: digest of the files that it takes. `rules`: names of the network rules
    that it runs under. Where the step stands in the file, and proxies, make no difference.
    """
    parts = {name: value for name, value in asdict(step).items() if name not in ("line", "shown")}
    if isinstance(step, RunStep):
        parts["env"] = [pair for pair in step.env if pair.partition("=")[0] not in PREDEFINED]
        parts["rules"] = sorted(rules) if step.network else []
    if isinstance(step, CopyStep):
        parts["inline"] = [[each.name, each.text] for each in step.inline]
    whole = [_KEY_VERSION, parent, type(step).__name__, parts, asdict(config), inputs]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
