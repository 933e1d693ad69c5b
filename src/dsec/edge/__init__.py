"""One node: API, lifecycle, journal, operations, backends."""
