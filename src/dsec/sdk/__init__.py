"""libdsec: the client. `dsec` exports its public names."""
