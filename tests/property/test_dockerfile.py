"""Any text at all: a Dockerfile is read or refused with a line, words come back from their quotes, patterns agree with regular expressions."""

import re

from hypothesis import given
from hypothesis import strategies as st

from dsec.model.errors import InvalidArgument, Unsupported
from dsec.model.layers import ImageConfig
from dsec.rules.buildplan import plan_stage
from dsec.rules.dockerfile import FLAGS, parse_dockerfile
from dsec.rules.dockerwords import expand, split_words
from dsec.rules.patterns import PathPattern

PIECES = st.sampled_from(
    [*FLAGS, "AS", "--from=", "--chown=1:2", "--mount=x", "${A", "}", ":-", "$A", "\\\n", "\n", " ", "'", '"', "[", "]", ",", "<<EOF", "EOF\n",
     "#", "=", "/x", ".", "*", "a", "é", "\0", "`", "# escape=`\n", "FROM a\n"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=60).map("".join) | st.text(max_size=300))
def test_any_text_is_read_or_refused_with_its_line(text: str) -> None:
    try:
        file = parse_dockerfile(text, "D", {"A": "x"}, {})
        for stage in file.stages:
            plan_stage(file, stage, ImageConfig(env=("A=b",)), {"A": "x"}, {})
    except (InvalidArgument, Unsupported) as error:
        line = error.fields["line"]
        assert isinstance(line, int)
        assert 1 <= line <= text.count("\n") + 1


PLAIN = st.text(alphabet="abc $\"'\\\t{}", max_size=12)


@given(PLAIN)
def test_a_quoted_word_is_one_word_and_comes_back_as_it_was(word: str) -> None:
    quoted = "".join(f"\\{letter}" for letter in word)
    if word:
        assert split_words(f"x {quoted} y", "\\") == ["x", quoted, "y"]
    assert expand(quoted, {}, "\\") == word


NAMES = st.lists(
    st.text(alphabet="ab.", min_size=1, max_size=4).filter(lambda n: n not in (".", "..")), min_size=1, max_size=4
)
PATTERN = st.lists(
    st.sampled_from(["a", "b", "*", "?", "**", "a*", "*b", "[ab]", "[^a]b", "a*b*"]), min_size=1, max_size=4
)


def regular(names: list[str]) -> re.Pattern[str]:
    """The same pattern as a regular expression over the path."""
    out = ""
    for number, name in enumerate(names):
        if name == "**":
            out += "(/[^/]+)+" if number == len(names) - 1 else "(/[^/]+)*"
            continue
        body = name.replace("*", "[^/]*").replace("?", "[^/]") if name[0] != "[" else name
        out += "/" + body
    return re.compile(out, re.DOTALL)


@given(PATTERN, NAMES)
def test_patterns_match_what_a_regular_expression_does(pattern: list[str], names: list[str]) -> None:
    assert PathPattern("/".join(pattern)).matches(names) == bool(regular(pattern).fullmatch("/" + "/".join(names)))
