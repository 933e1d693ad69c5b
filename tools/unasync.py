"""Make the blocking client (src/dsec/sdk/_sync) from the public classes of the asynchronous one. `--check` compares only.

Every public method becomes a call through a Portal with the same name, arguments, defaults and docstring. The tables
below say how types and words change; one that is used nowhere is an error, so they cannot outlive what they were for.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src/dsec/sdk/_async"
TARGET = ROOT / "src/dsec/sdk/_sync"

CLASSES = {
    "client": "DSecClient", "sandbox": "Sandbox", "process": "Process", "session": "Session", "files": "Files", "tunnel": "Tunnel",
}  # fmt: skip
"""Modules, and the one public class of each."""

RETURNS = {
    "Sandbox": "Sandbox(self._portal, {call})",
    "Process": "Process(self._portal, {call})",
    "Session": "Session(self._portal, {call})",
    "Files": "Files(self._portal, {call})",
    "Tunnel": "Tunnel(self._portal, {call})",
    "list[Sandbox]": "[Sandbox(self._portal, item) for item in {call}]",
    "list[Session]": "[Session(self._portal, item) for item in {call}]",
}
"""Annotation of an answer that is one of ours -> how the blocking one is made."""

ITEMS = {"Sandbox | SandboxFailed": "item if isinstance(item, SandboxFailed) else Sandbox(self._portal, item)"}
"""Annotation of a yielded item that is one of ours -> how the blocking one is made."""

ARGUMENTS = {
    "Session | str | None": "{name}.inner if isinstance({name}, Session) else {name}",
    "bytes | AsyncIterable[bytes]": "{name} if isinstance({name}, bytes) else self._portal.feed({name})",
}
"""Annotation of an argument -> what is passed on."""

WORDS = {
    "AsyncIterable": "Iterable",
    "An async context manager": "A context manager",
    "Cancelling": "Interrupting it (KeyboardInterrupt)",
    "contextlib.aclosing": "contextlib.closing",
}
"""Words of docstrings and annotations."""

BODIES = {
    (
        "DSecClient",
        "__init__",
    ): "self._portal = Portal()\nself._inner = _async.DSecClient(url, api_key, ca_file=ca_file)",
    ("DSecClient", "open"): "self._portal.start()\nself._portal.run(self._inner.open())",
    ("DSecClient", "close"): (
        "if self._portal.running:\n    try:\n        self._portal.run(self._inner.close())\n"
        "    finally:\n        self._portal.stop()"
    ),
    ("DSecClient", "__aenter__"): "self.open()\nreturn self",
    ("DSecClient", "__aexit__"): "self.close()",
    ("Sandbox", "__aenter__"): "return self",
    ("Sandbox", "__aexit__"): "self.stop()",
    ("Session", "__aenter__"): "return self",
    ("Session", "__aexit__"): "self.close()",
    ("Tunnel", "__aenter__"): "return self",
    ("Tunnel", "__aexit__"): "self.close()",
}
"""Methods that are more than one call."""

DUNDERS = {"__aenter__": "__enter__", "__aexit__": "__exit__"}

PENDING = {"DSecClient": "PENDING_CLIENT", "Sandbox": "PENDING_SANDBOX"}
"""Classes with a table of published names that are refused."""

HOMES = {
    "collections.abc": ["Callable", "Generator", "Iterable", "Mapping", "Sequence"],
    "pathlib": ["Path"],
    "types": ["TracebackType"],
    "dsec.model.layers": ["ImageConfig"],
    "dsec.model.network": ["Flow", "NetworkRule", "NetworkView", "Verdict"],
    "dsec.model.outcome": ["ExecResult"],
    "dsec.model.plan": ["Usage"],
    "dsec.model.views": [
        "CommitReport", "FileEvent", "FileView", "ImageView", "Me", "PreviewView", "ProcessView", "PtySize", "SandboxEvent", "SandboxState", "SandboxView", "SessionView",
    ],
    "dsec.sdk._sync.files": ["Files"],
    "dsec.sdk._sync.process": ["Process"],
    "dsec.sdk._sync.sandbox": ["Sandbox"],
    "dsec.sdk._sync.session": ["Session"],
    "dsec.sdk._sync.tunnel": ["Tunnel"],
    "dsec.sdk.arguments": ["DSecContainerRunArgs"],
    "dsec.sdk.records": ["HttpResponse", "Output", "SandboxFailed", "Transfer"],
}  # fmt: skip
"""Where the names of signatures live; only those used are imported."""

used: set[str] = set()


def mark(rule: object) -> None:
    used.add(repr(rule))


def words(text: str) -> str:
    for old, new in WORDS.items():
        if old in text:
            mark(("WORDS", old))
            text = text.replace(old, new)
    return text


def annotation(node: ast.expr | None, where: str) -> str:
    if node is None:
        raise SystemExit(f"{where}: an annotation is missing")
    return words(node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node))


def parameters(method: ast.FunctionDef | ast.AsyncFunctionDef, where: str) -> tuple[list[str], str]:
    """The parameters as written, and what is passed on to the asynchronous method."""
    names: list[str] = ["self"]
    passed: list[str] = []
    arguments = method.args
    if arguments.vararg or arguments.kwarg or arguments.posonlyargs:
        raise SystemExit(f"{where}: only plain and keyword-only parameters are known here")
    plain = arguments.args[1:]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    groups = [(plain, defaults, "{0}"), (arguments.kwonlyargs, arguments.kw_defaults, "{0}={0}")]
    for members, values, form in groups:
        if members and form != "{0}":
            names.append("*")
        for member, value in zip(members, values, strict=True):
            original = ast.unparse(member.annotation) if member.annotation else ""
            names.append(
                f"{member.arg}: {annotation(member.annotation, where)}" + (f" = {ast.unparse(value)}" if value else "")
            )
            if original in ARGUMENTS:
                mark(("ARGUMENTS", original))
                change = ARGUMENTS[original].format(name=member.arg)
                passed.append(change if form == "{0}" else f"{member.arg}={change}")
            else:
                passed.append(form.format(member.arg))
    return names, ", ".join(passed)


def answered(result: str, call: str, name: str) -> tuple[str, list[str]]:
    """The blocking annotation and body for an awaited or plain answer."""
    if result in RETURNS:
        mark(("RETURNS", result))
        return result, [f"return {RETURNS[result].format(call=call)}"]
    return result, [call if result == "None" else f"return {call}"]


def docstring(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, where: str) -> str:
    text = ast.get_docstring(node, clean=False)
    if text is None:
        raise SystemExit(f"{where}: a docstring is missing")
    return f'"""{words(text)}"""'


def method_text(owner: str, method: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    where = f"{owner}.{method.name}"
    dunder = method.name.startswith("__")
    names, passed = parameters(method, where)
    result = annotation(method.returns, where)
    call = f"self._inner.{method.name}({passed})"
    is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in method.decorator_list)
    if (owner, method.name) in BODIES:
        mark(("BODIES", owner, method.name))
        body = BODIES[owner, method.name].split("\n")
    elif is_property:
        result, body = answered(result, f"self._inner.{method.name}", method.name)
    elif result.startswith("AsyncGenerator[") and result.endswith(", None]"):
        item = result[len("AsyncGenerator[") : -len(", None]")]
        result = f"Generator[{item}, None, None]"
        source = f"self._portal.iterate({call})"
        if item in ITEMS:
            mark(("ITEMS", item))
            body = [f"for item in {source}:", f"    yield {ITEMS[item]}"]
        else:
            body = [f"yield from {source}"]
    elif isinstance(method, ast.AsyncFunctionDef):
        result, body = answered(result, f"self._portal.run({call})", method.name)
    else:
        raise SystemExit(f"{where}: a public method is a coroutine, an iterator or a property")
    if owner == "Files" and result.startswith("list["):
        result = f'"{result}"'  # the method `list` hides the type
    if result == owner:
        result = f'"{result}"'
    name = DUNDERS.get(method.name, method.name)
    signature = f"def {name}({', '.join(names)}) -> {result}:"
    lines = ["@property"] if is_property else []
    if len(signature) > 110:
        lines += [f"def {name}(", *(f"    {part}," for part in names), f") -> {result}:"]
    else:
        lines.append(signature)
    if not dunder:
        lines += [
            f"    {line}" if index == 0 else line for index, line in enumerate(docstring(method, where).split("\n"))
        ]
    return lines + [f"    {line}" for line in body]


def class_text(owner: str, node: ast.ClassDef) -> list[str]:
    lines = [f"class {owner}:", *(docstring(node, owner)).split("\n")]
    lines[1] = "    " + lines[1]
    if owner != "DSecClient":
        lines += ["", f"    def __init__(self, portal: Portal, inner: _async.{owner}) -> None:"]
        lines += ["        self._portal = portal", "        self._inner = inner"]
        lines += ["", "    @property", f"    def inner(self) -> _async.{owner}:"]
        lines += [
            '        """The asynchronous object behind it, for use on the client\'s own event loop only."""',
            "        return self._inner",
        ]
    for item in node.body:
        if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        kept = item.name in DUNDERS or (item.name == "__init__" and owner == "DSecClient")
        if item.name.startswith("_") and not kept:
            continue
        # the first line of each is indented here; docstring lines keep the indentation of the source
        text = method_text(owner, item)
        inside = False
        lines.append("")
        for line in text:
            lines.append(line if inside else f"    {line}")
            quotes = line.count('"""')
            inside = (quotes == 1) ^ inside
    if owner in PENDING:
        mark(("PENDING", owner))
        lines += ["", "    if not TYPE_CHECKING:", "", "        def __getattr__(self, name: str) -> Any:"]
        lines.append(f'            return refusing({PENDING[owner]}, "{owner}", name)')
    return lines


