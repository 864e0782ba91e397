"""Run a script or a module as python itself would, inside this process."""

from __future__ import annotations

import importlib.util
import io
import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from commopt.errors import ConfigurationError


@dataclass(frozen=True)
class Script:
    """`python target arguments...`, or `python -m target arguments...` for a module."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def require_there(self) -> None:
        """Raise ConfigurationError when there is no such file or module."""
        if not self.is_module:
            if not Path(self.target).is_file():
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
