"""A real node for the session, as tests/conformance has it: faults are real, so is what they befall."""

from conformance.conftest import box, boxes, client, node

__all__ = ["box", "boxes", "client", "node"]
