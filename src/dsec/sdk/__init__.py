"""libdsec: the client."""
