"""One message from every rank to every rank through the mailboxes, in one round or several.

A message longer than its slab goes in rounds. Each header says how many rounds its sender needs, so after the
first one all ranks know the largest number, and do that many.

With few tokens an exchange takes as long as its Python, hence few calls per peer: rows are then gathered for all
peers at once and cut into messages; many rows are gathered straight into the peers' memory. For the same reason
numbers are compared here in place of calls to min and max.

Legend: M rows sent, R rows received, D elements of a row, K slots beside a row, N ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moe_runtime.dispatch.mailbox import HEADER_BYTES, Call, Mailboxes
from moe_runtime.dispatch.row_bytes import FEW_BYTES, byte_rows, copy_many
from moe_runtime.dispatch.rows import starts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    from moe_runtime.dispatch.peer_store import PeerStore
    from moe_runtime.dispatch.rows import Int32Array, Int64Array, Traffic

DISPATCH, COMBINE, SHARE = 1, 2, 3


class Transfer:
    """Posts its first round at once. x must not change until it has finished."""

    def __init__(
        self,
        mail: Mailboxes,
        stores_N: Sequence[PeerStore],
        traffic: Traffic,
        x: torch.Tensor,
        index_M: Int64Array,
        slot_MK: Int32Array,
        rows_N: list[int],
        call: Call,
    ) -> None:
        """Sends the rows x[index], grouped by destination as rows_N says, each with its slots."""
        self._mail, self._stores_N, self._traffic, self._call, self._x = mail, stores_N, traffic, call, x
        self._rows_N, self._starts = rows_N, starts(rows_N)
        self._format = form = mail.format(call)
        self._rows, self._index_M = byte_rows(x), index_M
        self._gathered: memoryview | None = None
        if index_M.size * form.row_bytes <= FEW_BYTES:
            self._gathered = _flat_bytes(self._rows.take(index_M, axis=0))
        self._slots = _flat_bytes(slot_MK)
        rank = mail.rank
        if call.kind != SHARE:
            traffic.bytes_local += rows_N[rank] * (form.row_bytes + form.slot_bytes)
        self._rounds = 1
        if self._starts[-1] > form.capacity:
            longest = max([0, *rows_N[:rank], *rows_N[rank + 1 :]])
            self._rounds = max(1, -(-longest // form.capacity))
        self._result: tuple[torch.Tensor, Int32Array, list[int]] | None = None
        self._parity = self._post(0)

    def finish(self) -> tuple[torch.Tensor, Int32Array, list[int]]:
        """Receive: rows by (source rank, order sent), their slots, rows per source. In private memory."""
        if self._result is None:
            self._result = self._receive_all()
        return self._result

    def _post(self, number: int) -> int:
        """Store and publish round `number` for every peer. Returns the parity of its exchange."""
        mail, form, call, traffic = self._mail, self._format, self._call, self._traffic
        parity = mail.next_exchange()
        boxes, capacity, sent = form.outboxes[parity], form.capacity, 0
        begin = number * capacity
        for box in boxes:
            peer, _, slots, rows = box
            total = self._rows_N[peer]
            count = total - begin
            if count > capacity:
                count = capacity
            if count > 0:
                self._store(self._starts[peer] + begin, count, rows, slots, 0, peer)
                sent += count
            mail.signal(box, total, self._rounds, call)
        num_bytes = sent * (form.row_bytes + form.slot_bytes)
        if call.kind == SHARE:
            traffic.control_bytes += num_bytes
        elif call.kind == DISPATCH:
            traffic.bytes_sent += num_bytes
        else:
            traffic.bytes_returned += num_bytes
        traffic.rounds += 1
        traffic.control_bytes += HEADER_BYTES * len(boxes)
        return parity

    def _store(self, at: int, count: int, rows: memoryview, slots: memoryview, to: int, peer: int) -> None:
        """Copy `count` of the rows to send, from number `at`, and their slots; the first becomes number `to` at `peer`."""
        form, gathered = self._format, self._gathered
        size, end, to_end = form.row_bytes, at + count, to + count
        if gathered is None:
            self._stores_N[peer].gather(self._rows, self._index_M[at:end], rows[to * size : to_end * size])
        else:
            rows[to * size : to_end * size] = gathered[at * size : end * size]
        width = form.slot_bytes
        if width:
            slots[to * width : to_end * width] = self._slots[at * width : end * width]

    def _receive_all(self) -> tuple[torch.Tensor, Int32Array, list[int]]:
        mail, call, form, rank = self._mail, self._call, self._format, self._mail.rank
        inbox, capacity = form.inboxes[self._parity], form.capacity
        size, width = form.row_bytes, form.slot_bytes
        # What this rank keeps is as many rows as it sends to itself; the peers' headers tell the rest.
        rows_N, rounds = list(self._rows_N), self._rounds
        for box in inbox:
            rows_N[box.peer], theirs = mail.receive(box, call)
            if theirs > rounds:
                rounds = theirs
        place = starts(rows_N)
        received = self._x.new_empty(place[-1], call.row_elements)
        received_slots = np.empty((place[-1], call.topk), dtype=np.int32)
        rows, slots = _flat_bytes(byte_rows(received)), _flat_bytes(received_slots)
        if rows_N[rank]:
            self._store(self._starts[rank], rows_N[rank], rows, slots, place[rank], rank)
        for number in range(rounds):
            if number:
                inbox = form.inboxes[self._post(number)]
                for box in inbox:
                    mail.receive(box, call)
            begin = number * capacity
            for peer, _, their_slots, their_rows in inbox:
                count = rows_N[peer] - begin
                if count > capacity:
                    count = capacity
                if count <= 0:
                    continue
                at, end, num_bytes = place[peer] + begin, place[peer] + begin + count, count * size
                if num_bytes <= FEW_BYTES:
                    rows[at * size : end * size] = their_rows[:num_bytes]
                else:
                    copy_many(their_rows[:num_bytes], rows[at * size : end * size])
                if width:
                    slots[at * width : end * width] = their_slots[: count * width]
        return received, received_slots, rows_N


def _flat_bytes(rows: npt.NDArray[Any]) -> memoryview:
    return rows.data.cast("B") if rows.size else memoryview(b"")
