"""The suite's security, on the node of these tests."""

from dsec.testing.suite.test_security import *  # noqa: F403
