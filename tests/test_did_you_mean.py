# SPDX-License-Identifier: Apache-2.0
"""A name that is almost right is answered with the right one, wherever it is typed; what --version and --help say."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

import commopt
from commopt import ConfigurationError
from commopt.__main__ import main
from commopt.hooks.presets import LOCAL_PRESETS, PRESETS
from commopt.kernels import loader

WRONG: dict[str, Callable[[], object]] = {
    "betas": lambda: commopt.Adam(beta=(0.9, 0.95)),  # type: ignore[call-arg]
    "onebit": lambda: commopt.Auto(allow="lossless+onbit"),
    "bits": lambda: commopt.Quantize(bit=4),  # type: ignore[call-arg]
    "momentum": lambda: commopt.Outer(lr=0.1, momentun=0.9),  # type: ignore[call-arg]
    "'stochastic'|stochastic": lambda: commopt.Quantize(rounding="stocastic"),  # type: ignore[arg-type]
    "leader|leaders": lambda: commopt.Hierarchical(form="leadr"),  # type: ignore[arg-type]
    "hierarchical_powersgd": lambda: commopt.build_preset("hierarchical_powersdg"),
    "matrix_rank": lambda: commopt.build_preset("powersgd:matrixrank=4"),
}


@pytest.mark.parametrize("meant", WRONG)
def test_options_and_values(meant: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"did you mean .*({meant})"):
        WRONG[meant]()


def test_what_has_options_is_still_copied_and_pickled() -> None:
    made = commopt.build_preset("hierarchical_dgc:density=0.05:adam=True")
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["prob"], "probe"),
        (["bandwidth", "--agregator", "flat"], "--aggregator"),
        (["bandwidth", "--collective", "all_reduc"], "all_reduce"),
        (["bandwidth", "--aggregator", "hierarchicl"], "hierarchical"),
        (["run", "--strategy", "hierarchical_onbit", "x.py"], "hierarchical_onebit"),
        (["simulate", "--model", "gpt2-mediun"], "gpt2-medium"),
        (["simulate", "--model", "gpt2", "--strategies", "stok"], "stock"),
    ],
)
def test_commands(words: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    def ended() -> int | str | None:
        try:
            return main(words)
        except SystemExit as ending:
            return ending.code

    assert ended() == 2
    said = capsys.readouterr().err
    assert f"did you mean {meant}" in said
    assert said.count("\n") == 1


def test_the_version_says_which_kernels_compute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Compiled:
        target = staticmethod(lambda: "baseline")

    said = []
    for kernels in (Compiled, None):
        monkeypatch.setattr(loader, "cpu_kernels", lambda found=kernels: found)
        with pytest.raises(SystemExit) as ended:
            main(["--version"])
        assert ended.value.code == 0
        said.append(capsys.readouterr().out)
    assert said[0].startswith(f"commopt {commopt.__version__}")
    assert "kernels on the CPU: compiled, for any processor (baseline)" in said[0]
    assert "kernels on the CPU: plain torch" in said[1]
    assert "kernels on the GPU: " in said[0]


def test_run_lists_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in (*PRESETS, *LOCAL_PRESETS))
    assert max(map(len, said.splitlines())) <= 80
