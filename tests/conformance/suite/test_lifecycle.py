"""The suite's lifecycle, on the node of these tests."""

from dsec.testing.suite.test_lifecycle import *  # noqa: F403
