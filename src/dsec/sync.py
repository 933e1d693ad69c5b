"""The same client, blocking: `dsec.sync.DSecClient`. Everything else is as in `dsec`."""

from dsec.sdk._sync.client import DSecClient
from dsec.sdk._sync.files import Files
from dsec.sdk._sync.process import Process
from dsec.sdk._sync.sandbox import Sandbox
from dsec.sdk._sync.session import Session
from dsec.sdk._sync.tunnel import Tunnel

__all__ = ["DSecClient", "Files", "Process", "Sandbox", "Session", "Tunnel"]