def imports(module: str, owner: str, body: str) -> list[str]:
    tree = ast.parse(body)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    quoted = {
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value.startswith("list[")
    }
    names |= {name for text in quoted for name in text[:-1].split("[")}
    lines: list[str] = []
    for home, offered in HOMES.items():
        wanted = [name for name in offered if name in names and home != f"dsec.sdk._sync.{module}"]
        for name in wanted:
            mark(("HOMES", name))
        if wanted:
            lines.append(f"from {home} import {', '.join(wanted)}")
    if owner in PENDING:
        lines += ["from typing import TYPE_CHECKING, Any", f"from dsec.sdk.pending import {PENDING[owner]}, refusing"]
    lines += [f"import dsec.sdk._async.{module} as _async", "from dsec.sdk.portal import Portal"]
    standard = [line for line in lines if " dsec" not in line.split(" import ")[0]]
    ours = [line for line in lines if line not in standard]
    return [*sorted(standard), "", *sorted(ours, key=lambda line: (line.startswith("from"), line))]


def module_text(module: str, owner: str) -> str:
    tree = ast.parse((SOURCE / f"{module}.py").read_text())
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
    if len(found) != 1:
        raise SystemExit(f"{module}.py has no class {owner}")
    constants = [
        ast.unparse(node)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("OUTPUT_LIMIT", "READ_LIMIT")
    ]
    body = "\n".join(class_text(owner, found[0]))
    if "Async" in body or "await " in body:
        raise SystemExit(f"{owner}: something asynchronous is left; a rule is missing")
    head = f'"""The blocking {owner}. Generated by tools/unasync.py from sdk/_async/{module}.py; do not edit."""'
    parts = [head, "", *imports(module, owner, body), "", f'__all__ = ["{owner}"]', ""]
    parts += [*constants, ""] if constants else []
    return "\n".join(parts) + "\n\n" + body + "\n"


