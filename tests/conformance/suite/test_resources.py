"""The suite's resources, on the node of these tests."""

from dsec.testing.suite.test_resources import *  # noqa: F403
