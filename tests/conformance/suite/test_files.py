"""The suite's files, on the node of these tests."""

from dsec.testing.suite.test_files import *  # noqa: F403
