"""The benchmarks' arithmetic and the form of their reports."""

import json
from pathlib import Path

import pytest

from bench import figures
from bench.create import figure
from bench.density import Ramp
from bench.figures import Report, percentile, summary
from bench.footprint import Footprint
from bench.neighbours import STORMS
from bench.neighbours import figures as ratios


def test_percentiles_are_nearest_ranks() -> None:
    samples = [float(n) for n in range(1, 101)]
    assert [percentile(samples, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert percentile([7.0], 0.5) == 7.0
    assert summary([3.0, 1.0, 2.0]) == {"p50": 2.0, "p90": 3.0, "p99": 3.0, "max": 3.0, "samples": 3}


def test_goals_look_the_right_way() -> None:
    assert figure("a", {"dsec": 7.9}, "ms", goal=8).reached
    assert not figure("a", {"dsec": 8.1}, "ms", goal=8).reached
    assert figure("a", {"dsec": 151.0}, "1/s", goal=150, better="higher").reached
    assert not figure("a", {"dsec": 149.0}, "1/s", goal=150, better="higher").reached


def report(peers: dict[str, float], quick: bool) -> Report:
    made = figure("create_p50_ms", {"dsec": 5.0, **peers}, "ms", goal=8, aim=5)
    return Report(name="create", machine={}, figures=[made], raw={}, quick=quick)


def test_a_quick_run_shows_the_last_full_figure_of_a_slow_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "OUT", tmp_path)
    report({"docker-api": 289.0, "crun": 27.0}, quick=False).write(tmp_path / "create.json")
    written = json.loads((tmp_path / "create.json").read_text())["figures"][0]
    assert (written["peer"], written["peer_value"], written["peers"]) == (
        "docker-api",
        289.0,
        {"docker-api": 289.0, "crun": 27.0},
    )
    quick = report({"crun": 30.0}, quick=True)
    quick.borrow_peers()
    assert quick.figures[0].peers == {"crun": 30.0, "docker-api": 289.0}
    assert set(quick.raw["peers_from"]) == {"docker-api"}
    quick.show({"runc": "apt-get install runc"})
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "1 of 1 figures reach their goal"
    assert "57.8x" in shown and "missing peer runc: apt-get install runc" in shown


def test_a_ramp_that_slows_down_shows_it() -> None:
    ready = [n * 0.1 for n in range(1, 11)] + [1 + n * 0.2 for n in range(1, 11)]
    rates = Ramp(boxes=[], ready=ready, failed=0).rates()
    assert len(rates) == 10
    assert rates[0] == pytest.approx(10) and rates[-1] == pytest.approx(5)


def test_memory_counts_by_the_less_favourable_of_two_ways() -> None:
    before = Footprint(used=100, available=900, server=10, client=5, parts={"Percpu": 0})
    after = Footprint(used=160, available=830, server=30, client=15, parts={"Percpu": 4096})
    assert after.grown(before) == 70 - 10
    assert after.by_part(before, 2)["Percpu"] == 2


def test_the_worst_storm_is_the_goals() -> None:
    def rounds(*p99s: float) -> list[dict[str, float]]:
        return [{"calm_p99": 2.0, "p99": p99, "end_s": p99 / 10} for p99 in p99s]

    raw = {"dsec": {storm: rounds(2.0, 9.0, 3.0) for storm in STORMS}, "crun": {storm: rounds(2.0) for storm in STORMS}}
    raw["dsec"]["disk"] = rounds(4.4)
    worst, *each, slowest = ratios(raw)
    assert (worst.value, worst.goal, worst.reached, worst.peers) == (2.2, 2, False, {"crun": 1.0})
    assert {figure.value for figure in each} == {1.5, 2.2} and len(each) == len(STORMS)
    assert slowest.value == pytest.approx(0.9) and slowest.unit == "s"
