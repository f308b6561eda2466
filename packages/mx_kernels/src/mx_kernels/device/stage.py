"""What waits in shared memory: inputs until registers are free for them, results until whole rows of them can be stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
import cutlass.cute.arch as ca
from cutlass import Boolean, Float32, Int32, Int64, select_

from mx_kernels.device import ptx
from mx_kernels.device.tile import BLOCK, VECTOR, RowAccess, Rows, Target, WarpTile, load_shared


@dataclass(frozen=True)
class Lookahead:
    """Room for `tensors` inputs of a tile: 8 columns of each of a lane's rows of each input, copied there by cp.async.

    Where every lane copies its own 16-byte vectors it is the only one to read them: waiting for its own copies is enough and
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
        self,
        stage: cute.Pointer,
        tensor: int,
        rows: Sequence[cute.Pointer],
        valid: Sequence[Boolean],
        thread: Int32 | None = None,
    ) -> None:
        """Begin to copy 8 columns of the rows of this thread, or of `thread`; zeros, and no access, where not valid."""
        for step, (row, there) in enumerate(zip(rows, valid, strict=True)):
            for i in range(self.vectors):
                ptx.copy_async(self._at(stage, tensor, step, i, thread), row + 16 * i, there)

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

    def put(self, stage: cute.Pointer, tensor: int, step: int, values: Sequence[Any]) -> None:
        """Eight results, rounded to the element type, in place of one of this thread's rows."""
        words = self.access.words(values)
        for i in range(self.vectors):
            at = self._at(stage, tensor, step, i)
            ptx.store_words(at, words[4 * i : 4 * i + 4], Boolean(True), "shared")

    def flush(
        self,
        stage: cute.Pointer,
        tensor: int,
        out: cute.Pointer,
        first: tuple[Int32, Int32],
        end: tuple[Int32, Int32],
        pitch: Int32,
    ) -> None:
        """After a barrier: (r, c) of a tile that was `put` to out + (first + (r, c)) if that is before `end`.

        `out` points to bytes; `pitch` elements a row.
        """
        share, size = self.tile.whole_rows(), self.access.element_bits // 8
        row, col = first[0] + share.row, first[1] + share.col
        limit = Int32(select_(col < end[1], end[0], Int32(0)))
        for step in range(self.tile.steps):
            at = row + step * self.tile.stride
            to = out + (Int64(at) * pitch + col) * size
            for i in range(self.vectors):
                words = load_shared(self._at(stage, tensor, step, i, share.thread), 4)
                ptx.store_words(to + 16 * i, words, at < limit)

    def _at(
        self, stage: cute.Pointer, tensor: int, step: int, i: int, thread: Int32 | None = None
    ) -> cute.Pointer:
        vector = (tensor * self.tile.steps + step) * self.vectors + i
        thread = Int32(ca.thread_idx()[0]) if thread is None else thread
        return stage + (vector * 16 * self.tile.threads + thread * 16)


@dataclass(frozen=True)
class CodeStage(Target):
    """One orientation's codes of a band of 32 rows. A thread puts its own there; after a barrier whole rows are stored.

    A warp's own rows are a quarter of a 128-byte line: stored one by one they keep L2 busy, not memory. Threads of warps
    side by side are swapped, so that 8 lanes that read a row, 16 bytes each, use different banks.
    """

    smem: cute.Pointer
    tile: WarpTile

    def __post_init__(self):
        assert self.tile.height == BLOCK
        assert self.tile.lanes == self.tile.across == 4

    @staticmethod
    def bytes_of(tile: WarpTile) -> int:
        """Size."""
        return tile.height * tile.cols

    def store(self, access, step, place, codes, exists) -> None:
        """See Target; of this thread, whether or not the row exists."""
        ptx.store_words(self._at(step, Int32(ca.thread_idx()[0])), codes, Boolean(True), "shared")

    def flush(
        self, out: cute.Pointer, first: tuple[Int32, Int32], end: tuple[Int32, Int32], pitch: Int32
    ) -> None:
        """(r, c) of the band to out + (first + (r, c)) if that is before `end`; `pitch` bytes a row. Two steps at a time."""
        tile, thread = self.tile, Int32(ca.thread_idx()[0])
        across, of_warp = tile.cols // 16, tile.lanes // 2
        pair, row = thread % across, thread // across
        holder = pair // of_warp * 32 + row % tile.stride * tile.lanes + pair % of_warp * 2
        col = first[1] + pair * 16
        limit = Int32(select_(col < end[1], end[0], Int32(0)))
        for step in range(0, tile.steps, 2):
            words = load_shared(self._at(step + row // tile.stride, holder), 4)
            at = first[0] + row + step * tile.stride
            ptx.store_words(out + (Int64(at) * pitch + col), words, at < limit)

    def _at(self, step: Any, thread: Int32) -> cute.Pointer:
        swapped = thread ^ ((thread >> 5 & 3) * 4)
        return self.smem + (step * (VECTOR * self.tile.threads) + swapped * VECTOR)
