"""One linked sandbox, as the edge holds it in memory."""

import asyncio
from collections.abc import Sequence

from dsec.edge.network.netlog import NetLog
from dsec.model.network import Address, Allow, Link, NameRule, NetworkAnswer, Policy

__all__ = ["Member"]

_ANSWERS_MAX = 4096


class Member:
    """`link`: what is in force. `lock` is held by whoever writes the kernel's maps of its slot, `turn` by whoever switches rules.
    `closed`: it is ending, nothing may be opened any more. `refused`: why everything is refused, "" where it is not. `since`: Unix seconds
    before which the slot was another's; 0: not known any more, since it has been taken over."""

    def __init__(self, slot: int, address: Address, link: Link, log_flows: int) -> None:
        self.slot = slot
        self.address = address
        self.link = link
        self.lock = asyncio.Lock()
        self.turn = asyncio.Lock()
        self.closed = False
        self.refused = ""
        self.since = 0.0
        self.log = NetLog(log_flows)
        self._answers: dict[tuple[NameRule, Allow], float] = {}

    def remember(self, answer: NetworkAnswer, allows: Sequence[Allow], now: float) -> None:
        """Notes what an answer opened and until when, monotonic seconds; the oldest go first."""
        for allow in allows:
            self._answers.pop((answer.rule, allow), None)
            self._answers[answer.rule, allow] = now + answer.seconds
            self.log.named(allow.network.partition("/")[0], answer.name)
        while len(self._answers) > _ANSWERS_MAX:
            del self._answers[next(iter(self._answers))]

    def kept(self, policy: Policy, now: float) -> list[tuple[Allow, float]]:
        """Answers in use whose rule `policy` has too, with the seconds left; the others are forgotten."""
        rules = set(policy.names)
        self._answers = {key: until for key, until in self._answers.items() if until > now and key[0] in rules}
        return [(allow, until - now) for (_, allow), until in self._answers.items()]
