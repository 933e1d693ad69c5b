"""The gate gives root up before it reads the first byte of a sandbox's.

What would be imported later is imported here: the interpreter may lie where the user cannot read.
"""

import concurrent.futures.thread
import encodings.idna
import encodings.latin_1
import os
import pwd
import resource
from pathlib import Path

import dns.rdtypes.ANY.CNAME
import dns.rdtypes.ANY.NS
import dns.rdtypes.ANY.OPT
import dns.rdtypes.ANY.SOA
import dns.rdtypes.IN.A
import dns.rdtypes.IN.AAAA
import dns.rdtypes.IN.HTTPS
import dns.rdtypes.IN.SVCB

__all__ = ["become", "enter"]

# Named so that no one takes the imports for useless.
NEEDED = (
    concurrent.futures.thread, encodings.idna, encodings.latin_1, dns.rdtypes.ANY.CNAME, dns.rdtypes.ANY.NS, dns.rdtypes.ANY.OPT, dns.rdtypes.ANY.SOA,
    dns.rdtypes.IN.A, dns.rdtypes.IN.AAAA, dns.rdtypes.IN.HTTPS, dns.rdtypes.IN.SVCB,
)  # fmt: skip


def enter(folder: Path, user: str) -> None:
    """Makes `folder` the user's and the working directory: what leads to it may stay closed to him."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.chdir(folder)
    if os.geteuid() == 0:
        entry = pwd.getpwnam(user)
        for path in (Path(), *Path().iterdir()):
            os.chown(path, entry.pw_uid, entry.pw_gid, follow_symlinks=False)


def become(user: str) -> None:
    """Takes as many descriptors as the host gives, then gives root and all groups up for good; without root nothing is to be given up. Raises KeyError for an unknown user."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two for each connection
    if os.geteuid() != 0:
        return
    entry = pwd.getpwnam(user)
    os.setgroups([])
    os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
    os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)
