"""pytest plugin, loaded wherever dsec is installed beside pytest: the options and marks of `dsec.testing.suite`, no more."""

import pytest

__all__ = ["pytest_addoption", "pytest_configure"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that say which platform is tested."""
    group = parser.getgroup("dsec", "conformance of a DSec platform (--pyargs dsec.testing.suite)")
    group.addoption("--dsec-url", metavar="URL", help="the platform's address")
    group.addoption("--dsec-key", metavar="KEY", help="an API key of it that may create and use sandboxes")
    group.addoption(
        "--dsec-backend",
        metavar="NAME",
        action="append",
        help="a backend to test, again for more (default: container)",
    )
    group.addoption(
        "--dsec-site",
        metavar="MODULE:NAME",
        help="a callable that answers a context manager of a dsec.testing.suite.sites.Site: the operator's powers",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Names the suite's marks."""
    config.addinivalue_line("markers", "slow: large or long; leave out with -m 'not slow'")
    config.addinivalue_line("markers", "leaves(what): the platform keeps something until it ends (dsec.testing.leaks)")
    config.addinivalue_line("markers", "costly: over plain HTTP it counts as slow, since the SDK's run shows the same")
