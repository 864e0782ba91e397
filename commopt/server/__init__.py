# SPDX-License-Identifier: Apache-2.0
"""An asynchronous outer optimizer: each worker trains on its own and exchanges parameter updates with a server."""

from commopt.server.scheduler import Scheduler
from commopt.server.server import Server
from commopt.server.settings import ParameterServer
from commopt.server.worker import Worker

__all__ = ["ParameterServer", "Scheduler", "Server", "Worker"]
