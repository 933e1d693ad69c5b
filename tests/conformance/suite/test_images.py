"""The suite's images, on the node of these tests."""

from dsec.testing.suite.test_images import *  # noqa: F403
