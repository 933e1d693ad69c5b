"""Why the gate refuses: one word for the log of flows, one sentence for people."""

__all__ = ["Refused"]


class Refused(Exception):
    """What a sandbox sent is not let through. `reason`: a word of docs/network.md; `name`: the host it asked for, if known."""

    def __init__(self, reason: str, detail: str = "", *, name: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason
        self.detail = detail or reason
        self.name = name
