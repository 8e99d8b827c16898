"""A counting sort without exchange between programs: each one counts what lies before its slot, then places its own pairs."""

import triton.language as tl

from moe_runtime.triton_support import jit


@jit(do_not_specialize=["num_pairs", "num_slots"])
def group_kernel(slot_ptr, pair_ptr, position_ptr, num_rows_ptr, num_pairs, num_slots, BLOCK: tl.constexpr):
    """One program per slot, and a last one for the pairs with slot -1. Reads the slots twice, the second time from cache."""
    mine = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        slot = tl.load(slot_ptr + start + lane, mask=start + lane < num_pairs, other=-1)
        # A slot of -1 is before none, since it comes last.
        before += ((slot >= 0) & (slot < mine)).to(tl.int32)
    first = tl.sum(before, axis=0)
    end = first
    for start in range(0, num_pairs, BLOCK):
        pair = start + lane
        live = pair < num_pairs
        slot = tl.load(slot_ptr + pair, mask=live, other=-1)
        is_mine = live & (tl.where(slot >= 0, slot, num_slots) == mine)
        place = end + tl.cumsum(is_mine.to(tl.int32), axis=0) - 1
        tl.store(pair_ptr + place, pair.to(tl.int64), mask=is_mine)
        position = tl.where(mine < num_slots, place, -1)
        tl.store(position_ptr + pair, position.to(tl.int64), mask=is_mine)
        end += tl.sum(is_mine.to(tl.int32), axis=0)
    if mine < num_slots:
        tl.store(num_rows_ptr + mine, (end - first).to(tl.int64))
