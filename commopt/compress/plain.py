"""What Cast and Exact share: payloads that are the values themselves in some floating-point format."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from commopt import kernels
from commopt.compress.base import Compressor
from commopt.kernels.codec import Dice, ErrorFeedback
from commopt.kernels.residual import round_with_carry

_ROW_ALIGNMENT = 16


class Plain(Compressor):
    """Every element travels as one number of `wire_dtype`."""

    @property
    @abstractmethod
    def wire_dtype(self) -> torch.dtype:
        """The format of the payload."""

    @property
    def granularity(self) -> int:
        """See Compressor: 16 bytes, so that every row starts aligned for vector loads."""
        return _ROW_ALIGNMENT // self.wire_dtype.itemsize

    @property
    def error_bound(self) -> float:
        """See Compressor; of the element itself, if it is no denormal number."""
        return torch.finfo(self.wire_dtype).eps / 2

    def payload_nbytes(self, chunk_numel: int) -> int:
        """See Compressor."""
        return chunk_numel * self.wire_dtype.itemsize

    def compress(
        self,
        values: Tensor,
        payload: Tensor,
        chunk_numel: int,
        scale: float,
        carry: ErrorFeedback | None = None,
        dice: Dice = Dice(),
    ) -> None:
        """See Compressor."""
        begin = 0
        for row in self._rows(payload):
            end = min(begin + row.numel(), values.numel())
            part, encoded = values[begin:end], row[: end - begin]
            if carry is None:
                kernels.pack([part], encoded, scale)
            else:
                part_of_carry = ErrorFeedback(carry.old[begin:end], carry.new[begin:end], carry.loss_scale, carry.decay)
                round_with_carry(part, encoded, scale, part_of_carry)
            row[end - begin :].zero_()
            begin = end

    def decompress(self, payload: Tensor, values: Tensor, chunk_numel: int) -> None:
        """See Compressor."""
        begin = 0
        for row in self._rows(payload):
            end = min(begin + row.numel(), values.numel())
            kernels.unpack(row[: end - begin], [values[begin:end]])
            begin = end

    def accumulate(self, payloads: Tensor, total: Tensor) -> None:
        """See Compressor."""
        rows = payloads.view(self.wire_dtype)
        total.copy_(rows[0])
        for row in rows[1:]:
            total.add_(row)

    def finite(self, payload: Tensor, chunk_numel: int) -> Tensor:
        """See Compressor; minimum and maximum are NaN where a value is."""
        if payload.numel() == 0:
            return torch.ones((), dtype=torch.bool, device=payload.device)
        return torch.stack(payload.view(self.wire_dtype).aminmax()).isfinite().all()

    def _rows(self, payload: Tensor) -> list[Tensor]:
        """Return the rows as numbers; those without gaps between them count as one."""
        if payload.is_contiguous():
            return [payload.view(-1).view(self.wire_dtype)]
        return list(payload.view(self.wire_dtype))