def outputs() -> dict[Path, str]:
    made = {TARGET / f"{module}.py": module_text(module, owner) for module, owner in CLASSES.items()}
    made[TARGET / "__init__.py"] = (
        '"""The blocking client, generated by tools/unasync.py from sdk/_async; do not edit."""\n'
    )
    return made


def unused() -> list[str]:
    rules: list[object] = [("HOMES", name) for names in HOMES.values() for name in names]
    tables: list[tuple[str, dict[str, str]]] = [
        ("RETURNS", RETURNS), ("ITEMS", ITEMS), ("ARGUMENTS", ARGUMENTS), ("WORDS", WORDS), ("PENDING", PENDING),
    ]  # fmt: skip
    rules += [(table, key) for table, entries in tables for key in entries]
    rules += [("BODIES", *key) for key in BODIES]
    return [repr(rule) for rule in rules if repr(rule) not in used]


def main() -> int:
    made = outputs()
    if unused():
        print("rules of tools/unasync.py that nothing uses: " + ", ".join(unused()), file=sys.stderr)
        return 1
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    extra = [path for path in TARGET.glob("*.py") if path not in made]
    if "--check" in sys.argv:
        for path in stale + extra:
            print(f"stale: {path.relative_to(ROOT)}; run tools/unasync.py", file=sys.stderr)
        return 1 if stale or extra else 0
    TARGET.mkdir(exist_ok=True)
    for path in stale:
        path.write_text(made[path])
    for path in extra:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
