# SPDX-License-Identifier: Apache-2.0
"""The faults: what each does to one rank, its node or its link, and what may come of it."""

from __future__ import annotations

from dataclasses import dataclass

from commopt.errors import ConfigurationError, did_you_mean

STOP_S = 4.0
FLAP_S = 0.6
SLOW_RATE = "5mbit"
CLOCK_JUMP_S = 3600.0


@dataclass(frozen=True)
class Fault:
    """A fault. It strikes in the middle of a backward.

    about: in words.
    moments: how often it strikes, every fifth step.
    fatal: whether training cannot go on, so that all ranks that are left have to name it.
    lasts_s: for how long messages do not get through; a shorter timeout may end the run.
    of_link: whether it strikes the link of a node.
    cause: what the error of the rank it strikes has to say, as a regular expression; "" where that rank says nothing.
    of_server: whether it strikes a parameter server, too.
    """

    name: str
    about: str
    moments: int = 1
    fatal: bool = False
    lasts_s: float = 0.0
    cause: str = ""
    of_link: bool = False
    of_server: bool = True


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", "the process of one rank is killed", fatal=True),
        Fault("stop", f"one rank is stopped for {STOP_S:g} s, and goes on", lasts_s=STOP_S),
        Fault("partition", "one node is cut off from all others, for good", fatal=True, of_link=True),
        Fault("slow", f"the link of one node falls to {SLOW_RATE}", of_link=True),
        Fault(
            "flap",
            f"the link of one node is down for {FLAP_S:g} s, three times",
            moments=3,
            lasts_s=FLAP_S,
            of_link=True,
        ),
        Fault("nan", "the gradients of one rank are NaN", of_server=False),
        Fault("oom", "an allocation on one rank fails", fatal=True, cause=r"memory"),
        Fault("diskfull", "the disk of one rank is full when it saves", fatal=True, cause=r"No space left"),
        Fault("clock", "the clock of one rank jumps an hour ahead, and back", moments=2),
    )
}


def read_faults(text: str) -> tuple[Fault, ...]:
    """Return the faults of a list as `kill,stop`; raises ConfigurationError for what is none."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in FAULTS:
            raise ConfigurationError(
                f"fault {name!r:.60} is unknown{did_you_mean(name, FAULTS) or ';'} known faults: {', '.join(FAULTS)}"
            )
    return tuple(FAULTS[name] for name in names)
