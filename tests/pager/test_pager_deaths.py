"""The pager's processes are killed while readers wait: nothing is lost, and nobody reads what is not so."""

import os
import random
import signal
from pathlib import Path

import pytest

from pager.place import Made, Pager, Reader, alive, away, forget_pages, until

pytestmark = pytest.mark.root


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))


def hello(pager: Pager) -> dict[str, int]:
    found: dict[str, int] = pager.ask("hello", version=1)
    return found


def after_restart(pager: Pager, restarts: int) -> None:
    until(lambda: hello(pager)["restarts"] == restarts)


def test_readers_that_wait_outlive_the_worker(pager: Pager, made: Made, store: Path) -> None:
    target = pager.mount(made)
    with away(store):
        readers = [Reader(target / name) for name in made.files]
        until(lambda: pager.stats(made)["store_errors"] > 0)
        kill(hello(pager)["pid"])
        after_restart(pager, 1)
        until(lambda: pager.stats(made)["store_errors"] > 1)
        assert any(reader.is_alive() for reader in readers)
    for reader, content in zip(readers, made.files.values(), strict=True):
        assert reader.result() == content
    assert pager.stats(made)["errors"] == 0


def test_a_worker_killed_again_and_again_under_load_loses_nothing(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    chance = random.Random(5)
    names = [name for name in made.files if name != "zeros"]
    for round_ in range(1, 6):
        readers = [Reader(target / chance.choice(names)) for _ in range(24)]
        kill(hello(pager)["pid"])
        after_restart(pager, round_)
        for reader in readers:
            assert reader.result() == made.files[reader.path.name]
        forget_pages(target)
    stats = pager.stats(made)
    assert stats["errors"] == 0
    assert stats["bytes_filled"] >= stats["bytes_present"] - len(made.files["zeros"]) - 4096


def test_a_dead_keeper_is_replaced(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    first = hello(pager)
    kill(first["keeper"])
    until(lambda: hello(pager)["keeper"] != first["keeper"])
    assert hello(pager)["pid"] == first["pid"]
    assert (target / "small2").read_bytes() == made.files["small2"]
    kill(first["pid"])
    after_restart(pager, 1)
    assert (target / "large").read_bytes() == made.files["large"]


def test_a_new_worker_serves_what_was_attached_before(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    assert (target / "small1").read_bytes() == made.files["small1"]
    before = pager.stats(made)
    kill(hello(pager)["pid"])
    after_restart(pager, 1)
    after = pager.stats(made)
    for name in ("present", "fetches", "bytes_filled"):
        assert after[name] == before[name], name
    # The question that was taken last may be worked on twice: whether it was answered died with the worker.
    assert before["events"] <= after["events"] <= before["events"] + 1
    assert (target / "odd").read_bytes() == made.files["odd"]


def test_a_killed_reader_takes_nothing_with_it(pager: Pager, made: Made, store: Path) -> None:
    # Over FUSE the kernel lets a killed reader go only with the answer, so that is not to be long in coming.
    target = pager.mount(made, limits={"wait_seconds": 3.0})
    with away(store):
        child = os.fork()
        if child == 0:
            (target / "odd").read_bytes()
            os._exit(0)
        until(lambda: pager.stats(made)["events"] > 0)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        other = Reader(target / "odd")
    assert other.result() == made.files["odd"]
    assert hello(pager)["restarts"] == 0


def test_signals_that_ask_do_not_end_it(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    found = hello(pager)
    for pid in (found["pid"], found["keeper"]):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
    assert (target / "small4").read_bytes() == made.files["small4"]
    assert hello(pager)["pid"] == found["pid"]
