"""`dsec up` and `dsec down` as a person runs them: a sandbox outlives a killed server, and nothing outlives `dsec down`."""

import json
import os
import signal

import pytest

import dsec
from dsec.sync import DSecClient
from e2e.site_of_one import Site

pytestmark = pytest.mark.root


def test_a_sandbox_outlives_a_killed_server_and_nothing_outlives_down(site: Site) -> None:
    said = site.up()
    assert "listening on http://127.0.0.1:" in said
    with site.client() as client:
        box = client.run_container(dsec.DSecContainerRunArgs(container_image="busybox", memory_limit_mb=64))
        assert box.run_shell("echo hello world").text == "hello world\n"
        kept = box.start(["/bin/sleep", "1000"])
        box.files.write("/tmp/x", b"kept")
        sandbox_id, process_id = box.id, kept.id
        gauges = site.gauges()
        assert gauges['dsec_sandboxes{state="running"}'] == 1.0
        assert gauges["dsec_pool_free_bytes"] > 0
        assert gauges["dsec_exec_seconds_count"] == 1.0
    os.kill(site.pid(), signal.SIGKILL)
    site.up()
    with site.client() as client:
        box = client.get(sandbox_id)
        assert box.files.read("/tmp/x") == b"kept"
        assert [process.running for process in box.processes() if process.id == process_id] == [True]
        assert box.run_shell("echo again").text == "again\n"
    assert "stopped 1 sandbox" in site.down()
    assert site.left() == []


def test_keep_sandboxes(site: Site) -> None:
    site.up()
    with site.client() as client:
        sandbox_id = client.run_container(dsec.DSecContainerRunArgs(container_image="busybox", memory_limit_mb=64)).id
    assert "server stopped" in site.down("--keep-sandboxes")
    site.up()
    with site.client() as client:
        assert client.get(sandbox_id).run_shell("echo here").text == "here\n"
        client.get(sandbox_id).stop()
    assert "stopped 0 sandboxes" in site.down()


def test_one_server_a_state(site: Site) -> None:
    site.up()
    second = site.dsec("up", "--state", str(site.state), "--listen", "127.0.0.1:0", check=False)
    assert second.returncode != 0
    assert str(site.pid()) in second.stderr


def test_plain_http_beyond_loopback_is_refused(site: Site) -> None:
    refused = site.dsec("up", "--state", str(site.state), "--listen", "0.0.0.0:0", check=False, DSEC_SERVER_TLS="off")
    assert refused.returncode != 0
    assert "TLS" in refused.stderr


def test_a_start_in_the_background_that_fails_says_why(site: Site) -> None:
    argv = ("up", "--detach", "--state", str(site.state), "--listen", "0.0.0.0:0")
    refused = site.dsec(*argv, check=False, DSEC_SERVER_TLS="off")
    assert refused.returncode == 1, "as in the foreground"
    assert refused.stderr.splitlines()[0].startswith("dsec: Unsupported: plain HTTP on 0.0.0.0")
    assert str(site.state / "server.log") in refused.stderr


def test_tls_with_an_own_certificate(site: Site) -> None:
    site.dsec("up", "--detach", "--state", str(site.state), "--listen", "127.0.0.1:0", DSEC_SERVER_TLS="on")
    kept = json.loads((site.state / "credentials.json").read_text())
    assert kept["url"].startswith("https://127.0.0.1:")
    with DSecClient(kept["url"], kept["api_key"], ca_file=kept["ca_file"]) as client:
        assert client.me().principal == "root"
    with pytest.raises(dsec.Unavailable), DSecClient(kept["url"], kept["api_key"]) as client:
        client.me()
