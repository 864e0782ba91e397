# SPDX-License-Identifier: Apache-2.0
"""Reads pickles of plain values, without running any code in them."""

from __future__ import annotations

import pickletools
from typing import Any, BinaryIO

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_GROUPED = {"LIST": list, "TUPLE": tuple}
_OF_THE_TOP = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_VALUES = ("INT", "LONG", "FLOAT", "BININT", "BINFLOAT", "UNICODE", "BINUNICODE", "STRING", "BINSTRING", "BINBYTES")


def load_plain(file: BinaryIO) -> Any:
    """Return the dicts, lists, tuples, numbers, texts and bytes of a pickle.

    `pickle.load` calls any function that a file names. This function interprets only the few instructions for plain
    values. Raises ValueError for all others, such as classes, and for damaged pickles.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(file):
            name = opcode.name
            if name in ("PROTO", "FRAME"):
                continue
            if name == "STOP":
                return stack.pop()
            if name == "MARK":
                marks.append(len(stack))
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in _EMPTY:
                stack.append(_EMPTY[name]())
            elif name in _OF_THE_TOP:
                stack[-_OF_THE_TOP[name] :] = [tuple(stack[-_OF_THE_TOP[name] :])]
            elif name in _GROUPED:
                stack.append(_GROUPED[name](_above(stack, marks)))
            elif name == "APPEND":
                _list(stack[-2]).append(stack.pop())
            elif name == "APPENDS":
                items = _above(stack, marks)
                _list(stack[-1]).extend(items)
            elif name == "SETITEM":
                _set(stack[-3], [stack[-2], stack[-1]])
                del stack[-2:]
            elif name in ("SETITEMS", "DICT"):
                items = _above(stack, marks)
                stack += [{}] if name == "DICT" else []
                _set(stack[-1], items)
            elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if argument is None else argument] = stack[-1]
            elif name in ("GET", "BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name.startswith(_VALUES) or name.startswith("SHORT_BIN"):
                stack.append(argument)
            else:
                raise ValueError(f"it holds more than plain values ({name})")
    except (IndexError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__})") from None
    raise ValueError("it is damaged: no end")


def _above(stack: list[Any], marks: list[int]) -> list[Any]:
    """Remove and return the items above the last mark."""
    place = marks.pop()
    items = stack[place:]
    del stack[place:]
    return items


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("no list")
    return value


def _set(table: Any, items: list[Any]) -> None:
    if not isinstance(table, dict) or len(items) % 2:
        raise TypeError("no dict")
    table.update(zip(items[::2], items[1::2], strict=True))
