"""Who sees what, and that nothing grows when it is handed on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.model.errors import InvalidArgument, PermissionDenied
from dsec.rules.access import PERMISSIONS, check_delegation, check_project_path, may, parent_of, sees

segment = st.sampled_from(["a", "b", "ab", "a-b", "x.1"])
path = st.lists(segment, max_size=4).map(lambda parts: "/".join(["root", *parts]))
permissions = st.frozensets(st.sampled_from(sorted(PERMISSIONS)))


@given(path, path)
def test_one_sees_itself_and_below_and_no_other(own: str, project: str) -> None:
    below = project.split("/")[: len(own.split("/"))] == own.split("/")
    assert sees(own, project) == below


@given(path)
def test_every_project_but_root_lies_in_its_parent(project: str) -> None:
    check_project_path(project)
    parent = parent_of(project)
    assert parent is None if project == "root" else parent is not None and sees(parent, project)
    assert parent is None or not sees(project, parent)


@given(path, permissions, path, permissions)
def test_delegation_never_grows(own: str, held: frozenset[str], project: str, given_: frozenset[str]) -> None:
    try:
        result = check_delegation(own, held, project, given_)
    except PermissionDenied:
        assert not (given_ <= held and sees(own, project))
        return
    assert result == given_ <= held
    for permission in result:
        assert may(own, held, permission, project)


@pytest.mark.parametrize(
    "bad",
    ["", "/", "team", "root/", "root//a", "root/A", "root/..", "root/a b", "root/-a", "root/a\n", "root" + "/a" * 16],
)
def test_bad_paths_are_refused(bad: str) -> None:
    with pytest.raises(InvalidArgument):
        check_project_path(bad)


def test_sibling_with_a_common_prefix_is_not_seen() -> None:
    assert not sees("root/team", "root/team2")
    assert not sees("root/team/a", "root/team")


def test_unknown_permission_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        check_delegation("root", frozenset(PERMISSIONS), "root", ["sandbox.fly"])
