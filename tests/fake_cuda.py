# SPDX-License-Identifier: Apache-2.0
"""A made-up GPU: tensors in host memory, streams that know what they have waited for, and memory that is used again.

    with Gpu() as gpu:
        x = torch.zeros(8, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            x += 1          # a fault: this stream has not waited for the one that made x
    assert gpu.faults

Every operation is done at once, in the order in which the host launches it, so values are those of a perfect order.
What is checked is whether a device would have had to keep that order. Each stream has a vector clock: how many
operations of every stream happen before its next one. Waits for streams and events join clocks; a read must come after
the last write of the same bytes, a write after reads too. Memory that the host lets go may be handed out again by the
stream it was made on: a fault, if another stream may still use it that was not recorded (Tensor.record_stream).

A CUDA graph keeps the operations that were launched while its stream was captured. What they wrote then is taken back,
and each replay computes all of it again, in the same memory. After a capture that fails its pool stays recorded,
and no other graph can be captured into it.

Not modelled: the caching allocator's sizes (whatever is free is used again by the next allocation), events that end by
themselves (`query` is true once the host has waited), several devices, threads, the memory of graphs.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import SimpleNamespace, TracebackType
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)

Clock = dict[int, int]  # operations of each stream

_FACTORIES = ("arange", "empty", "eye", "full", "ones", "rand", "randint", "randn", "tensor", "tril_indices", "zeros")
_UNWRITTEN = ("new_empty", "empty_like")
_OF_SHAPE = ("new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like", "ones_like", "full_like")
_WAITS = ("_local_scalar_dense", "is_nonzero", "equal")
_VERSIONED_TO = Tensor.to

_pools = count(1)


def join(clock: Clock, other: Clock) -> None:
    """Let `clock` come after all that `other` comes after."""
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


class Event:
    """Stands for torch.cuda.Event."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.clock: Clock | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or Gpu.now().stream).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Gpu.now().stream).wait_event(self)

    def query(self) -> bool:
        host = Gpu.now().host
        return all(host.get(stream, 0) >= time for stream, time in (self.clock or {}).items())

    def synchronize(self) -> None:
        join(Gpu.now().host, self.clock or {})

    def elapsed_time(self, later: Event) -> float:
        return 0.0


class Stream:
    """Stands for torch.cuda.Stream; `cuda_stream` and `stream_id` are its number."""

    cuda_stream: int
    clock: Clock
    device_index, device_type = 0, 1

    def __new__(cls, device: Any = None, priority: int = 0, stream_id: int | None = None, **_: Any) -> Stream:
        streams = Gpu.now().streams
        if stream_id is not None:
            return streams[stream_id]
        stream = super().__new__(cls)
        stream.cuda_stream = len(streams)
        stream.clock = {}
        streams.append(stream)
        return stream

    @property
    def stream_id(self) -> int:
        return self.cuda_stream

    def __repr__(self) -> str:
        return f"stream {self.cuda_stream}"

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        join(self.clock, event.clock or {})

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        join(Gpu.now().host, self.clock)

    def work(self) -> int:
        """Launch an operation; return its time."""
        join(self.clock, Gpu.now().host)
        self.clock[self.cuda_stream] = time = self.clock.get(self.cuda_stream, 0) + 1
        return time

    def is_after(self, stream: int, time: int) -> bool:
        """Whether what comes next here comes after what another stream did at `time`."""
        return stream == self.cuda_stream or self.clock.get(stream, 0) >= time


class Future:
    """Stands for a torch.futures.Future with devices."""

    def __init__(self) -> None:
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._ended = Event()
        self._callbacks: list[Callable[[], None]] = []

    def set_result(self, value: Any) -> None:
        assert not self._done
        self._done, self._value = True, value
        self._ended.record()
        for callback in self._callbacks:
            callback()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self.set_result(error)

    def done(self) -> bool:
        return self._done

    def value(self) -> Any:
        assert self._done
        if self._error is not None:
            raise self._error
        return self._value

    def wait(self) -> Any:
        assert self._done, "nobody else runs here, so this would wait for ever"
        self._ended.wait()
        return self.value()

    def then(self, callback: Callable[[Any], Any]) -> Future:
        """Call back on another stream, which waits for the result."""
        child = Future()

        def call() -> None:
            with Gpu.now().within(Stream()):
                self._ended.wait()
                child.set_result(callback(self))

        if self._done:
            call()
        else:
            self._callbacks.append(call)
        return child


