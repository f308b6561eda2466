"""Inputs that wait in shared memory until registers are free for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
import cutlass.cute.arch as ca
from cutlass import Boolean, Float32, Int32

from mx_kernels.device import ptx
from mx_kernels.device.tile import VECTOR, RowAccess, Rows, WarpTile, load_shared


@dataclass(frozen=True)
class Lookahead:
    """Room for `tensors` inputs of a tile: 8 columns of each of a lane's rows of each input, copied there by cp.async.

    Every lane copies its own 16-byte vectors and is the only one to read them, so waiting for its own copies is enough and
    no barrier is needed. Vector i of all threads lies together: neighbouring lanes use neighbouring banks.
    """

    tile: WarpTile
    access: RowAccess
    tensors: int

    @property
    def vectors(self) -> int:
        """16-byte vectors of 8 columns."""
        return VECTOR * self.access.element_bits // 128

    @property
    def bytes(self) -> int:
        """Of one stage of a CTA."""
        return self.tensors * self.tile.steps * self.vectors * 16 * self.tile.threads

    def copy(
        self, stage: cute.Pointer, tensor: int, rows: Sequence[cute.Pointer], valid: Sequence[Boolean]
    ) -> None:
        """Begin to copy this lane's 8 columns of its rows; zeros, and no access, where not valid."""
        for step, (row, there) in enumerate(zip(rows, valid, strict=True)):
            for i in range(self.vectors):
                ptx.copy_async(self._at(stage, tensor, step, i), row + 16 * i, there)

    def row(self, stage: cute.Pointer, tensor: int, step: int) -> list[Any]:
        """What `RowAccess.load` gives for one row, once the copies have arrived."""
        words = []
        for i in range(self.vectors):
            words += load_shared(self._at(stage, tensor, step, i), 4)
        return words if self.access.element_bits == 16 else [w.bitcast(Float32) for w in words]

    def rows(self, stage: cute.Pointer, tensor: int) -> Rows:
        """All rows of one input."""
        return self.access.as_rows([self.row(stage, tensor, s) for s in range(self.tile.steps)])

    def values(self, stage: cute.Pointer, tensor: int, step: int) -> Sequence[Any]:
        """Eight Float32 of one row."""
        return self.access.as_rows([self.row(stage, tensor, step)]).values(0)

    def _at(self, stage: cute.Pointer, tensor: int, step: int, i: int) -> cute.Pointer:
        vector = (tensor * self.tile.steps + step) * self.vectors + i
        return stage + (vector * 16 * self.tile.threads + Int32(ca.thread_idx()[0]) * 16)
