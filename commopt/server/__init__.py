# SPDX-License-Identifier: Apache-2.0
"""An asynchronous outer optimizer: workers train by themselves and exchange what they learned with a server."""

from commopt.server.scheduler import Scheduler
from commopt.server.server import Server
from commopt.server.settings import ParameterServer
from commopt.server.worker import Worker

__all__ = ["ParameterServer", "Scheduler", "Server", "Worker"]
