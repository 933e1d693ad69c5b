"""Sums hold down the tree of projects, whatever is asked in whatever order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsec.model.errors import InvalidArgument, QuotaExceeded
from dsec.model.spec import SandboxSpec
from dsec.model.tenancy import Amount, Quota
from dsec.rules.access import parent_of, sees
from dsec.rules.quota import DIMENSIONS, Account, amount_of, close, delegate, release, reserve

number = st.integers(-1, 12)
quota = st.builds(Quota, **{name: st.none() | number for name in DIMENSIONS})
amount = st.builds(
    Amount, sandboxes=st.just(1), memory_mb=st.integers(0, 6), cpu_milli=st.integers(0, 6), disk_mb=st.integers(0, 6)
)
root_quota = Quota(sandboxes=20, memory_mb=20, cpu_milli=None, disk_mb=20)


class Tree(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.accounts: dict[str, Account] = {"root": Account(quota=root_quota)}
        self.held: list[tuple[str, Amount]] = []

    @rule(data=st.data(), name=st.sampled_from(["a", "b"]), quota=quota)
    def delegates(self, data: st.DataObject, name: str, quota: Quota) -> None:
        parent = data.draw(st.sampled_from(sorted(self.accounts)))
        path = f"{parent}/{name}"
        try:
            below = [a.quota for p, a in self.accounts.items() if parent_of(p) == path]
            giver, taker = delegate(self.accounts[parent], self.accounts.get(path), quota, path, below)
        except (QuotaExceeded, InvalidArgument):
            return
        self.accounts[parent], self.accounts[path] = giver, taker

    @rule(data=st.data(), need=amount)
    def reserves(self, data: st.DataObject, need: Amount) -> None:
        path = data.draw(st.sampled_from(sorted(self.accounts)))
        try:
            self.accounts[path] = reserve(self.accounts[path], need, path)
        except QuotaExceeded as error:
            assert error.project == path and error.dimension in DIMENSIONS
            return
        self.held.append((path, need))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def releases(self, data: st.DataObject) -> None:
        path, need = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.accounts[path] = release(self.accounts[path], need)

    @rule(data=st.data())
    def closes(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.accounts)))
        parent = parent_of(path)
        if parent is None or any(parent_of(other) == path for other in self.accounts):
            return
        try:
            self.accounts[parent] = close(self.accounts[parent], self.accounts[path])
        except QuotaExceeded:
            assert any(holder == path for holder, _ in self.held)
            return
        del self.accounts[path]

    @invariant()
    def sums_hold(self) -> None:
        for path, account in self.accounts.items():
            for name in DIMENSIONS:
                used = sum(getattr(need, name) for holder, need in self.held if holder == path)
                below = sum(getattr(need, name) for holder, need in self.held if sees(path, holder))
                children = [a.quota for p, a in self.accounts.items() if parent_of(p) == path]
                given = sum(getattr(child, name) or 0 for child in children)
                assert getattr(account.used, name) == used
                assert getattr(account.delegated, name) == given
                most = getattr(account.quota, name)
                if most is not None:
                    assert below <= most
                    assert used + given <= most
                    assert all(getattr(child, name) is not None for child in children)


Tree.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTree = Tree.TestCase


def test_what_a_sandbox_counts() -> None:
    spec = SandboxSpec(container_image="x", memory_limit_mb=100, cpu_cores_limit=0.0301, disk_limit_mb=7)
    assert amount_of(spec) == Amount(sandboxes=1, memory_mb=100, cpu_milli=31, disk_mb=7)


def test_the_dimension_is_named() -> None:
    account = Account(quota=Quota(memory_mb=10))
    with pytest.raises(QuotaExceeded) as caught:
        reserve(account, Amount(sandboxes=1, memory_mb=11), "root/a")
    assert caught.value.dimension == "memory_mb"
    assert caught.value.quota == 10
