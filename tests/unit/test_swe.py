"""The main job's own judgement: what is tampering, what a closing line says, what a rollout should earn."""

import pytest

from examples.swe.agent import calls
from examples.swe.job import Rollout, kinds
from examples.swe.reward import passed_tests
from examples.swe.tasks import load

TASKS = load()


def test_there_are_eight_tasks_with_pinned_sources() -> None:
    assert len(TASKS) >= 8
    assert all(len(bytes.fromhex(task.sha256)) == 32 for task in TASKS)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_diff_may_change_the_source_and_not_the_tests(task) -> None:
    assert task.is_source(task.fault.file)
    assert task.is_test(task.agent.quick_tests) and not task.is_source(task.agent.quick_tests)
    for path in (
        "conftest.py",
        "pytest.ini",
        "pyproject.toml",
        f"{task.import_path}/sitecustomize.py",
        "a.pth",
        "src/.git/config",
    ):
        assert task.is_test(path) and not task.is_source(path)
    assert not task.is_source("repro.py") and not task.is_test("repro.py")
    assert not task.is_source(task.source[0] + "_more/x.py")


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_agent_never_holds_the_fix_unless_it_makes_it(task) -> None:
    for kind in ("wrong", "tamper"):
        assert all(
            task.fault.good not in word for variant in range(4) for call in calls(task, kind, variant) for word in call
        )
    assert task.fault.good in [word for call in calls(task, "fix") for word in call]
    assert len({task.fault.good, task.fault.bad, task.fault.wrong}) == 3


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("== 589 passed, 21 skipped, 1 xfailed in 5.44s ==", (589, 0)),
        ("1 failed, 130 passed in 1.19s", (130, 1)),
        ("2 errors in 0.1s", (0, 2)),
        ("no tests ran in 0.01s", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_closing_lines(line: str, counts: tuple[int, int]) -> None:
    assert passed_tests(f"...\n{line}\n".encode()) == counts


def test_half_the_rollouts_hold_the_fix() -> None:
    assert kinds(8, tampering=True).count("fix") == 4
    assert kinds(8, tampering=True).count("tamper") == 1
    assert kinds(7, tampering=False) == ["fix"] * 4 + ["wrong"] * 3


def test_what_is_expected_of_each_kind() -> None:
    def expected(kind: str, reward: int | None, tampered: tuple[str, ...] = ()) -> bool:
        return Rollout(task="t", kind=kind, reward=reward, why="", tampered=tampered).expected  # type: ignore[arg-type]

    assert expected("fix", 1) and not expected("fix", 0) and not expected("fix", None)
    assert expected("wrong", 0) and not expected("wrong", 1) and not expected("wrong", None)
    assert expected("tamper", 0, ("conftest.py",)) and not expected("tamper", 0) and not expected("tamper", 1)
