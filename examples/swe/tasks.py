"""The tasks: a real package each, the fault planted in it, and what a rollout may and may not change."""

import tomllib
from pathlib import Path, PurePosixPath

import msgspec

__all__ = ["PLATFORM_ENV", "TOOLKITS", "Agent", "Fault", "Task", "load"]

HERE = Path(__file__).resolve().parent
TOOLKITS = ("search", "patch")
PLATFORM_ENV = {
    "PATH": ":".join(f"/opt/toolkits/{name}/bin" for name in TOOLKITS)
    + ":/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "LC_ALL": "C.UTF-8",
    "HOME": "/root",
}
# Names that steer a test run from wherever they lie.
STEERING = {
    "conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "setup.py", "pyproject.toml", "sitecustomize.py",
    "usercustomize.py", ".coveragerc", ".gitattributes", ".gitmodules",
}  # fmt: skip


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In `file`, the text `good` was replaced by `bad`; `wrong` is a change that does not mend it."""

    file: str
    good: str
    bad: str
    wrong: str


class Agent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the recorded agent searches for and which tests it runs while it works."""

    look: str
    quick_tests: str


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A package at a fixed version; `sha256` is of its source distribution. `source`: what a diff may change, relative to
    the root; `import_path`: directory that is on the import path; `wheels`: what its tests need beside pytest."""

    name: str
    version: str
    sha256: str
    source: tuple[str, ...]
    import_path: str
    wheels: tuple[str, ...]
    fault: Fault
    agent: Agent

    @property
    def env(self) -> dict[str, str]:
        """Environment of every command of this task."""
        root = PurePosixPath("/workspace") / self.import_path
        return {**PLATFORM_ENV, "PYTHONPATH": f"{root}:/opt/site"}

    def is_source(self, path: str) -> bool:
        """Whether a diff's change to `path` counts."""
        return any(path == root or path.startswith(root + "/") for root in self.source) and not self.is_test(path)

    def is_test(self, path: str) -> bool:
        """Whether `path` is a test or configures tests: changing it is tampering."""
        parts = PurePosixPath(path).parts
        name = parts[-1]
        tests = {"tests", "test", "testing"} & set(parts[:-1]) or name.startswith("test_") or name.endswith("_test.py")
        return bool(tests) or name in STEERING or name.endswith(".pth") or ".git" in parts


def load(names: tuple[str, ...] = ()) -> list[Task]:
    """All tasks by name, or those named. Raises KeyError for a name that there is not."""
    tasks = {
        path.stem: msgspec.convert(tomllib.loads(path.read_text()), Task) for path in sorted(HERE.glob("tasks/*.toml"))
    }
    return [tasks[name] for name in names] if names else list(tasks.values())
