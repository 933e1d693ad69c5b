"""The suite's floods, on the node of these tests."""

from dsec.testing.suite.test_floods import *  # noqa: F403
