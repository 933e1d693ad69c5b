"""Dockerfiles: what is read from them, what steps they come to, and what is refused by line."""

import pytest

from dsec.model.build import CopyStep, RunStep, StagePlan, WorkdirStep
from dsec.model.errors import DSecError, InvalidArgument, NotFound, Unsupported
from dsec.model.layers import ImageConfig
from dsec.rules.buildplan import cache_key, needed_stages, plan_stage, platform_values, unused_arguments
from dsec.rules.dockerfile import parse_dockerfile
from dsec.rules.dockerwords import expand, split_words

ALWAYS = platform_values("amd64")
BASE = ImageConfig(env=("PATH=/usr/bin",), cmd=("python3",), working_dir="/srv")


def planned(text: str, given: dict[str, str] | None = None, base: ImageConfig = BASE, stage: int = -1) -> StagePlan:
    file = parse_dockerfile(text, "Dockerfile", given or {}, ALWAYS)
    return plan_stage(file, file.stages[stage], base, given or {}, ALWAYS)


def runs(text: str, given: dict[str, str] | None = None) -> list[RunStep]:
    return [step for step, _ in planned(text, given).steps if isinstance(step, RunStep)]


def copies(text: str) -> list[CopyStep]:
    return [step for step, _ in planned(text).steps if isinstance(step, CopyStep)]


def refused(text: str, given: dict[str, str] | None = None) -> DSecError:
    with pytest.raises((InvalidArgument, Unsupported)) as raised:
        planned(text, given)
    return raised.value


def test_lines_go_on_after_the_escape_character_and_over_comments() -> None:
    (step,) = runs("FROM a\nRUN one \\\n  # between\n\n  two \\   \n  three\n")
    assert step.argv == ("/bin/sh", "-c", "one   two   three")
    assert step.line == 2


def test_the_escape_directive_changes_what_continues_a_line() -> None:
    (step,) = runs("# escape=`\nFROM a\nRUN dir c:\\ `\n  && echo\n")
    assert step.argv[-1] == "dir c:\\   && echo"


def test_a_directive_after_anything_else_is_a_comment() -> None:
    (step,) = runs("# a comment\n# escape=`\nFROM a\nRUN x \\\n y\n")
    assert step.argv[-1] == "x  y"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$a", "1"), ("${a}", "1"), ("x${a}y", "x1y"), ("$none", ""), ("${none:-d}", "d"), ("${empty:-d}", "d"), ("${empty-d}", ""),
        ("${a:+yes}", "yes"), ("${none:+yes}", ""), ("${empty:+yes}", ""), ("${empty+yes}", "yes"), ("${none:-${a}}", "1"),
        ("\\$a", "$a"), ("'$a'", "$a"), ('"$a b"', "1 b"), ("a\\ b", "a b"), ("$", "$"), ("$1", "$1"), ('"a\\"b"', 'a"b'),
        ("${none:-'x y'}", "x y"),
    ],
)  # fmt: skip
def test_variables_are_replaced(text: str, value: str) -> None:
    assert expand(text, {"a": "1", "empty": ""}, "\\") == value


@pytest.mark.parametrize("text", ["${a", "${", "${}", "${a#b}", "${a:?gone}", "'a", '"a', "${b:-'x}"])
def test_what_is_no_word_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        expand(text, {}, "\\")


def test_words_keep_their_quotes_until_they_are_replaced() -> None:
    assert split_words("a 'b c' \"d e\"f g\\ h", "\\") == ["a", "'b c'", '"d e"f', "g\\ h"]


def test_arguments_before_from_name_the_base_and_come_in_by_declaring_them() -> None:
    text = "ARG V=3.11\nFROM python:${V} AS base\nRUN a\nARG V\nRUN b\n"
    file = parse_dockerfile(text, "Dockerfile", {}, ALWAYS)
    assert file.stages[0].base == "python:3.11"
    before, after = runs(text)
    assert "V=3.11" not in before.env
    assert "V=3.11" in after.env
    assert "V=3.12" in runs(text, {"V": "3.12"})[1].env
    assert parse_dockerfile(text, "Dockerfile", {"V": "3.12"}, ALWAYS).stages[0].base == "python:3.12"


