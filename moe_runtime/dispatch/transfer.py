"""One message from every rank to every rank through the mailboxes, in one round or several.

A message longer than its slab goes in rounds. Each header says how many rounds its sender needs, so after the
first one all ranks know the largest number, and do that many.

It runs in each layer of a step with few tokens, where its time is that of its Python: hence numpy, and no more calls per
peer than needed.

Legend: M rows sent, R rows received, C rows that a slab holds, D elements of a row, K slots beside a row, N ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moe_runtime.dispatch.mailbox import HEADER_BYTES, Call, Header, Mailboxes
from moe_runtime.dispatch.row_arrays import copy_rows, gather_rows, row_array
from moe_runtime.dispatch.rows import starts

if TYPE_CHECKING:
    import torch

    from moe_runtime.dispatch.row_arrays import RowArray
    from moe_runtime.dispatch.rows import Int32Array, Int64Array, Traffic

DISPATCH, COMBINE = 1, 2


class Transfer:
    """Posts its first round at once. x must not change until it has finished."""

    def __init__(
        self,
        mail: Mailboxes,
        traffic: Traffic,
        x: torch.Tensor,
        index_M: Int64Array | None,
        slot_MK: Int32Array,
        rows_N: list[int],
        call: Call,
    ) -> None:
        """Sends the rows x[index], or x itself, grouped by destination as rows_N says, each with its slots."""
        self._mail, self._traffic, self._call = mail, traffic, call
        self._x, self._rows, self._index_M, self._slot_MK = x, row_array(x), index_M, slot_MK
        self._rows_N, self._starts = rows_N, starts(rows_N)
        self._format = mail.format(call)
        capacity = self._format.capacity
        self._rounds = max([1, *(-(-rows_N[box.peer] // capacity) for box in self._format.outboxes[0])])
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
        for box in boxes:
            total = self._rows_N[box.peer]
            begin = min(total, number * capacity)
            count = min(total - begin, capacity)
            if count:
                at = self._starts[box.peer] + begin
                sent += self._store(at, count, box.rows_CD[:count], box.slots_CK[:count])
            self._mail.signal(box.peer, Header(total, self._rounds), self._call)
        self._traffic.rounds += 1
        self._traffic.control_bytes += HEADER_BYTES * len(boxes)
        if self._call.kind == DISPATCH:
            self._traffic.bytes_sent += sent
        else:
            self._traffic.bytes_returned += sent
        return parity

    def _store(self, at: int, count: int, rows_CD: RowArray, slots_CK: Int32Array) -> int:
        """Copy `count` of the rows to send, from number `at`, and their slots. Returns the bytes."""
        if self._index_M is None:
            copy_rows(self._rows[at : at + count], rows_CD)
        else:
            gather_rows(self._rows, self._index_M[at : at + count], rows_CD)
        slots_CK[:] = self._slot_MK[at : at + count]
        return rows_CD.nbytes + slots_CK.nbytes

    def _receive_all(self) -> tuple[torch.Tensor, Int32Array, list[int]]:
        mail, call, rank = self._mail, self._call, self._mail.rank
        inbox = self._format.inboxes[self._parity]
        headers = [mail.receive(box.peer, call) for box in inbox]
        rounds = max([self._rounds, *(header.rounds for header in headers)])
        rows_N = list(self._rows_N)
        # What this rank keeps is as many rows as it sends to itself; the peers' headers tell the rest.
        for box, header in zip(inbox, headers, strict=True):
            rows_N[box.peer] = header.total_rows
        place = starts(rows_N)
        received = self._x.new_empty(place[-1], self._x.shape[1])
        rows, slots = row_array(received), np.empty((place[-1], call.topk), dtype=np.int32)
        if rows_N[rank]:
            own = slice(place[rank], place[rank + 1])
            self._store(self._starts[rank], rows_N[rank], rows[own], slots[own])
        for number in range(rounds):
            if number:
                inbox = self._format.inboxes[self._post(number)]
                for box in inbox:
                    mail.receive(box.peer, call)
            begin = number * self._format.capacity
            for box in inbox:
                count = min(rows_N[box.peer] - begin, self._format.capacity)
                if count > 0:
                    at = place[box.peer] + begin
                    copy_rows(box.rows_CD[:count], rows[at : at + count])
                    slots[at : at + count] = box.slots_CK[:count]
        return received, slots, rows_N
