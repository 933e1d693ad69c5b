"""HTTP for the services: routes as data, one dispatcher, problem documents, OpenAPI from the same data."""

from dsec.web.answers import Bytes, Stream, lines
from dsec.web.call import Call, ClientGone
from dsec.web.dispatch import App, Guard, Handler, SocketHandler, bind, refuse
from dsec.web.openapi import document
from dsec.web.problems import failure, problem_of
from dsec.web.routes import NDJSON, OCTETS, PROBLEM_JSON, TAR, Route
from dsec.web.sockets import Socket, SocketGone

__all__ = [
    "NDJSON",
    "OCTETS",
    "PROBLEM_JSON",
    "TAR",
    "App",
    "Bytes",
    "Call",
    "ClientGone",
    "Guard",
    "Handler",
    "Route",
    "Socket",
    "SocketGone",
    "SocketHandler",
    "Stream",
    "bind",
    "document",
    "failure",
    "lines",
    "problem_of",
    "refuse",
]
