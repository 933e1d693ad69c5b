"""The network of an edge's sandboxes: rules in force, phases, groups, and the log of what was tried."""
