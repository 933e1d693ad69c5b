"""Lists of sandboxes, and the stop of many."""

import asyncio
import re

from dsec.edge.journal import Journal
from dsec.edge.lifecycle import Lifecycle
from dsec.edge.resident import Resident
from dsec.model.errors import InvalidArgument
from dsec.model.spec import SandboxSpec
from dsec.model.views import ListQuery, Page, SandboxState, SandboxView
from dsec.rules import lifecycle as table
from dsec.rules.access import sees

__all__ = ["Listing"]

_CURSOR = re.compile(r"(?P<created>\d{1,12}\.\d{1,9})_(?P<id>[a-z0-9]{1,64})\Z")
_LIMIT_MAX = 1000
_STOPS_AT_ONCE = 32
_READ_ROWS = 500


def _cursor(view: SandboxView) -> str:
    return f"{view.created:.6f}_{view.id}"


def _after(cursor: str | None) -> tuple[float, str] | None:
    if cursor is None:
        return None
    found = _CURSOR.match(cursor)
    if found is None:
        raise InvalidArgument("not a cursor of this list", field="cursor")
    return float(found["created"]), found["id"]


def _matches(query: ListQuery, project: str, spec: SandboxSpec) -> bool:
    return (
        sees(query.project, project)
        and (query.job is None or spec.job == query.job)
        and all(spec.labels.get(key) == value for key, value in query.labels.items())
    )


class Listing:
    """Living sandboxes come from memory; those that are gone, where they are asked for, from the journal."""

    def __init__(self, lifecycle: Lifecycle, journal: Journal) -> None:
        self._lifecycle = lifecycle
        self._journal = journal

    def page(self, query: ListQuery) -> Page:
        """A page, newest first. Raises InvalidArgument for a limit or cursor that cannot be."""
        if not 1 <= query.limit <= _LIMIT_MAX:
            raise InvalidArgument(f"1 to {_LIMIT_MAX}", field="limit")
        after = _after(query.cursor)
        if query.states and SandboxState.GONE not in query.states:
            found = self._living(query, after)
        else:
            found = self._recorded(query, after)
        items = found[: query.limit]
        return Page(items=tuple(items), next_cursor=_cursor(items[-1]) if len(found) > query.limit else None)

    def _living(self, query: ListQuery, after: tuple[float, str] | None) -> list[SandboxView]:
        found = []
        for resident in self._lifecycle.residents.values():
            place = (round(resident.row.created, 6), resident.id)
            if _matches(query, resident.row.project, resident.row.spec) and (after is None or place < after):
                view = resident.view()
                if not query.states or view.state in query.states:
                    found.append(view)
        found.sort(key=lambda view: (view.created, view.id), reverse=True)
        return found[: query.limit + 1]

    def _recorded(self, query: ListQuery, after: tuple[float, str] | None) -> list[SandboxView]:
        found: list[SandboxView] = []
        while len(found) <= query.limit:
            rows = self._journal.page(after, _READ_ROWS)
            for row in rows:
                if _matches(query, row.project, row.spec):
                    resident = self._lifecycle.residents.get(row.id)
                    view = resident.view() if resident else self._lifecycle.gone_view(row)
                    if not query.states or view.state in query.states:
                        found.append(view)
                        if len(found) > query.limit:
                            break
            if len(rows) < _READ_ROWS:
                break
            after = (rows[-1].created, rows[-1].id)
        return found

    async def stop(self, query: ListQuery, event: table.Event) -> tuple[str, ...]:
        """Ends all living sandboxes of `query`, some at once; their ids."""
        wanted = [
            resident
            for resident in self._lifecycle.residents.values()
            if _matches(query, resident.row.project, resident.row.spec)
        ]
        slots = asyncio.Semaphore(_STOPS_AT_ONCE)

        async def one(resident: Resident) -> None:
            async with slots:
                await self._lifecycle.stop(resident, event)

        async with asyncio.TaskGroup() as group:
            for resident in wanted:
                group.create_task(one(resident))
        return tuple(resident.id for resident in wanted)
