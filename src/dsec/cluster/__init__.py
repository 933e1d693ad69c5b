"""The services between clients and edges."""
