"""One message from every rank to every rank through the mailboxes, in one round or several.

A message longer than its slab goes in rounds. Each header says how many rounds its sender needs, so after the
first one all ranks know the largest number, and do that many.

With few tokens an exchange takes as long as its Python, hence few calls per peer: rows are then gathered for all
peers at once and cut into messages; many rows are gathered straight into the peers' memory.

Legend: M rows sent, R rows received, D elements of a row, K slots beside a row, N ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moe_runtime.dispatch.mailbox import HEADER_BYTES, Call, Mailboxes
from moe_runtime.dispatch.row_bytes import FEW_BYTES, byte_rows, copy_many, gather_many
from moe_runtime.dispatch.rows import starts

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from moe_runtime.dispatch.rows import Int32Array, Int64Array, Traffic

DISPATCH, COMBINE, SHARE = 1, 2, 3


class Transfer:
    """Posts its first round at once. x must not change until it has finished."""

    def __init__(
        self,
        mail: Mailboxes,
        traffic: Traffic,
        x: torch.Tensor,
        index_M: Int64Array,
        slot_MK: Int32Array,
        rows_N: list[int],
        call: Call,
    ) -> None:
        """Sends the rows x[index], grouped by destination as rows_N says, each with its slots."""
        self._mail, self._traffic, self._call, self._x = mail, traffic, call, x
        self._rows_N, self._starts = rows_N, starts(rows_N)
        self._row_bytes, self._slot_bytes = call.row_elements * call.element_bytes, 4 * call.topk
        self._rows, self._index_M = byte_rows(x), index_M
        if call.kind != SHARE:
            traffic.bytes_local += rows_N[mail.rank] * (self._row_bytes + self._slot_bytes)
        self._gathered: memoryview | None = None
        if index_M.size * self._row_bytes <= FEW_BYTES:
            self._gathered = _flat_bytes(self._rows.take(index_M, axis=0))
        self._slots = _flat_bytes(slot_MK)
        self._format = mail.format(call)
        longest = max([0, *rows_N[: mail.rank], *rows_N[mail.rank + 1 :]])
        self._rounds = max(1, -(-longest // self._format.capacity))
        self._result: tuple[torch.Tensor, Int32Array, list[int]] | None = None
        self._parity = self._post(0)

    def finish(self) -> tuple[torch.Tensor, Int32Array, list[int]]:
        """Receive: rows by (source rank, order sent), their slots, rows per source. In private memory."""
        if self._result is None:
            self._result = self._receive_all()
        return self._result

    def _post(self, number: int) -> int:
        """Store and publish round `number` for every peer. Returns the parity of its exchange."""
        parity = self._mail.next_exchange()
        boxes, capacity, sent = self._format.outboxes[parity], self._format.capacity, 0
        begin = number * capacity
        for box in boxes:
            total = self._rows_N[box.peer]
            count = min(total - begin, capacity)
            if count > 0:
                self._store(self._starts[box.peer] + begin, count, box.rows, box.slots, 0)
                sent += count
            self._mail.signal(box, total, self._rounds, self._call)
        num_bytes = sent * (self._row_bytes + self._slot_bytes)
        if self._call.kind == SHARE:
            self._traffic.control_bytes += num_bytes
        elif self._call.kind == DISPATCH:
            self._traffic.bytes_sent += num_bytes
        else:
            self._traffic.bytes_returned += num_bytes
        self._traffic.rounds += 1
        self._traffic.control_bytes += HEADER_BYTES * len(boxes)
        return parity

    def _store(self, at: int, count: int, rows: memoryview, slots: memoryview, to: int) -> None:
        """Copy `count` of the rows to send, from number `at`, and their slots; the first becomes number `to`."""
        size, width = self._row_bytes, self._slot_bytes
        out = rows[to * size : (to + count) * size]
        if self._gathered is None:
            gather_many(self._rows, self._index_M[at : at + count], out)
        else:
            out[:] = self._gathered[at * size : (at + count) * size]
        if width:
            slots[to * width : (to + count) * width] = self._slots[at * width : (at + count) * width]

    def _receive_all(self) -> tuple[torch.Tensor, Int32Array, list[int]]:
        mail, call, rank = self._mail, self._call, self._mail.rank
        inbox, capacity = self._format.inboxes[self._parity], self._format.capacity
        # What this rank keeps is as many rows as it sends to itself; the peers' headers tell the rest.
        rows_N, rounds = list(self._rows_N), self._rounds
        for box in inbox:
            rows_N[box.peer], theirs = mail.receive(box, call)
            rounds = max(rounds, theirs)
        place = starts(rows_N)
        received = self._x.new_empty(place[-1], call.row_elements)
        received_slots = np.empty((place[-1], call.topk), dtype=np.int32)
        rows, slots = _flat_bytes(byte_rows(received)), _flat_bytes(received_slots)
        if rows_N[rank]:
            self._store(self._starts[rank], rows_N[rank], rows, slots, place[rank])
        size, width = self._row_bytes, self._slot_bytes
        for number in range(rounds):
            if number:
                inbox = self._format.inboxes[self._post(number)]
                for box in inbox:
                    mail.receive(box, call)
            begin = number * capacity
            for box in inbox:
                count = min(rows_N[box.peer] - begin, capacity)
                if count > 0:
                    at = place[box.peer] + begin
                    out = rows[at * size : (at + count) * size]
                    if count * size <= FEW_BYTES:
                        out[:] = box.rows[: count * size]
                    else:
                        copy_many(box.rows[: count * size], out)
                    if width:
                        slots[at * width : (at + count) * width] = box.slots[: count * width]
        return received, received_slots, rows_N


def _flat_bytes(rows: npt.NDArray[Any]) -> memoryview:
    return rows.data.cast("B") if rows.size else memoryview(b"")
