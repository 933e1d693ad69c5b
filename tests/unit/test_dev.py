"""./dev before it can count on anything."""

import ast
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "dev").read_text()


def test_an_older_python_gets_as_far_as_being_refused() -> None:
    """It parses there, and annotations, which would not evaluate there, are not evaluated."""
    body = ast.parse(TEXT, feature_version=(3, 8)).body
    first = body[1]
    assert isinstance(first, ast.ImportFrom) and first.module == "__future__" and first.names[0].name == "annotations"
    main = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == "main")
    assert "version_info < (3, 11)" in ast.unparse(main.body[0])
