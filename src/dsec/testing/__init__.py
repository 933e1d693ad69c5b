"""Public: fakes, virtual clock, suites."""
