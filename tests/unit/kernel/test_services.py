"""Groups of processes that outlive the server."""

import os
from pathlib import Path

import pytest

from dsec.kernel.services import ServiceGroup, node_name

pytestmark = pytest.mark.root


def test_a_program_and_its_children_are_in_the_group_and_end_with_it(tmp_path: Path) -> None:
    group = ServiceGroup(f"{node_name(tmp_path)}-pager")
    assert group.processes() == [] and group.wait_empty(1.0)
    group.kill()
    reader, writer = os.pipe()
    with (tmp_path / "log").open("wb") as log:
        process = group.spawn(["/bin/sh", "-c", f"sleep 60 & echo up > /dev/fd/{writer}; wait"], log=log, keep=[writer])
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.readline() == "up\n"
        found = group.processes()
        assert process.pid in found and len(found) == 2
        assert not group.wait_empty(0.01)
        group.kill()
        assert group.wait_empty(10.0)
    process.wait()
    group.remove()
    group.remove()
    assert list(Path("/sys/fs/cgroup").glob(f"*/{node_name(tmp_path)}-pager")) == []
