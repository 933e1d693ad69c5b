"""What a sandbox is shown of CPUs and memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsec.kernel import sights
from dsec.kernel.sights import Sights

KIB = 1 << 10


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sights:
    monkeypatch.setattr(sights.os, "cpu_count", lambda: 8)
    made = Sights(tmp_path / "sights")
    made.open()
    return made


def read(views: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return {what: Path(file).read_text() for what, file in views}


def test_memory_is_the_limit_and_nothing_is_the_hosts(shown: Sights) -> None:
    lines = [line.split() for line in read(shown.of(64 << 20, 8))["meminfo"].splitlines()]
    found = {words[0]: words[1] for words in lines}
    assert found["MemTotal:"] == found["MemFree:"] == found["MemAvailable:"] == str(64 * KIB)
    assert {name for name, value in found.items() if value != "0"} <= {
        "MemTotal:", "MemFree:", "MemAvailable:", "Hugepagesize:",
    }  # fmt: skip
    assert lines[0] == ["MemTotal:", str(64 * KIB), "kB"]


def test_a_fraction_of_a_cpu_is_a_whole_one_and_the_hosts_count_is_left_alone(shown: Sights) -> None:
    assert read(shown.of(1 << 20, 0.5))["online"] == "0\n"
    three = read(shown.of(1 << 20, 2.1))
    assert {three[name] for name in ("online", "possible", "present")} == {"0-2\n"}
    assert set(read(shown.of(1 << 20, 8))) == set(read(shown.of(1 << 20, 64))) == {"meminfo", "loadavg"}
    assert read(shown.of(1 << 20, 1))["cpuinfo"].count("processor") == 1


def test_files_are_made_once_and_bounded_in_number(shown: Sights, tmp_path: Path) -> None:
    assert shown.of(1 << 20, 1) == shown.of(1 << 20, 1)
    for size in range(2, 600):
        shown.of(size << 20, 1)
        assert Path(dict(shown.of(1 << 20, 1))["meminfo"]).is_file()
    assert len(list((tmp_path / "sights").iterdir())) <= 512
    assert all(Path(file).is_file() for _, file in shown.of(1 << 20, 1))
    shown.close()
    assert not (tmp_path / "sights").exists()


def test_an_earlier_servers_files_are_not_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "sights"
    folder.mkdir()
    (folder / "loadavg-0").write_text("wrong")
    shown = Sights(folder)
    shown.open()
    assert read(shown.of(1 << 20, 1))["loadavg"].startswith("0.00 ")


def test_two_workers_that_make_the_same_file_get_one_that_stays(
    shown: Sights, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    both = threading.Barrier(2, timeout=10)
    original = sights._CONTENT["meminfo"]
    first = threading.Event()
    inodes: list[int] = []

    def content(kib: int) -> str:
        both.wait()  # both have found that it is not there
        return original(kib)

    monkeypatch.setitem(sights._CONTENT, "meminfo", content)
    real_link = sights.os.link

    def link(source: Path, target: Path) -> None:
        if target.name.startswith("meminfo") and not first.is_set():
            first.set()
            real_link(source, target)
            inodes.append(target.stat().st_ino)
        else:
            real_link(source, target)

    monkeypatch.setattr(sights.os, "link", link)
    with ThreadPoolExecutor(2) as workers:
        made = {future.result() for future in [workers.submit(shown.of, 5 << 20, 8) for _ in range(2)]}
    assert len(made) == 1
    assert Path(dict(made.pop())["meminfo"]).stat().st_ino == inodes[0]
    assert not [path for path in (tmp_path / "sights").iterdir() if path.name.startswith(".")]
