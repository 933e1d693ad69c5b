"""Run by a Python inside a sandbox: reads probes as JSON from stdin, tries all at once, writes what came of each, and how long it took.

Stands alone: nothing of DSec is in a sandbox. An outcome is "ok TEXT", or the name of the error.
"""

import json
import os
import socket
import ssl
import struct
import sys
import threading
import time

SECONDS = 8.0


def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def opened(address, port, kind=socket.SOCK_STREAM):
    link = socket.socket(family(address), kind)
    link.settimeout(SECONDS)
    link.connect((address, port))
    return link


def tcp(address, port, say="hello"):
    with opened(address, port) as link:
        link.sendall(say.encode("latin-1"))
        return link.recv(65536).decode("latin-1")


def udp(address, port, say="hello"):
    with opened(address, port, socket.SOCK_DGRAM) as link:
        link.send(say.encode("latin-1"))
        return link.recv(65536).decode("latin-1")


def head(host, path):
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()


def answer(link):
    """The status line and body; of a length that is said, since the server keeps the connection."""
    with link.makefile("rb") as file:
        first, length = file.readline(), 0
        if not first:
            raise ConnectionResetError(104, "no answer")
        while (line := file.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return first.decode("latin-1").strip() + " " + file.read(length).decode("latin-1").strip()


def http(address, port, host, path="/"):
    with opened(address, port) as link:
        link.sendall(head(host, path))
        return answer(link)


def tls(address, port, sni, host=None, ca=None):
    context = ssl.create_default_context(cadata=ca) if ca else ssl._create_unverified_context()
    context.check_hostname = bool(ca and sni)
    with opened(address, port) as plain, context.wrap_socket(plain, server_hostname=sni) as link:
        link.sendall(head(host or sni or address, "/"))
        return answer(link)


def resolve(name):
    return " ".join(sorted({found[4][0] for found in socket.getaddrinfo(name, None)}))


def asked(name, kind):
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split(".") if part)
    return struct.pack("!HHHHHH", 7, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)


def dns(server, name, kind=1, over="udp", port=53):
    query = asked(name, kind)
    if over == "udp":
        with opened(server, port, socket.SOCK_DGRAM) as link:
            link.send(query)
            reply = link.recv(65536)
    else:
        with opened(server, port) as link:
            link.sendall(struct.pack("!H", len(query)) + query)
            reply = link.recv(65536)[2:]
    return f"rcode={reply[3] & 15} answers={struct.unpack('!H', reply[6:8])[0]}"


def ping(address):
    v6 = ":" in address
    protocol = socket.IPPROTO_ICMPV6 if v6 else socket.IPPROTO_ICMP
    with socket.socket(family(address), socket.SOCK_DGRAM, protocol) as link:
        link.settimeout(SECONDS)
        link.connect((address, 0))
        link.send(struct.pack("!BBHHH", 128 if v6 else 8, 0, 0, 0, 1) + b"x" * 8)
        return f"type={link.recv(1024)[0]}"


def raw(address, protocol, say="x"):
    with socket.socket(family(address), socket.SOCK_RAW, protocol) as link:
        link.settimeout(SECONDS)
        link.sendto(say.encode("latin-1"), (address, 0))
        return "sent"


def listens(port):
    with socket.create_server(("0.0.0.0", port)) as server:
        return str(server.getsockname()[1])


def serves(port):
    """Sends back what comes, to one after another, v4 and v6, for ever."""
    with socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        while True:
            link, _ = server.accept()
            with link:
                link.sendall(link.recv(65536))


def held(address, port, mark):
    """A connection that goes on until it breaks, saying into the file `mark` how it goes."""
    with opened(address, port) as link:
        while True:
            link.sendall(b"tick")
            got = link.recv(100)
            with open(mark, "w") as file:
                file.write("alive" if got else "closed")
            if not got:
                raise ConnectionResetError(104, "closed")
            time.sleep(0.1)


KNOWN = {f.__name__: f for f in (tcp, udp, http, tls, resolve, dns, ping, raw, listens, serves, held)}


def tried(probe):
    began = time.monotonic()
    name, arguments = probe[0], probe[1:]
    try:
        told = "ok " + str(KNOWN[name](*arguments))
    except TimeoutError:
        told = "timeout"
    except socket.gaierror as error:
        told = f"gaierror {error.errno}"
    except ssl.SSLError as error:
        told = f"tls {error.reason}"
    except OSError as error:
        told = os.strerror(error.errno) if error.errno else type(error).__name__
    return told, time.monotonic() - began


def main():
    probes = json.load(sys.stdin)
    found = [None] * len(probes)

    def work(index):
        found[index] = tried(probes[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(probes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
