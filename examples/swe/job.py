"""The main job: rollouts all at once, each with a sandbox for the agent and a fresh one for the reward."""

import asyncio
import time
from collections.abc import Callable

from msgspec import Struct

import dsec
from examples.swe.agent import Kind, work
from examples.swe.prepare import Environment
from examples.swe.reward import Verdict, grade, take_diff

__all__ = ["Rollout", "kinds", "run"]


class Rollout(Struct, frozen=True, kw_only=True):
    """One rollout. Times in seconds, sizes in bytes; `error`: the platform failed, so there is no reward to learn from."""

    task: str
    kind: Kind
    reward: int | None
    why: str
    tampered: tuple[str, ...] = ()
    setup_s: float = 0.0
    tools_s: float = 0.0
    tool_calls: int = 0
    test_s: float = 0.0
    image_bytes_read: int | None = None
    peak_memory_bytes: int = 0
    error: str = ""

    @property
    def expected(self) -> bool:
        """The reference fix earns 1; a wrong fix nothing; tampering nothing, and it is seen."""
        if self.kind == "fix":
            return self.reward == 1 and not self.tampered
        return self.reward == 0 and bool(self.tampered) == (self.kind == "tamper")


def kinds(count: int, tampering: bool) -> list[Kind]:
    """Kinds of a task's rollouts: half with the fix, half without, one of those tampering where asked."""
    wrong = count // 2
    tamper = 1 if tampering and wrong else 0
    every: list[tuple[Kind, int]] = [("fix", count - wrong), ("wrong", wrong - tamper), ("tamper", tamper)]
    return [kind for kind, number in every for _ in range(number)]


async def score(
    client: dsec.DSecClient, environment: Environment, diff: bytes | None, job: str
) -> tuple[Verdict, float]:
    """The verdict on a diff from a fresh sandbox, and the seconds that this sandbox took to be made."""
    async with await client.run_container(environment.args(job), timeout=600) as box:
        return await grade(box, environment.task, diff, environment.expected), box.phases["total"]


async def roll(
    client: dsec.DSecClient, environment: Environment, box: dsec.Sandbox, kind: Kind, variant: int, job: str
) -> Rollout:
    """One rollout in a sandbox that is already running; stops it."""
    task = environment.task
    setup = box.phases["total"]
    try:
        async with box:
            begin = time.perf_counter()
            results = await work(box, task, kind, variant)
            tools = time.perf_counter() - begin
            diff = await take_diff(box)
            usage = await box.metrics()
        verdict, more = await score(client, environment, diff, job)
    except dsec.InfraError as error:
        return Rollout(task=task.name, kind=kind, reward=None, why="", error=f"{type(error).__name__}: {error}")
    return Rollout(
        task=task.name, kind=kind, reward=verdict.reward, why=verdict.why, tampered=verdict.tampered,
        setup_s=setup + more, tools_s=tools, tool_calls=len(results), test_s=verdict.seconds,
        image_bytes_read=usage.image_bytes_read, peak_memory_bytes=usage.memory_peak_bytes,
    )  # fmt: skip


async def run_task(
    client: dsec.DSecClient,
    environment: Environment,
    wanted: list[Kind],
    first: int,
    job: str,
    done: Callable[[Rollout], None],
) -> list[Rollout]:
    """All rollouts of one task; each begins as soon as its sandbox is there."""
    left, tasks, failed = list(wanted), [], []
    async with asyncio.TaskGroup() as group:
        async for item in client.run_containers(environment.args(job), len(wanted)):
            kind = left.pop()
            if isinstance(item, dsec.SandboxFailed):
                failed.append(
                    Rollout(task=environment.task.name, kind=kind, reward=None, why="", error=str(item.error))
                )
                continue
            task = group.create_task(roll(client, environment, item, kind, first, job))
            task.add_done_callback(
                lambda ended: done(ended.result()) if not ended.cancelled() and not ended.exception() else None
            )
            tasks.append(task)
    return failed + [task.result() for task in tasks]


async def run(
    client: dsec.DSecClient, environments: list[Environment], rollouts: int, job: str, done: Callable[[Rollout], None]
) -> list[Rollout]:
    """`rollouts` rollouts at once, spread evenly over the tasks; every second task has one that tampers."""
    share, more = divmod(rollouts, len(environments))
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(
                run_task(client, environment, kinds(share + (number < more), number % 2 == 0), number // 2, job, done)
            )
            for number, environment in enumerate(environments)
        ]
    return [rollout for task in running for rollout in task.result()]
