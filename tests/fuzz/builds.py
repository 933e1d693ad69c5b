"""Dockerfiles, patterns and copies: any bytes are read or refused with a line."""

from dsec.model.errors import InvalidArgument, NotFound, Unsupported
from dsec.model.layers import ImageConfig
from dsec.model.tree import EntryKind
from dsec.rules.buildplan import cache_key, needed_stages, plan_stage, platform_values
from dsec.rules.dockerfile import parse_dockerfile
from dsec.rules.patterns import Ignore
from dsec.rules.scrub import Scrub
from fuzz.draw import Draw

ALWAYS = platform_values("amd64")
BASE = ImageConfig(env=("PATH=/bin", "A=1"), user="u", working_dir="/w", entrypoint=("e",))


def dockerfile(data: bytes) -> None:
    """Every stage comes to steps, each known by a key of its own kind, or the file is refused with a line that it has."""
    text = data.decode("utf-8", "replace")
    try:
        file = parse_dockerfile(text, "D", {"A": "2"}, ALWAYS)
        for number in needed_stages(file, None):
            plan = plan_stage(file, file.stages[number], BASE, {"A": "2"}, ALWAYS)
            for step, config in plan.steps:
                assert len(cache_key("p", step, config, "", ())) == 64
                assert 1 <= step.line <= text.count("\n") + 1
    except (InvalidArgument, Unsupported) as error:
        assert 1 <= int(str(error.fields["line"])) <= text.count("\n") + 1


def patterns(data: bytes) -> None:
    """A pattern answers for any path, in time, or is refused."""
    draw = Draw(data)
    names = [draw.bytes(draw.below(20)).decode("utf-8", "replace") or "x" for _ in range(1 + draw.below(12))]
    text = draw.rest().decode("utf-8", "replace")
    try:
        Ignore(text).excludes(names)
        scrub = Scrub(text.split("\n")[:100], text.split("\n")[100:200])
    except (InvalidArgument, NotFound):
        return
    assert scrub.rule(names, EntryKind.SOCKET) == "sockets"
    if scrub.rule(names, EntryKind.FILE) is None:
        assert names != ["etc", "hosts"]
    scrub.keeps(names)
