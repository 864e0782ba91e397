# SPDX-License-Identifier: Apache-2.0
"""The script and the options of `attach` that a command line names, checked before anything starts."""

from __future__ import annotations

import importlib.util
import io
import os
import runpy
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from commopt.aggregate import Adam, Aggregator
from commopt.attached.options import OPTIONS, PORTABLE_OPTIONS, AttachOptions
from commopt.command_line import option_value
from commopt.errors import ConfigurationError
from commopt.groups import SITE_VARIABLE
from commopt.hooks import CommState, attach, build_preset

_OF_SCRIPT = ("aggregator", "module", *(name for name in OPTIONS if name not in PORTABLE_OPTIONS))
"""Options of attach and HookState that are objects of the script."""


def ended_well(error: BaseException | None) -> bool:
    """Return whether a script through which `error` passes ends without one, as with sys.exit() and sys.exit(0)."""
    return error is None or (isinstance(error, SystemExit) and error.code in (None, 0))


@dataclass(frozen=True)
class Choice:
    """A strategy as `build_preset` reads it, and further options of `attach`."""

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def aggregator(self) -> Aggregator:
        """The aggregator of the strategy, built once."""
        return self._with_options()

    @property
    def adam(self) -> bool:
        """Whether Adam's directions are sent, so that the script's optimizer has to change."""
        return self.aggregator.adam is not None

    def attach(self, model: Any, adam: Adam | None = None) -> CommState:
        """Attach to a model; collective. adam: the script's, whose betas and eps are taken where none are asked for."""
        aggregator, asked = self.aggregator, self.aggregator.adam
        if adam is not None and asked is not None and (asked.betas, asked.eps) == (Adam().betas, Adam().eps):
            aggregator = self._with_options(adam=replace(asked, betas=adam.betas, eps=adam.eps))
        state: CommState = attach(model, aggregator, **self._of_attach())
        return state

    def _of_attach(self) -> dict[str, Any]:
        """Return the options of `attach`; the others are the strategy's."""
        return {name: value for name, value in self.options.items() if name in OPTIONS}

    def _with_options(self, **instead: Any) -> Aggregator:
        """Build the aggregator with the strategy's options, and with those given `instead`."""
        name, *settings = self.strategy.split(":")
        settings = [each for each in settings if each.partition("=")[0] not in instead]
        options = {name: value for name, value in self.options.items() if name not in OPTIONS}
        return build_preset(":".join([name, *settings]), **options | instead)

    @classmethod
    def read(cls, strategy: str, settings: Iterable[str] = (), tuned: Path | None = None) -> Choice:
        """Check `strategy` and "option=value" settings; files are read.

        tuned: the file of --tuned, which need not be there yet.

        Raises ConfigurationError for options that `attach` would refuse on any model.
        """
        options: dict[str, Any] = {}
        for setting in settings:
            name, equals, text = setting.partition("=")
            if not equals or not name:
                raise ConfigurationError(f"--option {setting!r} is no OPTION=VALUE, for example --option plan=ddp")
            options[name] = option_value(text)
        if "site" in options:
            raise ConfigurationError(
                f"--option site={options['site']} would be the site of every node; set {SITE_VARIABLE} on each instead"
            )
        for name in _OF_SCRIPT:
            if name in options:
                raise ConfigurationError(
                    f"--option {name}={options[name]} is no value that a command line can hold; call "
                    f"commopt.attach(ddp, {strategy!r}, {name}=...) in the script, which is then left alone"
                )
        choice = cls(strategy, options)
        tunes = choice.aggregator.tunes
        if tuned is not None:
            if "tuned" in options:
                raise ConfigurationError(
                    f"--tuned {tuned} and --option tuned={options['tuned']} both say one; pass one"
                )
            if not tunes:
                raise ConfigurationError(f"--tuned {tuned} keeps what auto chooses, and {strategy} chooses nothing")
            if os.path.exists(tuned):
                options["tuned"] = str(tuned)
        AttachOptions(**choice._of_attach()).checked()
        return choice


@dataclass(frozen=True)
class Script:
    """`python target arguments...`, or `python -m target arguments...` for a module."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def require_there(self) -> None:
        """Raise ConfigurationError when there is no such file or module."""
        if not self.is_module:
            if not os.path.isfile(self.target):  # Path's raises OSError for a name that is too long
                raise ConfigurationError(f"there is no file {self.target}; for a module pass -m before its name")
            return
        try:
            found = importlib.util.find_spec(self.target) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            raise ConfigurationError(f"there is no module {self.target} on sys.path; for a file leave -m out")

    def run(self) -> object:
        """Run it to its end; its exceptions pass through. What it made lives on while the result does."""
        argv, path, main = list(sys.argv), list(sys.path), sys.modules["__main__"]
        sys.argv[:] = [self.target, *self.arguments]
        try:
            return self._run()
        finally:
            sys.argv[:], sys.path[:], sys.modules["__main__"] = argv, path, main

    def _run(self) -> object:
        if self.is_module:  # sys.path[0] is the current folder already, as for this very module
            return runpy.run_module(self.target, run_name="__main__", alter_sys=True)
        if not getattr(sys.flags, "safe_path", False):  # python -P, from 3.11 on
            sys.path[0] = os.path.dirname(os.path.realpath(self.target))
        return _run_file(self.target)


def _run_file(target: str) -> ModuleType:
    """Run a file as module __main__: like python, unlike runpy, with an absolute __file__ and sys.argv[0] as typed."""
    path = os.path.abspath(target)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    module = ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    exec(code, vars(module))
    return module
