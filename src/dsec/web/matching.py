"""From a method and a path to a route: a tree of segments, walked once a request."""

from typing import Generic, TypeVar

from dsec.web.routes import Route

__all__ = ["Matcher"]

T = TypeVar("T")


class _Node(Generic[T]):
    __slots__ = ("fixed", "here", "name", "parameter", "rest", "rest_name")

    def __init__(self) -> None:
        self.fixed: dict[str, _Node[T]] = {}
        self.name = ""
        self.parameter: _Node[T] | None = None
        self.here: dict[str, T] = {}
        self.rest: dict[str, T] = {}
        self.rest_name = ""


class Matcher(Generic[T]):
    """Fixed segments win over parameters, parameters over `{name:rest}`."""

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()

    def add(self, route: Route, value: T) -> None:
        """Adds `value` for `route`. Raises ValueError when its method and path are taken or its template is malformed."""
        node = self._root
        methods = node.here
        for segment in route.path.strip("/").split("/"):
            if methods is node.rest:
                raise ValueError(f"{route.path}: nothing can follow the rest")
            if segment.startswith("{") and segment.endswith(":rest}"):
                node.rest_name = segment[1:-6]
                methods = node.rest
            elif segment.startswith("{"):
                if node.parameter is None:
                    node.parameter, node.name = _Node(), segment[1:-1]
                if node.name != segment[1:-1]:
                    raise ValueError(f"{route.path}: this segment is called {node.name} elsewhere")
                node = node.parameter
                methods = node.here
            else:
                node = node.fixed.setdefault(segment, _Node())
                methods = node.here
        if route.method in methods:
            raise ValueError(f"{route.method} {route.path} is there twice")
        methods[route.method] = value

    def find(self, path: str, method: str) -> tuple[T | None, dict[str, str], tuple[str, ...]]:
        """The value and the path's parameters; without one, the methods that the path has (none: no such path)."""
        node = self._root
        params: dict[str, str] = {}
        rest: tuple[dict[str, T], str, dict[str, str]] | None = None
        start = 1
        segments = path[1:].split("/")
        for segment in segments:
            if node.rest:
                rest = (node.rest, node.rest_name, {**params, node.rest_name: path[start:]})
            start += len(segment) + 1
            following = node.fixed.get(segment)
            if following is None:
                following = node.parameter
                if following is None or not segment:
                    node = _Node()
                    break
                params[node.name] = segment
            node = following
        methods = node.here
        if not methods and rest is not None:
            methods, params = rest[0], rest[2]
        elif not methods and node.rest:
            methods, params = node.rest, {**params, node.rest_name: ""}
        value = methods.get(method)
        if value is None and method != "WS":
            value = methods.get("ANY")
        return value, params, tuple(methods)
