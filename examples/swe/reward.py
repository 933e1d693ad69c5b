"""The reward: the agent's diff, taken as data, in a sandbox that no agent has seen, under the package's own tests."""

import re

from msgspec import Struct

import dsec
from examples.swe.tasks import Task

__all__ = ["DIFF_LIMIT", "SUITE", "Verdict", "grade", "passed_tests", "take_diff"]

DIFF_LIMIT = 1 << 20
SUITE = ("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider")
LITERAL = {"GIT_LITERAL_PATHSPECS": "1"}
DIFF = ("git", "diff", "--cached", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD")


class Verdict(Struct, frozen=True, kw_only=True):
    """`reward` 1 or 0 and why; `tampered`: tests and their configuration that the diff touches; `seconds` of the tests."""

    reward: int
    why: str
    tampered: tuple[str, ...] = ()
    seconds: float = 0.0


async def take_diff(box: dsec.Sandbox) -> bytes | None:
    """The work as a diff against the workspace, new files too; None where there is no usable one."""
    await box.exec(["git", "add", "--all"], cwd="/workspace", timeout=60)
    made = await box.exec(DIFF, cwd="/workspace", timeout=60, output_limit=DIFF_LIMIT)
    return made.stdout if made.exit_code == 0 and not made.truncated else None


def passed_tests(output: bytes) -> tuple[int, int]:
    """(passed, failed or broken) of pytest's closing line; (0, 0) without one."""
    lines = output.decode(errors="replace").strip().splitlines()
    counts = dict.fromkeys(("passed", "failed", "error", "errors"), 0)
    for number, word in re.findall(r"(\d+) (passed|failed|errors?)\b", lines[-1] if lines else ""):
        counts[word] += int(number)
    return counts["passed"], counts["failed"] + counts["error"] + counts["errors"]


async def changed(box: dsec.Sandbox) -> list[str]:
    """What the applied diff changed, as the fresh sandbox's own git sees it; what git would ignore, too."""
    command = ["git", "diff", "--cached", "--name-only", "--no-renames", "-z", "HEAD"]
    listing = await box.exec(command, cwd="/workspace", timeout=60, check=True)
    return [path for path in listing.stdout.decode(errors="surrogateescape").split("\0") if path]


async def restore(box: dsec.Sandbox, paths: list[str]) -> None:
    """Put everything that is not the task's source back to how the workspace has it."""
    names = b"\0".join(path.encode(errors="surrogateescape") for path in paths)
    for command in (
        ["git", "reset", "-q", "--pathspec-from-file=-", "--pathspec-file-nul"],
        ["xargs", "-0", "rm", "-rf", "--"],
        ["git", "ls-files", "-z", "--deleted"],
    ):
        done = await box.exec(command, cwd="/workspace", stdin=names, env=LITERAL, timeout=60, check=True)
    if done.stdout:
        checkout = ["git", "checkout", "-q", "HEAD", "--pathspec-from-file=-", "--pathspec-file-nul"]
        left = done.stdout.rstrip(b"\0")
        await box.exec(checkout, cwd="/workspace", stdin=left, env=LITERAL, timeout=60, check=True)


async def grade(box: dsec.Sandbox, task: Task, diff: bytes | None, expected: int) -> Verdict:
    """Score a diff in the fresh sandbox `box`; `expected` is how many tests pass with the reference fix."""
    if diff is None:
        return Verdict(reward=0, why="no usable diff")
    if not diff:
        return Verdict(reward=0, why="nothing was changed")
    await box.files.write("/tmp/agent.diff", diff)
    await box.exec(["git", "update-index", "-q", "--refresh"], cwd="/workspace", timeout=60)
    command = ["git", "apply", "--index", "--whitespace=nowarn", "/tmp/agent.diff"]
    apply = await box.exec(command, cwd="/workspace", timeout=60)
    if apply.exit_code != 0:
        return Verdict(reward=0, why="the diff does not apply")
    paths = await changed(box)
    tampered = tuple(path for path in paths if task.is_test(path))
    foreign = [path for path in paths if not task.is_source(path)]
    if foreign:
        await restore(box, foreign)
    run = await box.exec(SUITE, cwd="/workspace", env=task.env, timeout=300)
    passed, failed = passed_tests(run.stdout)
    if tampered:
        return Verdict(
            reward=0, why="tests or their configuration were changed", tampered=tampered, seconds=run.duration
        )
    good = run.exit_code == 0 and failed == 0 and passed == expected
    why = "all tests pass" if good else f"{passed} of {expected} tests pass, {failed} fail ({run.outcome.value})"
    return Verdict(reward=int(good), why=why, seconds=run.duration)
