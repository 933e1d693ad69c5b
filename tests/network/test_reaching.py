"""Into a sandbox: HTTP, a WebSocket, a tunnel and a link, through the API of a real node; nothing listens on the host for them."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from websockets.sync.client import connect

from dsec import NetworkRule
from network.place import PLAIN, PROBES, PYTHON, Place, probe
from network.test_rules_hold import until

pytestmark = pytest.mark.root

PAGES = """
import base64, hashlib, http.server
class Pages(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        key = self.headers.get("Sec-WebSocket-Key")
        if key:
            said = base64.b64encode(hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()).decode()
            head = "HTTP/1.1 101 x\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\nSec-WebSocket-Accept: " + said + "\\r\\n\\r\\n"
            self.wfile.write(head.encode() + bytes([0x81, 5]) + b"hello" + bytes([0x88, 2, 3, 232]))
            return
        told = (self.path + " " + str(self.headers.get("Authorization"))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(told)))
        self.send_header("Set-Cookie", "theirs=1")
        self.end_headers()
        self.wfile.write(told)
http.server.ThreadingHTTPServer(("127.0.0.1", 80), Pages).serve_forever()
"""


def test_every_way_in(place: Place) -> None:
    with place.box() as box:
        box.start([PYTHON, "-c", PAGES], user="agent")
        box.start([PYTHON, "-c", PROBES], stdin=json.dumps([["serves", 5432]]).encode())
        until(lambda: probe(box, ["tcp", "127.0.0.1", 5432]) == ["ok hello"])
        until(lambda: probe(box, ["tcp", "127.0.0.1", 80, "GET / HTTP/1.0\r\n\r\n"])[0].startswith("ok"))
        assert box.http(80, "GET", "/a?b=c").content == b"/a?b=c None", "a low port, as a user who is not root"
        with box.tunnel(5432) as tunnel:
            tunnel.write(b"\0bytes")
            assert tunnel.read() == b"\0bytes" and tunnel.read() == b""
        where = f"{place.node.url.replace('http', 'ws', 1)}/v1/sandboxes/{box.id}/http/80/chat"
        with connect(where, additional_headers={"Authorization": f"Bearer {place.node.api_key}"}) as talk:
            assert talk.recv(timeout=20) == "hello"
        link = box.preview(80, seconds=60)
        request = urllib.request.Request(link.url + "page?x=1", headers={"Authorization": "Bearer secret"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert answer.read() == b"/page?x=1 None"
            assert (
                answer.headers["Content-Security-Policy"].startswith("sandbox") and answer.headers["Set-Cookie"] is None
            )
        assert [each.id for each in box.previews()] == [link.id]
        box.revoke_preview(link.id)
        with pytest.raises(urllib.error.HTTPError) as gone:
            urllib.request.urlopen(link.url, timeout=20)
        assert gone.value.code == 404
        gone.value.close()


def test_ping_and_low_ports_need_no_capability(place: Place) -> None:
    rules = {"ping": NetworkRule(cidrs=(f"{PLAIN[0]}/32", f"{PLAIN[1]}/128"), protocols=("icmp",))}
    with place.box(rules) as box:
        found = probe(box, ["ping", PLAIN[0]], ["ping", PLAIN[1]], ["listens", 80], ["tcp", PLAIN[0], 7], user="agent")
        assert found[:3] == ["ok type=0", "ok type=129", "ok 80"], found
        assert not found[3].startswith("ok")


def test_a_forwarded_port_ends_without_a_word(place: Place) -> None:
    with place.box() as box:
        box.start([PYTHON, "-c", PROBES], stdin=json.dumps([["serves", 5432]]).encode())
        until(lambda: probe(box, ["tcp", "127.0.0.1", 5432]) == ["ok hello"])
        words = [sys.executable, "-m", "dsec", "port-forward", box.id, "0:5432"]
        env = {**os.environ, "DSEC_URL": place.node.url, "DSEC_API_KEY": place.node.api_key}
        with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as forward:
            assert forward.stdout is not None and forward.stderr is not None
            where, _, _ = forward.stdout.readline().partition(" ")
            host, _, port = where.partition(":")
            with socket.create_connection((host, int(port)), timeout=20) as first:
                first.sendall(b"hello")
                assert first.recv(100) == b"hello"
            with socket.create_connection((host, int(port)), timeout=20) as kept:
                forward.send_signal(signal.SIGINT)
                assert kept.recv(100) == b""
            assert forward.wait(20) == 130
            assert forward.stderr.read().strip() == ""
