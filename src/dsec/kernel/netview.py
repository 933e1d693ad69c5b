"""The rules of one view in the kernel's trie, in which the longest prefix answers alone: so longer ones repeat what shorter ones allow."""

import time
from collections.abc import Iterable, Mapping, Sequence

from dsec._native import PinnedMap
from dsec.kernel.errors import from_kernel
from dsec.kernel.netmaps import Rule, allows_key, pack_rules, unpack_rules
from dsec.model.network import Allow
from dsec.rules.netpolicy import Prefixes, network_of

__all__ = ["View"]


class View:
    """`number`: the view's, in the keys of `trie`. `found`: its rules where the kernel has some already."""

    def __init__(self, trie: PinnedMap, number: int, found: Mapping[str, Sequence[Rule]]) -> None:
        self.number = number
        self._trie = trie
        self._rules: dict[str, list[Rule]] = {prefix: list(rules) for prefix, rules in found.items()}
        self._wide = Prefixes(prefix for prefix in self._rules if not _is_host(prefix))

    def fill(self, given: Iterable[tuple[Allow, int]]) -> None:
        """Adds allowances with the times at which they end (boot time in nanoseconds, 0: never). Raises KernelError; ValueError for
        too many of one prefix, after which the view is as it was for that prefix."""
        added = [(allow.network, Rule.of(allow, expires, allow.network)) for allow, expires in given]
        by_prefix: dict[str, list[int]] = {}
        for number, (prefix, _) in enumerate(added):
            by_prefix.setdefault(prefix, []).append(number)
        new = Prefixes(by_prefix)
        changed = {
            prefix: [
                rule._replace(inherited=True)
                for over in self._wide.over(prefix)
                for rule in self._rules[over]
                if not rule.inherited
            ]
            for prefix in by_prefix
            if prefix not in self._rules
        }
        reached = by_prefix if all(map(_is_host, by_prefix)) else dict.fromkeys([*self._rules, *by_prefix])
        for prefix in reached:
            for number in sorted(n for over in new.over(prefix) for n in by_prefix[over]):
                given_to, rule = added[number]
                old = changed.get(prefix, self._rules.get(prefix, []))
                changed[prefix] = _joined(old, rule._replace(inherited=prefix != given_to))
        for prefix, rules in changed.items():
            from_kernel(self._trie.put)(allows_key(self.number, prefix), pack_rules(rules))
            self._rules[prefix] = rules
            if not _is_host(prefix):
                self._wide.add(prefix)

    def expire(self) -> None:
        """Takes out what has ended."""
        now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        for prefix, rules in list(self._rules.items()):
            left = [rule for rule in rules if not rule.expires or rule.expires > now]
            if len(left) == len(rules):
                continue
            if any(not rule.inherited for rule in left):
                from_kernel(self._trie.put)(allows_key(self.number, prefix), pack_rules(left))
                self._rules[prefix] = left
            else:
                # Shorter prefixes say the same.
                from_kernel(self._trie.remove)(allows_key(self.number, prefix))
                del self._rules[prefix]
                self._wide.discard(prefix)

    def read(self) -> tuple[Allow, ...]:
        """What the kernel allows now, as it was given."""
        now, found = time.clock_gettime_ns(time.CLOCK_BOOTTIME), []
        for prefix in list(self._rules):
            data = from_kernel(self._trie.get)(allows_key(self.number, prefix))
            live = [rule for rule in unpack_rules(data or b"") if not rule.expires or rule.expires > now]
            found += [rule.allow(prefix) for rule in live if not rule.inherited]
        return tuple(found)

    def remove(self) -> None:
        """Takes all of the view out of the kernel."""
        for prefix in list(self._rules):
            from_kernel(self._trie.remove)(allows_key(self.number, prefix))
        self._rules.clear()
        self._wide = Prefixes()


def _is_host(prefix: str) -> bool:
    network = network_of(prefix)
    return network.prefixlen == network.max_prefixlen


def _joined(rules: Sequence[Rule], new: Rule) -> list[Rule]:
    """With `new`, which takes the place of the same rule that ends earlier; one of its own stands beside an inherited one."""
    kept = []
    for rule in rules:
        if rule[:4] == new[:4] and rule.inherited == new.inherited:
            longest = 0 if 0 in (rule.expires, new.expires) else max(rule.expires, new.expires)
            new = new._replace(expires=longest)
        else:
            kept.append(rule)
    return [*kept, new]
