"""Quota of nested projects: what is given to a subproject is taken out of its parent, so sums hold down the tree.

For every project and every dimension: used + delegated <= quota. So all sandboxes of a project and of those below it
stay within its quota, and only the project's own record has to be looked at when one is created.
"""

import math
from collections.abc import Iterable

from msgspec import Struct

from dsec.model.errors import InvalidArgument, QuotaExceeded
from dsec.model.spec import SandboxSpec
from dsec.model.tenancy import Amount, Quota

__all__ = ["DIMENSIONS", "Account", "amount_of", "close", "delegate", "release", "reserve"]

DIMENSIONS = ("sandboxes", "memory_mb", "cpu_milli", "disk_mb")

_NOTHING = Amount()


class Account(Struct, frozen=True, kw_only=True):
    """The state of one project. `used`: by its own sandboxes. `delegated`: the quotas of its children, summed.

    A child without a bound in some dimension exists only below parents without one, and counts zero there.
    """

    quota: Quota
    used: Amount = _NOTHING
    delegated: Amount = _NOTHING


def amount_of(spec: SandboxSpec) -> Amount:
    """What a sandbox counts against its project's quota."""
    return Amount(
        sandboxes=1,
        memory_mb=spec.memory_limit_mb,
        cpu_milli=math.ceil(spec.cpu_cores_limit * 1000),
        disk_mb=spec.disk_limit_mb,
    )


def _add(left: Amount, right: Amount, sign: int = 1) -> Amount:
    return Amount(
        sandboxes=left.sandboxes + sign * right.sandboxes,
        memory_mb=left.memory_mb + sign * right.memory_mb,
        cpu_milli=left.cpu_milli + sign * right.cpu_milli,
        disk_mb=left.disk_mb + sign * right.disk_mb,
    )


def _bounded(quota: Quota) -> Amount:
    return Amount(
        sandboxes=quota.sandboxes or 0,
        memory_mb=quota.memory_mb or 0,
        cpu_milli=quota.cpu_milli or 0,
        disk_mb=quota.disk_mb or 0,
    )


def _check(account: Account, project: str) -> Account:
    for name in DIMENSIONS:
        most = getattr(account.quota, name)
        held = getattr(account.used, name) + getattr(account.delegated, name)
        if most is not None and held > most:
            raise QuotaExceeded(
                f"project {project} has {most} {name}, and this would need {held}",
                project=project, dimension=name, quota=most, needed=held,
            )  # fmt: skip
    return account


def reserve(account: Account, need: Amount, project: str) -> Account:
    """The account with `need` held. Raises QuotaExceeded, naming the dimension, where it has no room for that."""
    quota = account.quota
    after = Account(quota=quota, used=_add(account.used, need), delegated=account.delegated)
    if quota.sandboxes is None and quota.memory_mb is None and quota.cpu_milli is None and quota.disk_mb is None:
        return after
    return _check(after, project)


def release(account: Account, held: Amount) -> Account:
    """The account with `held` given back; exactly what was reserved, once."""
    return Account(quota=account.quota, used=_add(account.used, held, -1), delegated=account.delegated)


def delegate(
    parent: Account, child: Account | None, quota: Quota, project: str, below: Iterable[Quota] = ()
) -> tuple[Account, Account]:
    """Parent and child after the child's quota became `quota` (`child` None: it is new; `below`: its children's quotas).

    Raises QuotaExceeded where the parent has not that much left, or where the child already holds more than `quota`;
    InvalidArgument for a negative number, or for no bound below a bound.
    """
    for name in DIMENSIONS:
        value = getattr(quota, name)
        if value is None and getattr(parent.quota, name) is not None:
            raise InvalidArgument(
                f"the parent's {name} are bounded, so the subproject's must be", field=f"quota.{name}"
            )
        if value is not None and value < 0:
            raise InvalidArgument(f"{name} must not be negative", field=f"quota.{name}")
    before = _bounded(child.quota) if child else _NOTHING
    delegated = _add(_add(parent.delegated, before, -1), _bounded(quota))
    giver = Account(quota=parent.quota, used=parent.used, delegated=delegated)
    taker = Account(quota=quota, used=child.used, delegated=child.delegated) if child else Account(quota=quota)
    _check_bounds_below(quota, below)
    return _check(giver, project.rpartition("/")[0] or project), _check(taker, project)


def _check_bounds_below(quota: Quota, below: Iterable[Quota]) -> None:
    children = tuple(below)
    for name in DIMENSIONS:
        if getattr(quota, name) is not None and any(getattr(child, name) is None for child in children):
            raise InvalidArgument(f"a subproject's {name} are not bounded: bound them first", field=f"quota.{name}")


def close(parent: Account, child: Account) -> Account:
    """The parent after an unused child was removed. Raises QuotaExceeded while the child holds something."""
    if child.used != _NOTHING or child.delegated != _NOTHING:
        raise QuotaExceeded("the project still holds sandboxes or subprojects")
    return Account(
        quota=parent.quota, used=parent.used, delegated=_add(parent.delegated, _bounded(child.quota), -1)
    )  # fmt: skip
