"""What rules mean: an evaluator that reads the caller's rules directly, prefix by prefix, agrees with the compiled policy."""

import ipaddress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.model.errors import InvalidArgument
from dsec.model.network import Allow, NameRule, NetworkAnswer, NetworkRule, Policy, Service
from dsec.rules.netpolicy import (
    Grounds,
    answer_allows,
    inherited,
    judge,
    matches,
    network_of,
    normal_form,
    rule_for,
    without,
)
from dsec.rules.netrules import compiled, environment

FORBIDDEN = (
    "127.0.0.0/8",
    "169.254.0.0/16",
    "224.0.0.0/3",
    "100.96.0.0/12",
    "::/127",
    "fe80::/10",
    "ff00::/8",
    "fd5e::/32",
)
GROUNDS = Grounds(
    gateway_v4="100.96.0.1",
    gateway_v6="fd5e::1",
    forbidden=FORBIDDEN,
    guarded=("10.0.0.0/8", "fc00::/7"),
    credentials=frozenset({"token"}),
)
SERVICES = {
    "pypi": Service(name="pypi", mirror="pypi", port=3141, hosts=("index.test",), env={"PIP_INDEX_URL": "{mirror}/simple/", "PIP_TRUSTED_HOST": "{gateway}"}),
    "debian": Service(name="debian", hosts=("deb.test",), ports=(80, 443)),
    "npm": Service(name="npm", mirror="npm", port=3142, why_not="no npm"),
}  # fmt: skip

# Few bits vary, so that prefixes and addresses meet each other and the forbidden ones.
v4 = st.builds(
    lambda a, b: f"{a}.{b}",
    st.sampled_from(["10.1.2", "127.0.0", "169.254.169", "100.96.0", "203.0.113"]),
    st.integers(0, 255),
)
v6 = st.builds(
    lambda a, b: f"{a}{b:x}",
    st.sampled_from(["2001:db8::", "fe80::", "fd5e::", "fd00::", "::ffff:203.0.113."]),
    st.integers(0, 9),
)
addresses = v4 | v6


def prefix_of(address: str, length: int) -> str:
    found = ipaddress.ip_address(address)
    return str(ipaddress.ip_network(f"{address}/{min(length, found.max_prefixlen)}", strict=False))


cidrs = st.builds(prefix_of, addresses, st.sampled_from([0, 4, 8, 12, 16, 24, 28, 31, 32, 64, 127, 128]))
ports = st.lists(st.sampled_from([22, 80, "8000-8100", "79-81", "1-65535"]), max_size=3).map(tuple)
protocols = st.lists(st.sampled_from(["tcp", "udp", "icmp", "any"]), max_size=2, unique=True).map(tuple)
rules = st.builds(
    lambda cidrs, ports, protocols: NetworkRule(cidrs=tuple(cidrs), ports=ports, protocols=protocols),
    st.lists(cidrs, min_size=1, max_size=3),
    ports,
    protocols,
)
asked = st.dictionaries(
    st.sampled_from(["a", "b", "c"]), rules | st.lists(rules, min_size=1, max_size=3).map(tuple), max_size=3
)


def allowed(given_rules: dict[str, Any], address: str, port: int, protocol: str) -> bool:
    """The meaning, straight from the guide."""
    target = ipaddress.ip_address(address)
    if isinstance(target, ipaddress.IPv6Address) and target.ipv4_mapped:
        target = target.ipv4_mapped
    if any(target in network_of(text) for text in FORBIDDEN):
        return False
    for value in given_rules.values():
        for rule in value if isinstance(value, tuple) else (value,):
            fits = any(target in ipaddress.ip_network(cidr) for cidr in rule.cidrs)
            spoken = rule.protocols or ("tcp",)
            if not fits or not ({protocol, "any"} & set(spoken)):
                continue
            if protocol == "icmp" or not rule.ports:
                return True
            for each in rule.ports:
                low, _, high = str(each).partition("-")
                if int(low) <= port <= int(high or low):
                    return True
    return False


