"""Settings of the network of a node's sandboxes."""

from dataclasses import dataclass

from dsec.model.errors import InvalidArgument
from dsec.model.settings import check_positive, setting
from dsec.rules.netpolicy import network_of

__all__ = ["NetworkSettings"]


def _no_prefixes() -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class NetworkSettings:
    """Settings of the network of sandboxes."""

    enabled: bool = setting(
        True, "false: sandboxes have their loopback alone, and rules that allow anything are refused"
    )
    services: str | None = setting(
        None, "TOML file of named services, laid over those that DSec knows; see docs/network.md"
    )
    credentials: str | None = setting(
        None, "TOML file, mode 0600, of what the relay adds for rules that name a credential; see docs/network.md"
    )
    forbidden: tuple[str, ...] = setting(
        _no_prefixes, "further prefixes that no rule may open, such as the networks of the node's own services"
    )
    log_flows: int = setting(1000, "flows kept of each sandbox for `dsec net log`, the newest")
    sweep_interval: float = setting(5.0, "seconds between two looks for flows that have ended")

    def __post_init__(self) -> None:
        check_positive(self, "log_flows", "sweep_interval")
        for text in self.forbidden:
            try:
                network_of(text)
            except ValueError as error:
                raise InvalidArgument(f"forbidden: {error}", field="network.forbidden") from error