@dataclass
class Block:
    """Memory of the device: who made it, and when which stream has used which bytes of it."""

    memory: StorageWeakRef
    owner: Stream
    recorded: set[int] = field(default_factory=set)
    used: dict[tuple[int, bool, int, int], int] = field(default_factory=dict)  # stream, writes, begin, end: time


class Graph:
    """Stands for torch.cuda.CUDAGraph; `launches` counts its operations."""

    def __init__(self) -> None:
        self._operations: list[Callable[[], None]] = []
        self.failed = False
        self.before: list[tuple[Tensor, Tensor]] = []  # memory that was written during the capture, as it was before

    @property
    def launches(self) -> int:
        return len(self._operations)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        gpu = Gpu.now()
        assert gpu.capturing is None
        assert gpu.stream is not gpu.main, "the default stream cannot be captured"
        if pool in gpu.recorded_pools:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        gpu.recorded_pools.add(pool)
        gpu.capturing, self._pool = self, pool

    def capture_end(self) -> None:
        gpu = Gpu.now()
        if gpu.capturing is not self:
            raise RuntimeError("capture_end() without a capture")
        gpu.capturing = None
        with torch._C._DisableTorchDispatch():
            while self.before:
                tensor, values = self.before.pop()
                tensor.copy_(values)
        if self.failed:  # torch goes on recording the pool
            raise RuntimeError("operation failed due to a previous error during capture")
        gpu.recorded_pools.remove(self._pool)
        if not self._operations:
            warnings.warn("The CUDA Graph is empty. This usually means ...", stacklevel=1)

    def add(self, operation: Callable[[], None]) -> None:
        self._operations.append(operation)

    def replay(self) -> None:
        Gpu.now().replays += 1
        for operation in self._operations:
            operation()


