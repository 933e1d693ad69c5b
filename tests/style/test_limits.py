"""Files, functions and constructors stay short enough to be read."""

import ast

from style.sources import ROOT, allowed, python_files, rust_files, rust_functions

FILE, FUNCTION, CONSTRUCTOR = 499, 59, 8
# Records of arguments and settings are lists of fields by nature.
RECORD_ENDS = ("Args", "Config", "Settings")


def over(sizes: dict[str, int], limit: int, section: str) -> list[str]:
    """What breaks `limit` beyond its allowance, and allowances that are too large."""
    listed: dict[str, int] = allowed()[section]
    wrong = [f"{name}: {size}, limit {limit}" for name, size in sizes.items() if size > listed.get(name, limit)]
    for name, size in listed.items():
        if sizes.get(name, 0) < size:
            wrong.append(f"{name}: allowed {size} but has {sizes.get(name, 0)}: shrink or remove the entry")
    return wrong


def test_files_are_short() -> None:
    sizes = {name: len((ROOT / name).read_text().splitlines()) for name in python_files() + rust_files()}
    assert len(sizes) > 10
    assert over(sizes, FILE, "file_lines") == []


def test_functions_are_short() -> None:
    sizes: dict[str, int] = {}
    for name in python_files():
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                sizes[f"{name}::{node.name}"] = max(
                    sizes.get(f"{name}::{node.name}", 0), (node.end_lineno or node.lineno) - node.lineno + 1
                )
    for name in rust_files():
        for function, _, lines in rust_functions((ROOT / name).read_text()):
            sizes[f"{name}::{function}"] = max(sizes.get(f"{name}::{function}", 0), lines)
    assert len(sizes) > 10
    assert over(sizes, FUNCTION, "function_lines") == []


def parameters(node: ast.ClassDef) -> int:
    """Parameters of the constructor that a class writes, or that @dataclass writes for it."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return len(item.args.posonlyargs + item.args.args + item.args.kwonlyargs) - 1
    names = [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
    if any(name.endswith("dataclass") for name in names) and not node.name.endswith(RECORD_ENDS):
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item)]
        return sum("init=False" not in ast.unparse(item) for item in fields)
    return 0


def test_constructors_are_narrow() -> None:
    sizes = {
        f"{name}::{node.name}": parameters(node)
        for name in python_files()
        for node in ast.walk(ast.parse((ROOT / name).read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.endswith(RECORD_ENDS)
    }
    assert over(sizes, CONSTRUCTOR, "constructor_parameters") == []


def test_the_list_of_exceptions_only_shrinks() -> None:
    listed = sum(len(section) for section in allowed().values() if isinstance(section, dict))
    assert listed == allowed()["entries"], "set `entries` to the shorter length; it never grows"


def test_rust_functions_are_measured() -> None:
    text = "fn a() {\n  let c = '{'; // {\n  let s = \"}\";\n}\ntrait T { fn b(x: [u8; 2]); }\nfn c(x: [u8; 3]) {\n}\n"
    assert rust_functions(text) == [("a", 1, 4), ("c", 6, 2)]
