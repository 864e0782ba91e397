# SPDX-License-Identifier: Apache-2.0
"""The standalone API: five collectives over a group, hierarchical where that saves messages between nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor

from commopt.aggregate import Aggregator, Hierarchical
from commopt.collectives import movement
from commopt.collectives.movement import Operand, readable, require_reducible, writable
from commopt.errors import ConfigurationError, UnsupportedTensorError
from commopt.feedback import BufferContext, Layout
from commopt.groups import WireBytes
from commopt.lanes import Agreement, LaneClient, Pending
from topology import Cluster

Op = Literal["avg", "sum"]


class Work:
    """Wait for it before reading the array; several may be in flight, and they finish in the order they started."""

    def __init__(self, pending: Pending, array: Any, agreement: Agreement) -> None:
        """agreement: whether all ranks have made the same call, known once `pending` has ended."""
        self._pending = pending
        self._array = array
        self._agreement = agreement

    def wait(self) -> Any:
        """Return the caller's array once it holds the result; on CUDA the current stream, not the host, waits.

        Raises MismatchError when ranks made different calls, LaneError when the collective failed on any rank.
        """
        self._pending.wait()
        self._agreement.answers()
        return self._array

    def get_future(self) -> torch.futures.Future[Tensor]:
        """Return a future of the result as a tensor; what `wait` raises is a RuntimeError there, as torch has it."""
        return self._pending.future.then(self._require_agreement)

    def is_completed(self) -> bool:
        """Return whether it has ended, well or badly; on CUDA whether the result is there, not whether it is queued."""
        return self._pending.is_completed()

    def _require_agreement(self, done: torch.futures.Future[Tensor]) -> Tensor:
        result = done.value()
        self._agreement.answers()
        return result


class Communicator:
    """Collectives over `group` (default: the world) on commopt's lane; creating one is collective over the group.

    Arrays may be torch tensors, NumPy or CuPy arrays of any shape, contiguous or not; results are written in place.
    Ranks and block orders are those of `group`, whatever order commopt uses inside. Every method must be called by all
    ranks, in the same order, with equal dtypes and with equal shapes (of what holds blocks, equally many elements); a
    call that raises counts. Ranks compare a call before they start, over NCCL only the first time it is made; a
    difference raises MismatchError on all of them. With async_op=True a method returns a Work at once. CuPy arrays are
    read and written in the order of torch's current stream: make it CuPy's with torch.cuda.ExternalStream where they
    differ.

    `ranks_per_node` declares blocks of ranks to be nodes; by default the hosts are asked. `timeout`, in seconds or a
    timedelta, is for a collective or a rank that never arrives; by default that of `group`. `site` is where this
    rank's node is, as in "berlin/rack3"; by default COMMOPT_SITE, or what Slurm says. What cannot be raises
    ConfigurationError on every rank.
    """

    def __init__(
        self,
        group: Any = None,
        ranks_per_node: int | None = None,
        timeout: float | timedelta | None = None,
        site: str | None = None,
    ) -> None:
        self._use(LaneClient.join("Communicator", group, ranks_per_node, timeout, site=site))

    def _use(self, client: LaneClient) -> None:
        self._client = client
        self._membership = client.membership
        self._sequence = count()  # of calls, also of those that raise

    def close(self) -> None:
        """Finish what was started, and close commopt's process groups; every rank must, and later calls raise.

        They are shared: the last Communicator or HookState of the same group and settings to close ends them. What
        was never closed is, when `group` has been destroyed, at the next Communicator, HookState or all_reduce.
        """
        self._client.close()

    @property
    def cluster(self) -> Cluster:
        """Which ranks of the group share a node."""
        return self._membership.cluster

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self._membership.team.size

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.cluster.order[self._membership.team.rank]

    def all_reduce(self, x: Any, op: Op = "avg", aggregator: Aggregator | None = None, async_op: bool = False) -> Any:
        """Replace `x` on every rank by the average (or sum) over ranks; return `x`, or a Work.

        `x` has any shape, floating or, for op="sum", integer, the same on all ranks. By default Hierarchical() adds up.
        Raises UnsupportedTensorError for dtypes that cannot be reduced, ConfigurationError for a bad op or aggregator,
        MismatchError when ranks made different calls, LaneError when one failed.
        """
        number, round_number = next(self._sequence), next(self._membership.rounds)
        aggregator = self._require_aggregator(aggregator)
        operand = writable(x)
        scale = self._scale(op, operand)
        if not aggregator.lossless and not operand.tensor.is_floating_point():
            raise UnsupportedTensorError(
                f"{aggregator} would round {operand.tensor.dtype}; use Flat() or Hierarchical()"
            )

        # Compression forgets here: to remember, it would have to know that two tensors are the same gradient.
        step = aggregator.start_step + round_number
        context = BufferContext.unremembered(operand.tensor.numel(), step, self._membership.global_rank)

        def run() -> None:
            flat = operand.flat()
            aggregator.all_reduce(flat, self._membership.team, scale, context)
            operand.store(flat)

        return self._submit(number, f"all_reduce ({op})", operand, run, async_op, aggregator=aggregator)

    def reduce_scatter(self, output: Any, input: Any, op: Op = "avg", async_op: bool = False) -> Any:
        """Set `output` to this rank's block of the average (or sum) of all inputs; return `output`, or a Work.

        `input` holds world_size blocks of output.numel() elements: rank i gets block i.
        """
        number, target, source = next(self._sequence), writable(output), readable(input)
        self._require_blocks("reduce_scatter", source, target, self.world_size)
        scale = self._scale(op, source)

        def run() -> None:
            blocks = source.flat().view(self.world_size, -1)
            blocks = blocks * scale if scale != 1.0 else blocks
            target.store(movement.reduce_scatter(blocks, self._membership))

        return self._submit(number, f"reduce_scatter ({op})", target, run, async_op, [source])

    def all_gather(self, output: Any, input: Any, async_op: bool = False) -> Any:
        """Fill block i of `output` (world_size * input.numel() elements) with rank i's `input`.

        Returns `output`, or a Work.
        """
        number, target, source = next(self._sequence), writable(output), readable(input)
        self._require_blocks("all_gather", target, source, self.world_size)

        def run() -> None:
            gathered = movement.all_gather(_as_bytes(source.flat()), self._membership)
            target.store(_from_bytes(gathered, target.tensor.dtype))

        return self._submit(number, "all_gather", target, run, async_op, [source])

    def broadcast(self, x: Any, src: int = 0, async_op: bool = False) -> Any:
        """Copy `x` of the group's rank `src` to all ranks, in place, whatever its dtype; return `x`, or a Work."""
        number, src, operand = next(self._sequence), self._require_rank(src), writable(x)

        def run() -> None:
            flat = operand.flat()
            movement.broadcast(_as_bytes(flat), src, self._membership)
            operand.store(flat)

        return self._submit(number, f"broadcast from {src}", operand, run, async_op)

    def all_to_all(self, output: Any, input: Any, async_op: bool = False) -> Any:
        """Send block j of `input` to rank j; block i of `output` comes from rank i. Return `output`, or a Work.

        Both hold world_size equal blocks. Blocks for another node are gathered within this node first, so that one
        message per rank and remote node crosses the network instead of one per pair of ranks.
        """
        number, target, source = next(self._sequence), writable(output), readable(input)
        self._require_blocks("all_to_all", target, source, 1)
        if source.tensor.numel() % self.world_size:
            raise ConfigurationError(
                f"all_to_all: {source.tensor.numel()} elements are not world_size={self.world_size} blocks of one "
                f"length; pass a multiple of {self.world_size}"
            )

        def run() -> None:
            blocks = _as_bytes(source.flat()).view(self.world_size, -1)
            exchanged = movement.all_to_all(blocks, self._membership)
            target.store(_from_bytes(exchanged, target.tensor.dtype))

        return self._submit(number, "all_to_all", target, run, async_op, [source])

    def wire_bytes(self, numel: int, dtype: torch.dtype, aggregator: Aggregator | None = None) -> WireBytes:
        """Return the payload bytes this rank sends for one all_reduce of `numel` elements."""
        count = _as_int(numel)
        if count is None or count < 0 or not isinstance(dtype, torch.dtype):
            raise ConfigurationError(
                f"wire_bytes of {numel!r} elements of {dtype!r}; pass a whole number >= 0 and a torch.dtype"
            )
        layout = Layout.anonymous(count)
        return self._require_aggregator(aggregator).wire_bytes(layout, dtype, self._membership.team)

    def _submit(
        self,
        number: int,
        title: str,
        operand: Operand,
        run: Callable[[], None],
        async_op: bool,
        inputs: Sequence[Operand] = (),
        aggregator: Aggregator | None = None,
    ) -> Any:
        tensor = operand.tensor
        facts = {"operation": title, "aggregator": repr(aggregator), "dtype": str(tensor.dtype)}
        # What one array replaces on all ranks has one shape; blocks are so many elements.
        facts |= {"numel": str(tensor.numel())} if inputs else {"shape": str(tuple(tensor.shape))}
        call = f"{self._client.name}, operation {number}"
        agreement = Agreement(partial(self._membership.compare_call, facts, call, tensor.device))
        guarded = agreement.guard(run)

        def compare_and_run() -> None:
            agreement.reach()
            guarded()

        if aggregator is not None:
            title += f" by {aggregator}"
        sources = [source.tensor for source in inputs]
        pending = self._client.submit(title, compare_and_run, tensor, sources, numel=tensor.numel())
        handle = Work(pending, operand.array, agreement)
        return handle if async_op else handle.wait()

    def _require_aggregator(self, aggregator: Aggregator | None) -> Aggregator:
        if aggregator is None:
            aggregator = Hierarchical()
        if not isinstance(aggregator, Aggregator):
            raise ConfigurationError(f"{aggregator!r} is not an aggregator; pass for example commopt.Flat()")
        if aggregator.node_local:
            raise ConfigurationError(
                f"{aggregator} is for DDP models; use commopt.attach(ddp, ...), or Hierarchical() here"
            )
        aggregator.check(self._membership.team)
        return aggregator

    def _require_rank(self, src: Any) -> int:
        """Return a rank of the group as an int. Raises ConfigurationError for anything else."""
        rank = _as_int(src)
        if rank is None or not 0 <= rank < self.world_size:
            raise ConfigurationError(f"src {src!r} is not a rank of this group; use 0 to {self.world_size - 1}")
        return rank

    def _scale(self, op: Op, operand: Operand) -> float:
        require_reducible(operand.tensor)
        if not isinstance(op, str) or op not in ("avg", "sum"):  # an array equals nothing, or many things
            raise ConfigurationError(f"op {op!r} is unknown; use 'avg' or 'sum'")
        if op == "avg" and not operand.tensor.is_floating_point():
            raise UnsupportedTensorError(f"op 'avg' of {operand.tensor.dtype} is no integer; use op='sum' and divide")
        return 1.0 / self.world_size if op == "avg" else 1.0

    def _require_blocks(self, name: str, large: Operand, small: Operand, ratio: int) -> None:
        """Raise ConfigurationError unless the larger array has `ratio` times the elements, of one dtype and device."""
        needed, kinds = ratio * small.tensor.numel(), [f"{x.tensor.dtype} on {x.tensor.device}" for x in (large, small)]
        if large.tensor.numel() != needed:
            raise ConfigurationError(
                f"{name} in a group of world_size={self.world_size}: {large.tensor.numel()} elements are not {ratio} x "
                f"{small.tensor.numel()}; make that array {needed} elements long"
            )
        if kinds[0] != kinds[1]:
            raise ConfigurationError(f"{name} between {kinds[0]} and {kinds[1]}; make them alike")


def all_reduce(
    x: Any, op: Op = "avg", aggregator: Aggregator | None = None, group: Any = None, async_op: bool = False
) -> Any:
    """Replace `x` on every rank of `group` by the average (or sum); see Communicator.all_reduce.

    The first call on a group sets up commopt's process groups: all its ranks must make it.
    """
    communicator = object.__new__(Communicator)
    communicator._use(LaneClient.join("Communicator", group, None, None, meets=False))  # for one call
    try:
        return communicator.all_reduce(x, op=op, aggregator=aggregator, async_op=async_op)
    finally:
        communicator._client.close(groups=False)  # the next call will need the groups


def _as_int(value: Any) -> int | None:
    """Return a whole number, of NumPy too, as an int; None for anything else."""
    try:
        return None if isinstance(value, bool) else index(value)
    except TypeError:
        return None


def _as_bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)


def _from_bytes(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.reshape(-1).view(dtype)
