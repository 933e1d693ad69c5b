"""The suite's training, on the node of these tests."""

from dsec.testing.suite.test_training import *  # noqa: F403
