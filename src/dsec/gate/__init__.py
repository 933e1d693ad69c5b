"""A process of its own between sandboxes and the world: resolver, relay, mirrors. Reads what sandboxes send; knows no other part of the node."""