class OnGpu(Tensor):
    """A tensor of the made-up device, in memory of the host."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    is_cuda = True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return Gpu.now().run(func, args, kwargs or {})

    def record_stream(self, stream: Any) -> None:
        Gpu.now().block_of(self).recorded.add(stream.cuda_stream)

    def cpu(self, *args: Any, **options: Any) -> Tensor:
        return Gpu.now().download(self)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **options: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def to(self, *args: Any, **options: Any) -> Tensor:
        return _to(self, *args, **options)


def _to(self: Tensor, *args: Any, **options: Any) -> Tensor:
    """Stand for Tensor.to, on whichever device the tensor is."""
    devices = [each for each in (*args, options.get("device")) if isinstance(each, (str, torch.device))]
    args = tuple(each for each in args if not isinstance(each, (str, torch.device)))
    options = {name: value for name, value in options.items() if name not in ("device", "non_blocking")}
    here = "cuda" if isinstance(self, OnGpu) else "cpu"
    there = torch.device(devices[0]).type if devices else here
    if here == there:
        return _VERSIONED_TO(self, *args, **options) if args or options else self
    moved = Gpu.now().download(self) if here == "cuda" else Gpu.now().upload(self)
    options.pop("copy", None)
    return _VERSIONED_TO(moved, *args, **options) if args or options else moved


class Gpu:
    """The device, while it is entered: stands in for torch.cuda."""

    entered: ClassVar[list[Gpu]] = []

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.host: Clock = {}
        self.streams: list[Stream] = []
        self.capturing: Graph | None = None
        self.recorded_pools: set[Any] = set()
        self.replays = 0  # of graphs
        self.operations = 0  # launched by torch, by themselves or in a graph
        self.asked = 0  # how often torch asked the driver for the number of devices
        self._blocks: dict[int, Block] = {}
        self._free: list[Block] = []
        self._patches = ExitStack()

    @classmethod
    def now(cls) -> Gpu:
        """The device that is entered."""
        return cls.entered[-1]

    def __enter__(self) -> Gpu:
        self.entered.append(self)
        self.stream = self.main = Stream()
        cuda = {
            **{"Stream": Stream, "Event": Event, "stream": self._on, "device": _nothing, "synchronize": self.finish},
            "current_stream": self._current,
            "default_stream": lambda *device: self.main,
            "is_current_stream_capturing": lambda: self.capturing is not None,
            **{"CUDAGraph": Graph, "graph_pool_handle": lambda: (0, next(_pools))},
            "default_generators": [SimpleNamespace(clone_state=lambda: None, graphsafe_set_state=lambda state: None)],
            **{"is_initialized": lambda: True, "is_available": lambda: self._count_devices() > 0},
            **{"current_device": lambda: 0, "device_count": self._count_devices},
        }
        for name, value in cuda.items():
            self._patches.enter_context(patch.object(torch.cuda, name, value))
        below = {
            **dict.fromkeys(("_cuda_exchangeDevice", "_cuda_maybeExchangeDevice"), lambda index: 0),
            "_cuda_getCurrentRawStream": lambda index: self.stream.cuda_stream,
            "_cuda_getCurrentStream": self._current_of,
            "_cuda_setStream": self._set,
            "_cuda_endAllocateToPool": lambda device, pool: None,  # that of pinned memory goes on
        }
        for name, value in below.items():  # a torch without CUDA has none of them
            self._patches.enter_context(patch.object(torch._C, name, value, create=True))
        for name in _FACTORIES:
            self._patches.enter_context(patch.object(torch, name, self._factory(getattr(torch, name))))
        self._patches.enter_context(patch.object(torch.futures, "Future", _either_future(torch.futures.Future)))
        self._patches.enter_context(patch.object(torch, "Generator", _host_generator(torch.Generator)))
        self._patches.enter_context(patch.object(Tensor, "to", _to))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patches.close()
        self.entered.remove(self)

    def _count_devices(self) -> int:
        self.asked += 1
        return 1

    def _current_of(self, index: int) -> tuple[int, int, int]:
        if not isinstance(index, int):
            raise RuntimeError("invalid argument to getCurrentStream")
        return self.stream.stream_id, 0, 1

    def _current(self, device: Any = None) -> Stream:
        if getattr(device, "index", None) is None:  # torch looks for a device first
            self._count_devices()
        return self.stream

    def _set(self, stream_id: int, device_index: int, device_type: int) -> None:
        self.stream = self.streams[stream_id]

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        self._count_devices()  # as torch does, to find the current device
        with self.within(stream):
            yield

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def finish(self, device: Any = None) -> None:
        """Let the host wait for everything."""
        for stream in self.streams:
            stream.synchronize()

    # ------------------------------------------------------------------------------------- what is launched

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do an operation on the current stream, of which at least one argument is on the device."""
        name = func.__name__.partition(".")[0]
        assert func.namespace != "c10d", f"{func} was handed memory of the device, which this backend cannot read"
        self._look_for_free_memory()
        to_host = name in _OF_SHAPE and kwargs.get("device") == torch.device("cpu")
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        graph = None if is_view else self.capturing
        if graph is not None and name in _WAITS:
            graph.failed = True
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        with torch._C._DisableTorchDispatch():
            if graph is not None:  # what it writes is taken back when the capture ends
                graph.before += [(each, each.clone()) for each in _written(func, args, kwargs)]
            result = func(*args, **kwargs)
            if name in _UNWRITTEN:
                _fill_with_garbage(result)
        if graph is not None:
            found = [each for each in tree_flatten(result)[0] if _is_new(each, given)]
            graph.add(partial(self._again, func, args, kwargs, found))
        elif not is_view and name not in _OF_SHAPE:
            self._use(func, args, kwargs)
        self.operations += not is_view and name not in _UNWRITTEN
        if name in _WAITS:
            self.stream.synchronize()
        if to_host:
            return result
        return tree_map(lambda each: self._placed(each) if _is_new(each, given) else each, result)

    def _again(self, func: Any, args: Any, kwargs: Any, found: list[Tensor]) -> None:
        """Do an operation of a graph; its results go where they were when it was captured."""
        with torch._C._DisableTorchDispatch():
            now = func(*args, **kwargs)
            if found:
                for old, new in zip(found, tree_flatten(now)[0], strict=True):
                    old.copy_(new)
        self._use(func, args, kwargs)
        for each in found:
            self._access(each, self.stream.work(), writes=True, what=f"a result of {func}")

    def _use(self, func: Any, args: Any, kwargs: Any) -> None:
        time = self.stream.work()
        for number, parameter in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(parameter.name)
            writes = parameter.alias_info is not None and parameter.alias_info.is_write
            for tensor in tree_flatten(value)[0]:
                if isinstance(tensor, OnGpu):
                    self._access(tensor, time, writes=writes, what=str(func))

    def _access(self, tensor: Tensor, time: int, *, writes: bool, what: str) -> None:
        if tensor.numel() == 0:
            return
        block, stream, size = self.block_of(tensor), self.stream, tensor.element_size()
        begin = int(tensor.storage_offset()) * size
        reach: int = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = begin + (reach + 1) * size
        for (other, wrote, first, last), at in block.used.items():
            if first < end and begin < last and (wrote or writes) and not stream.is_after(other, at):
                deed, before = "writes" if writes else "reads", "wrote" if wrote else "read"
                self.fault(f"{what} on {stream} {deed} what stream {other} {before} and it has not waited for")
        block.used[stream.cuda_stream, writes, begin, end] = time

    def fault(self, what: str) -> None:
        """Take note of a fault, and of where in the library it is."""
        frames = [frame for frame in traceback.extract_stack() if "/commopt/" in frame.filename]
        where = f" at {frames[-1].filename.rpartition('/commopt/')[2]}:{frames[-1].lineno}" if frames else ""
        self.faults.append(what + where)

    # ------------------------------------------------------------------------------------- memory

    def block_of(self, tensor: Tensor) -> Block:
        """Return the memory of a tensor; what was there before this device was entered is ready."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._blocks:
            self._blocks[storage._cdata] = Block(StorageWeakRef(storage), self.main)
        return self._blocks[storage._cdata]

    def _placed(self, plain: Tensor) -> Tensor:
        """Return a result as a tensor of the device; new memory is of the current stream, and was written there."""
        tensor = torch.Tensor._make_subclass(OnGpu, plain)
        storage = plain.untyped_storage()
        if storage._cdata not in self._blocks:
            self._allocate(StorageWeakRef(storage))
            if self.capturing is None:
                self._access(tensor, self.stream.work(), writes=True, what="the first write")
        return tensor

    def _allocate(self, memory: StorageWeakRef) -> None:
        self._look_for_free_memory()
        join(self.stream.clock, self.host)
        for block in [block for block in self._free if block.owner is self.stream]:
            self._free.remove(block)
            for (other, *_), time in block.used.items():
                if other not in block.recorded and not self.stream.is_after(other, time):
                    self.fault(f"{self.stream} uses memory again that stream {other} still works with")
        self._blocks[memory.cdata] = Block(memory, self.stream)

    def _look_for_free_memory(self) -> None:
        for key in [key for key, block in self._blocks.items() if block.memory.expired()]:
            self._free.append(self._blocks.pop(key))

    def _fill(self, target: Tensor, values: Tensor) -> None:
        target.copy_(values)
        self._access(target, self.stream.work(), writes=True, what="a fill")

    def upload(self, plain: Tensor) -> Tensor:
        """Return a copy on the device."""
        self._require_no_capture()
        with torch._C._DisableTorchDispatch():
            copied = plain.detach().clone()
        return self._placed(copied)

    def download(self, tensor: Tensor) -> Tensor:
        """Return a copy in host memory, for which the host waits."""
        self._require_no_capture()
        self._access(tensor, self.stream.work(), writes=False, what="a copy to the host")
        self.stream.synchronize()
        with torch._C._DisableTorchDispatch():
            return torch.Tensor._make_subclass(Tensor, tensor.clone())

    def _require_no_capture(self) -> None:
        if self.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing: a copy between host and device")

    def _factory(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def factory(*args: Any, **options: Any) -> Tensor:
            if torch.device(options.get("device") or "cpu").type != "cuda":
                options.pop("pin_memory", None)  # which needs a driver
                return make(*args, **options)
            del options["device"]
            self.operations += make.__name__ != "empty"
            made = make(*args, **options, device="cpu")
            if make.__name__ == "empty":
                _fill_with_garbage(made)
            if self.capturing is not None:
                if make.__name__ == "tensor":
                    raise RuntimeError("operation not permitted when stream is capturing: a copy from the host")
                self.capturing.add(lambda: self._fill(made, make(*args, **options, device="cpu")))
            return self._placed(made)

        return factory


def _fill_with_garbage(made: Tensor) -> None:
    """Make memory that nobody has written yet the same in every run, and no plausible result."""
    made.fill_(float("nan") if made.is_floating_point() else made.dtype == torch.bool or 85)


def _either_future(real: Any) -> type:
    class FutureOf:
        def __new__(cls, *, devices: Any = None) -> Any:
            return Future() if devices else real()

    return FutureOf


def _host_generator(real: Any) -> type:
    class Generator:
        def __new__(cls, device: Any = "cpu") -> Any:
            return real()

    return Generator


@contextmanager
def _nothing(*_: Any) -> Iterator[None]:
    yield


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes in place."""
    written = []
    for number, parameter in enumerate(func._schema.arguments):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(parameter.name)
            written += [each for each in tree_flatten(value)[0] if isinstance(each, Tensor)]
    return written


def _is_new(each: Any, given: list[Tensor]) -> bool:
    return isinstance(each, Tensor) and not any(each is one for one in given)
