"""The suite's commands, on the node of these tests."""

from dsec.testing.suite.test_commands import *  # noqa: F403