def test_env_wins_over_arg_and_sees_the_values_from_before() -> None:
    (step,) = runs("FROM a\nARG X=arg\nENV X=env Y=$X PATH=/opt:$PATH\nRUN x\n")
    assert dict(pair.split("=", 1) for pair in step.env) == {"X": "env", "Y": "arg", "PATH": "/opt:/usr/bin"}


def test_the_old_form_of_env_takes_the_whole_line() -> None:
    assert planned("FROM a\nENV NAME some words\n").config.env[-1] == "NAME=some words"


def test_env_takes_quoted_and_escaped_values() -> None:
    assert planned("FROM a\nENV A=\"b c\" D='e f' G=h\\ i\n").config.env[-3:] == ("A=b c", "D=e f", "G=h i")


def test_a_run_has_shell_user_directory_and_environment_of_where_it_stands() -> None:
    text = 'FROM a\nUSER app\nWORKDIR /w\nWORKDIR sub\nSHELL ["/bin/bash", "-ec"]\nRUN echo\nRUN ["true", "x y"]\n'
    shell, plain = runs(text)
    assert (shell.argv, shell.user, shell.cwd) == (("/bin/bash", "-ec", "echo"), "app", "/w/sub")
    assert plain.argv == ("true", "x y")
    made = [step.path for step, _ in planned(text).steps if isinstance(step, WorkdirStep)]
    assert made == ["/w", "/w/sub"]


def test_here_documents_of_run_are_scripts_or_follow_their_command() -> None:
    text = (
        "FROM a\nRUN <<EOF\necho $HOME\nEOF\nRUN cat <<'X' > /f && cat <<Y\na\nX\nb\nY\n"
        "RUN <<-E\n\t\tls\n\tE\nRUN <<P\n#!/usr/bin/env python3\nprint(1)\nP\n"
    )
    assert [step.argv for step in runs(text)] == [
        ("/bin/sh", "-c", "echo $HOME\n"),
        ("/bin/sh", "-c", "cat <<'X' > /f && cat <<Y\na\nX\nb\nY\n"),
        ("/bin/sh", "-c", "ls\n"),
        ("/usr/bin/env", "python3", "-c", "#!/usr/bin/env python3\nprint(1)\n"),
    ]


def test_here_documents_of_copy_are_files() -> None:
    quoted, plain = copies(
        "FROM a\nARG V=1\nCOPY <<'a.txt' <<b.txt /d/\n$V\na.txt\n$V\\$V\nb.txt\nCOPY <<E /etc/x\ny\nE\n"
    )
    assert [(each.name, each.text) for each in quoted.inline] == [("a.txt", "$V\n"), ("b.txt", "1$V\n")]
    assert (plain.dest, plain.sources) == ("/etc/x", ())


def test_copy_says_from_where_to_where_and_whose() -> None:
    (step,) = copies("FROM a\nWORKDIR /app\nCOPY --from=x --chown=1:2 --chmod=750 a b* lib/\n")
    assert (step.sources, step.dest, step.origin, step.owner, step.mode) == (
        ("a", "b*"),
        "/app/lib/",
        "x",
        "1:2",
        0o750,
    )
    assert [step.dest for step in copies('FROM a\nWORKDIR /app\nCOPY x .\nCOPY x ../y\nADD ["a b", "/c d"]\n')] == [
        "/app/",
        "/y",
        "/c d",
    ]


def test_config_of_an_image_comes_from_its_instructions() -> None:
    config = planned('FROM a\nLABEL a=b "c d"=e\nEXPOSE 80 90-91/udp\nENTRYPOINT ["/e"]\nUSER 1:2\n').config
    assert config.labels == {"a": "b", "c d": "e"}
    assert config.exposed_ports == ("80/tcp", "90/udp", "91/udp")
    assert (config.entrypoint, config.cmd, config.user) == (
        ("/e",),
        (),
        "1:2",
    )  # the base's command went with its entrypoint
    assert planned('FROM a\nCMD x y\nENTRYPOINT ["/e"]\n').config.cmd == ("/bin/sh", "-c", "x y")


