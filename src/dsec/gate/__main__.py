"""`python -m dsec.gate FD`: the gate's process; FD is its end of the server's channel."""

import logging
import sys

import uvloop

from dsec.gate.process import run

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
uvloop.run(run(int(sys.argv[1])))
