"""Gives the suite's modules its fixtures, wherever the package is installed."""

from dsec.testing.suite.fixtures import *  # noqa: F403
