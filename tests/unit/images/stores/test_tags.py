"""Names as tags of a registry: each has one of its own, and none is another's or a tag that means something else."""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec.images.stores.layout import named
from dsec.images.stores.tags import KNOWN_TAG, layer_tag, name_of_tag, tag_of_name
from dsec.model.errors import InvalidArgument

names = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._/:@+-]{0,30}[A-Za-z0-9])?", fullmatch=True).filter(
    lambda name: ".." not in name and "//" not in name and not name.startswith("sha256:")
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(names)
def test_there_and_back(name: str) -> None:
    tag = tag_of_name(named(name))
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", tag)
    assert name_of_tag(tag) == name


def test_other_tags_are_no_names() -> None:
    digest = "0" * 64
    for tag in (layer_tag(digest), KNOWN_TAG + "0a", f"sha256-{digest}", "_x", "a_qb", "a_s_sb", "..", "a_s.._sb", ""):
        assert name_of_tag(tag) is None
    assert tag_of_name(named(f"sha256-{digest}")) == f"_n-sha256-{digest}"
    assert name_of_tag(f"_n-sha256-{digest}") == f"sha256-{digest}"
    with pytest.raises(InvalidArgument):
        tag_of_name(named("a" + "/b" * 60))
