"""Two teams on one node: neither sees, uses or stops what is the other's."""

import pytest

import dsec
from dsec.sync import DSecClient
from e2e.site_of_one import Site

pytestmark = pytest.mark.root

ARGS = dsec.DSecContainerRunArgs(container_image="busybox", memory_limit_mb=64, job="same")


def test_two_teams(site: Site) -> None:
    site.up()
    keys = []
    for name in ("one", "two"):
        site.dsec("project", "create", f"root/{name}", "--sandboxes", "1")
        allowed = [word for p in ("sandbox.create", "sandbox.use", "sandbox.read") for word in ("--permission", p)]
        site.dsec("key", "principal", name, "--project", f"root/{name}", *allowed)
        keys.append(site.dsec("key", "create", "--principal", name).stdout.strip())
    with DSecClient(site.url(), keys[0]) as one, DSecClient(site.url(), keys[1]) as two, site.client() as root:
        box = one.run_container(ARGS)
        with pytest.raises(dsec.NotFound):
            two.get(box.id)
        assert two.sandboxes() == []
        assert two.stop_many(job="same") == []
        with pytest.raises(dsec.QuotaExceeded):
            one.run_container(ARGS)
        own = two.run_container(ARGS)
        assert {found.id for found in root.sandboxes(job="same")} == {box.id, own.id}
        assert box.run_shell("echo mine").text == "mine\n"
        box.stop()
        assert one.run_container(ARGS).run_shell("echo again").text == "again\n"
        site.dsec("key", "remove-principal", "two")
        with pytest.raises(dsec.Unauthenticated):
            own.run_shell("true")
