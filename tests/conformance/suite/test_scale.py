"""The suite's scale, on the node of these tests."""

from dsec.testing.suite.test_scale import *  # noqa: F403
