"""Which way of averaging pays here: what there is to choose from, what it leaves out, and the search on live steps."""

from commopt.tuning.candidates import Ladder, exact, ladders
from commopt.tuning.errors import unit_energies
from commopt.tuning.explain import explain
from commopt.tuning.losses import Losses
from commopt.tuning.nccl import tuner_rows, write_csv
from commopt.tuning.tuning import Tuning
from commopt.tuning.ways import Proposals

__all__ = [
    "Ladder",
    "Losses",
    "Proposals",
    "Tuning",
    "exact",
    "explain",
    "ladders",
    "tuner_rows",
    "unit_energies",
    "write_csv",
]