@given(
    asked,
    st.lists(
        st.tuples(addresses, st.sampled_from([22, 53, 80, 8050, 9000]), st.sampled_from(["tcp", "udp", "icmp"])),
        max_size=20,
    ),
)
@settings(max_examples=150, deadline=None)
def test_a_policy_means_what_its_rules_say(given_rules: dict[str, Any], probes: list[tuple[str, int, Any]]) -> None:
    try:
        policy = compiled(given_rules, SERVICES, GROUNDS)
    except InvalidArgument as error:
        assert error.detail.endswith("is never reached from a sandbox") or error.detail.startswith("more than ")
        return
    by_prefix = inherited(policy.allows)
    for address, port, protocol in probes:
        verdict = judge(policy, address, port, protocol)
        assert (verdict == "direct") is allowed(given_rules, address, port, protocol), (address, port, protocol)
        # The kernel looks at the longest prefix alone.
        target = ipaddress.ip_address(address)
        target = getattr(target, "ipv4_mapped", None) or target
        holding = [text for text in by_prefix if target in network_of(text)]
        longest = max(holding, key=lambda text: network_of(text).prefixlen, default=None)
        there = by_prefix[longest] if longest else ()
        assert judge(Policy(allows=there), address, port, protocol) == verdict


@given(asked, st.randoms())
@settings(max_examples=80, deadline=None)
def test_order_and_repetition_change_nothing(given_rules: dict[str, Any], chance: Any) -> None:
    mixed: dict[str, Any] = {}
    for name in chance.sample(sorted(given_rules), len(given_rules)):
        value = given_rules[name]
        several = list(value) if isinstance(value, tuple) else [value]
        chance.shuffle(several)
        mixed[name] = tuple(several + several[:1])
    try:
        first = compiled(given_rules, SERVICES, GROUNDS)
    except InvalidArgument:
        return
    assert compiled(mixed, SERVICES, GROUNDS) == first == normal_form(first)


@given(cidrs, st.lists(cidrs, max_size=4), st.lists(addresses, max_size=20))
@settings(max_examples=150, deadline=None)
def test_a_prefix_without_others_is_exactly_the_rest(cidr: str, holes: list[str], probes: list[str]) -> None:
    parts = without(network_of(cidr), [network_of(hole) for hole in holes])
    for probe in probes:
        address = ipaddress.ip_address(probe)
        wanted = address in network_of(cidr) and not any(address in network_of(hole) for hole in holes)
        assert sum(address in part for part in parts) == wanted, "in exactly one part, or none"


labels = st.text("ab-0_", min_size=1, max_size=4).filter(lambda text: text[0] not in "-" and text[-1] not in "-")
names = st.lists(labels, min_size=1, max_size=4).map(".".join)


@given(names, names)
def test_a_wildcard_is_all_below_and_nothing_else(name: str, other: str) -> None:
    assert matches(f"*.{name}", f"{other}.{name}")
    assert not matches(f"*.{name}", name)
    assert not matches(f"*.{name}", f"{other}{name}") or f"{other}{name}".endswith("." + name)
    assert matches(name, other) is (name == other)


@pytest.mark.parametrize(
    ("host", "asked_name", "found"),
    [
        ("a.test", "A.TEST.", True), ("A.Test.", "a.test", True), ("a.test", "evil-a.test", False), ("a.test", "x.a.test", False),
        ("*.a.test", "x.y.a.test", True), ("*.a.test", "a.test", False), ("*.a.test", "xa.test", False), ("a.test", "a.test.evil.test", False),
        ("a.test", "a.test..", False), ("*.a.test", ".a.test", False),
    ],
)  # fmt: skip
def test_names_are_compared_whole(host: str, asked_name: str, found: bool) -> None:
    policy = compiled({"mine": NetworkRule(hosts=(host,), ports=(443,))}, SERVICES, GROUNDS)
    assert (rule_for(policy, asked_name) is not None) is found
    assert rule_for(policy, asked_name, port=80) is None


def test_services_open_their_mirror_or_their_names() -> None:
    policy = compiled({"pypi": NetworkRule(before="2024-05-01"), "debian": True, "npm": False}, SERVICES, GROUNDS)
    assert policy.mirrors["pypi"].before == 1714521600.0
    assert [rule.pattern for rule in policy.names] == ["deb.test"] and policy.names[0].strict
    assert judge(policy, "100.96.0.1", 3141, "tcp") == judge(policy, "fd5e::1", 53, "udp") == "direct"
    assert judge(policy, "100.96.0.1", 3142, "tcp") is judge(policy, "100.96.0.2", 3141, "tcp") is None
    assert environment({"pypi", "mine"}, SERVICES, GROUNDS) == {
        "PIP_INDEX_URL": "http://100.96.0.1:3141/simple/",
        "PIP_TRUSTED_HOST": "100.96.0.1",
    }
    assert compiled({}, SERVICES, GROUNDS) == Policy()


