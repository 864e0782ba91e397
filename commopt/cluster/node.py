# SPDX-License-Identifier: Apache-2.0
"""torchrun, but with the exit status of the rank that failed first; torchrun itself always exits with 1."""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def run() -> int:
    try:
        main()
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval.value
    return 0


if __name__ == "__main__":
    sys.exit(run())
