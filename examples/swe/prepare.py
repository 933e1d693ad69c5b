"""What the rollouts stand on: a base image, two toolkits, and a workspace layer for each task, built inside a sandbox."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

import dsec
from dsec.testing.node import Node
from examples.swe.fetch import WHEELS, base_archive, key_of, sdist, wheels
from examples.swe.reward import SUITE, passed_tests
from examples.swe.tasks import HERE, TOOLKITS, Task

__all__ = ["Environment", "prepare"]

Say = Callable[[str], None]

RECIPE = Path(__file__).read_bytes()
# Each step runs inside the sandbox: unpacking, installing and testing are where foreign code runs.
UNPACK = "mkdir -p /workspace && tar -xzf /tmp/sdist --strip-components=1 --no-same-owner -C /workspace"
INSTALL = (
    "PYTHONPATH=$(echo /tmp/wheels/pip-*.whl) python3 -m pip install -q --no-index --find-links /tmp/wheels "
    "--root-user-action=ignore --no-compile --target /opt/site {names} && "
    "python3 -m compileall -q --invalidation-mode unchecked-hash /opt/site"
)
COMMIT = (
    "git config --global user.name builder && git config --global user.email builder@localhost && git init -q -b main && "
    "echo __pycache__ >> .git/info/exclude && git add --all --force -- . ':(exclude,glob)**/__pycache__/**' && "
    "GIT_AUTHOR_DATE=2000-01-01T00:00:00Z GIT_COMMITTER_DATE=2000-01-01T00:00:00Z git commit -q -m workspace"
)
PLANT = "import sys; p, good, bad = sys.argv[1:]; t = open(p).read(); assert t.count(good) == 1; open(p, 'w').write(t.replace(good, bad))"


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Names of what a rollout of one task is composed of, and how many tests pass with the reference fix."""

    task: Task
    image: str
    workspace: str
    toolkits: tuple[str, ...]
    expected: int

    def args(self, job: str) -> dsec.DSecContainerRunArgs:
        """Arguments of a sandbox of this task."""
        return dsec.DSecContainerRunArgs(
            container_image=self.image, workspace=self.workspace, toolkits=self.toolkits, memory_limit_mb=256,
            cpu_cores_limit=1, disk_limit_mb=512, pids_limit=128, ttl_running_stop=900, job=job,
            labels={"task": self.task.name}, init_user="root", cwd="/workspace",
        )  # fmt: skip


def import_base(node: Node, cache: Path, say: Say) -> str:
    archive = base_archive(cache)
    name = f"swe-base:{archive.stem.removeprefix('base-')}"
    if not node.has(name):
        say(f"importing {name}")
        node.dsec("image", "import", name, str(archive))
    return name


def build_toolkits(node: Node, say: Say) -> tuple[str, ...]:
    names = []
    for toolkit in TOOLKITS:
        tree = HERE / "toolkits" / toolkit
        name = f"{toolkit}@{key_of(*(file.read_bytes() for file in sorted(tree.rglob('*')) if file.is_file()))}"
        if not node.has(name):
            say(f"building toolkit {name}")
            node.dsec("layer", "build", "--kind", "toolkit", name, str(tree))
        names.append(name)
    return tuple(names)


async def test_both(box: dsec.Sandbox, task: Task) -> int:
    """Run the suite on the source as published and then with the fault: all pass, then some fail. Answers how many pass."""
    run = await box.exec(SUITE, cwd="/workspace", env=task.env, timeout=300)
    passed, failed = passed_tests(run.stdout)
    if run.exit_code != 0 or failed or not passed:
        raise RuntimeError(f"{task.name}: its tests fail before any fault is planted:\n{run.text[-2000:]}")
    fault = task.fault
    await box.exec(
        ["python3", "-c", PLANT, fault.file, fault.good, fault.bad], cwd="/workspace", timeout=60, check=True
    )
    run = await box.exec(SUITE, cwd="/workspace", env=task.env, timeout=300)
    if run.exit_code != 1 or not passed_tests(run.stdout)[1]:
        raise RuntimeError(f"{task.name}: no test sees the planted fault:\n{run.text[-2000:]}")
    return passed


async def build_workspace(client: dsec.DSecClient, node: Node, task: Task, image: str, cache: Path, name: str) -> int:
    """Build a task's workspace in a sandbox and take the tree out as a layer."""
    args = dsec.DSecContainerRunArgs(container_image=image, memory_limit_mb=1024, pids_limit=256, ttl_running_stop=900)
    async with await client.run_container(args) as box:
        await box.files.upload(sdist(task, cache), "/tmp/sdist")
        await box.files.upload(wheels(cache), "/tmp/wheels")
        await box.run_shell(UNPACK, timeout=60, check=True)
        await box.run_shell(INSTALL.format(names=" ".join(["pytest", *task.wheels])), timeout=300, check=True)
        expected = await test_both(box, task)
        await box.run_shell(COMMIT, cwd="/workspace", env={"HOME": "/root"}, timeout=60, check=True)
        tree = Path(tempfile.mkdtemp(prefix="workspace-", dir=cache))
        try:
            for part in ("workspace", "opt/site", "root/.gitconfig"):
                (tree / part).parent.mkdir(parents=True, exist_ok=True)
                taken = await box.files.download(f"/{part}", tree / part)
                if taken.refused:
                    raise RuntimeError(
                        f"{task.name}: the workspace holds what cannot be taken out: {taken.refused[:5]}"
                    )
            node.dsec("layer", "build", "--kind", "workspace", name, str(tree))
        finally:
            shutil.rmtree(tree)
    return expected


async def prepare(client: dsec.DSecClient, node: Node, tasks: list[Task], cache: Path, say: Say) -> list[Environment]:
    """Everything that `tasks` need, taking from `cache` and the node's store what earlier runs left there."""
    image = import_base(node, cache, say)
    toolkits = build_toolkits(node, say)
    made = []
    for task in tasks:
        key = key_of(msgspec.json.encode(task), WHEELS.read_bytes(), image, RECIPE)
        name = f"{task.name}@{task.version}-{key}"
        counted = node.state / "swe" / f"{task.name}-{key}"
        if not (counted.is_file() and node.has(name)):
            say(f"building workspace {name}")
            expected = await build_workspace(client, node, task, image, cache, name)
            counted.parent.mkdir(exist_ok=True)
            counted.write_text(str(expected))
        made.append(
            Environment(task=task, image=image, workspace=name, toolkits=toolkits, expected=int(counted.read_text()))
        )
    return made