WRONG: list[tuple[Any, str]] = [
    ({"nope": True}, "network_rules.nope"),
    ({"nope": False}, "network_rules.nope"),
    ({"npm": True}, "network_rules.npm"),
    ({"debian": NetworkRule(before="2024-05-01")}, "network_rules.debian"),
    ({"pypi": NetworkRule(modules=("a/b",))}, "network_rules.pypi.modules"),
    ({"pypi": NetworkRule(before="2024-02-30")}, "network_rules.pypi.before"),
    ({"pypi": NetworkRule(hosts=("a.test",))}, "network_rules.pypi"),
    ({"pypi": NetworkRule(ports=(22,))}, "network_rules.pypi"),
    ({"pypi": NetworkRule(credential="other")}, "network_rules.pypi.credential"),
    ({"x": NetworkRule(hosts=("*",))}, "network_rules.x.hosts"),
    ({"x": NetworkRule(hosts=("a b.test",))}, "network_rules.x.hosts"),
    ({"x": NetworkRule(hosts=("10.0.0.1",))}, "network_rules.x.hosts"),
    ({"x": NetworkRule(hosts=("a.test",), protocols=("udp",))}, "network_rules.x.protocols"),
    ({"x": NetworkRule(cidrs=("10.0.0.1/8",))}, "network_rules.x.cidrs"),
    ({"x": NetworkRule(cidrs=("169.254.169.254/32",))}, "network_rules.x.cidrs"),
    ({"x": NetworkRule(cidrs=("100.96.0.1/32",))}, "network_rules.x.cidrs"),
    ({"x": NetworkRule(cidrs=("10.0.0.0/8",), ports=("9-1",))}, "network_rules.x.ports"),
    ({"x": NetworkRule(cidrs=("10.0.0.0/8",), ports=(0,))}, "network_rules.x.ports"),
    ({"x": NetworkRule(cidrs=("10.0.0.0/8",), ports=(1, 3, 5, 7, 9, 11, 13, 15, 17))}, "network_rules"),
    ({"x": NetworkRule(cidrs=("10.0.0.0/8",), strict=False)}, "network_rules.x.strict"),
    ({"x": (NetworkRule(cidrs=("10.0.0.0/8",)), NetworkRule())}, "network_rules.x[1]"),
    ({"x": ()}, "network_rules.x"),
    ({"X Y": True}, "network_rules.X Y"),
]


@pytest.mark.parametrize(("wrong", "field"), WRONG)
def test_what_cannot_be_enforced_is_refused_by_name(wrong: Any, field: str) -> None:
    with pytest.raises(Exception) as error:
        compiled(wrong, SERVICES, GROUNDS)
    fields = getattr(error.value, "fields", {})
    assert (fields.get("field") or fields.get("feature")) == field


def test_answers_never_open_what_is_forbidden() -> None:
    rule = NameRule(pattern="a.test", ports=((443, 443),))
    found = (
        "203.0.113.9",
        "127.0.0.1",
        "10.0.0.7",
        "::ffff:169.254.169.254",
        "2001:db8::1",
        "fe80::1",
        "fd00::1",
        "::ffff:203.0.113.8",
    )
    answer = NetworkAnswer(name="a.test", rule=rule, addresses=found, seconds=5)
    opened = answer_allows(answer, rule, GROUNDS, ())
    assert [allow.network for allow in opened] == ["203.0.113.9/32", "2001:db8::1/128", "203.0.113.8/32"]
    assert {(allow.via, allow.low, allow.high) for allow in opened} == {("relay", 443, 443)}
    inside = answer_allows(answer, rule, GROUNDS, (Allow(network="10.0.0.0/8"),))
    assert "10.0.0.7/32" in [allow.network for allow in inside], "a private address that a rule names is no rebinding"
    assert "127.0.0.1/32" not in [allow.network for allow in inside]
    policy = compiled({"x": NetworkRule(hosts=("a.test",))}, SERVICES, GROUNDS)
    assert judge(policy, "203.0.113.9", 443, "tcp") is None
    assert judge(policy, "203.0.113.9", 443, "tcp", {"a.test": opened}) == "relay"
    assert judge(policy, "203.0.113.9", 443, "udp", {"a.test": opened}) is None