def test_only_the_stages_that_the_target_needs_are_built() -> None:
    text = "FROM a AS one\nFROM b AS two\nFROM c AS three\nCOPY --from=one /x /y\nFROM two\nCOPY --from=0 /z /z\n"
    file = parse_dockerfile(text, "Dockerfile", {}, ALWAYS)
    assert needed_stages(file, None) == (0, 1, 3)
    assert needed_stages(file, "three") == (0, 2)
    assert needed_stages(file, "1") == (1,)
    with pytest.raises(NotFound):
        needed_stages(file, "four")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("FROM a\n\nHEALTHCHECK CMD true\n", 3), ("FROM a\nRUN --mount=type=cache,target=/x pip\n", 2), ("FROM a\nONBUILD RUN x\n", 2),
        ("FROM a\nADD https://a.test/x /x\n", 2), ("FROM a\nADD git@a.test:x /x\n", 2), ("FROM a\nVOLUME /x\n", 2),
        ("FROM a\nCOPY --parents a b\n", 2), ("FROM a\nRUN --network=host x\n", 2),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name_and_line(text: str, line: int) -> None:
    error = refused(text)
    assert isinstance(error, Unsupported)
    assert (error.fields["file"], error.fields["line"]) == ("Dockerfile", line)
    assert f"Dockerfile:{line}: " in str(error)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("RUN x\n", 1), ("", 1), ("FROM a b\n", 1), ("FROM $NONE\n", 1), ("FROM a AS 1x\n", 1), ("FROM a AS x\nFROM b AS x\n", 2),
        ("FROM a\nCOPY x\n", 2), ("FROM a\nCOPY a b c\n", 2), ("FROM a\nENV A\n", 2), ("FROM a\nENV =b\n", 2), ("FROM a\nEXPOSE 0\n", 2),
        ("FROM a\nEXPOSE x\n", 2), ("FROM a\nSHELL /bin/sh\n", 2), ("FROM a\nUSER a b\n", 2), ("FROM a\nRUN\n", 2),
        ("FROM a\nCOPY --chmod=999 a b\n", 2), ("FROM a\nCOPY --chown=a:b:c a b\n", 2), ("FROM a\nRUN <<E\nx\n", 2),
        ("FROM a\nRUN []\n", 2), ("# escape=x\nFROM a\n", 1), ("FROM a\nLABEL 'a=b\n", 2), ("FROM a\nCOPY --from= a b\n", 2),
    ],
)  # fmt: skip
def test_what_is_malformed_is_refused_by_line(text: str, line: int) -> None:
    error = refused(text)
    assert isinstance(error, InvalidArgument)
    assert error.fields["line"] == line


def test_a_misspelt_argument_is_told() -> None:
    file = parse_dockerfile("ARG A\nFROM x\nARG B=1\n", "Dockerfile", {}, ALWAYS)
    assert unused_arguments(file, {"A": "1", "B": "2", "C": "3", "HTTP_PROXY": "p"}) == ["C"]


def key(
    text: str, parent: str = "p", inputs: str = "", rules: tuple[str, ...] = (), given: dict[str, str] | None = None
) -> str:
    step, config = planned(text, given).steps[-1]
    return cache_key(parent, step, config, inputs, rules)


def test_a_step_is_known_by_all_that_its_result_depends_on() -> None:
    run = "FROM a\nRUN x\n"
    keys = {
        key(run), key("FROM a\nRUN y\n"), key(run, parent="q"), key(run, rules=("pypi",)), key("FROM a\nENV A=1\nRUN x\n"),
        key("FROM a\nUSER u\nRUN x\n"), key("FROM a\nARG A=1\nRUN x\n"), key("FROM a\nCOPY a b\n"), key("FROM a\nCOPY a b\n", inputs="i"),
        key("FROM a\nCOPY --chown=1 a b\n"), key("FROM a\nADD a b\n"), key("FROM a\nCOPY <<a b\nx\na\n"),
    }  # fmt: skip
    assert len(keys) == 12


def test_a_step_is_not_known_by_what_makes_no_difference() -> None:
    run = key("FROM a\nRUN x\n")
    assert run == key("\n\nFROM b AS c\n# comment\nRUN x\n")
    assert run == key("FROM a\nRUN x\n", given={"HTTP_PROXY": "http://p"})
    assert key("FROM a\nRUN x\n", rules=("b", "a")) == key("FROM a\nRUN x\n", rules=("a", "b"))
    assert key("FROM a\nRUN --network=none x\n", rules=("a",)) == key("FROM a\nRUN --network=none x\n")
