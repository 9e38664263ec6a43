"""The kernel that digests rows where they lie, or while it copies them: what `regauge.plan.digest` defines.

It works on lanes of 8 bytes: two of the digest's words. Lanes are put together from units, the largest pieces that lie
side by side and aligned everywhere. The table `axes` is as in `kernels`, with the steps of row keys and token keys in
the places of scales; columns are units, in the digest's order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regauge.move.triton.kernels import offset, pointer_to, read, row_addresses, rows_present, write


@triton.jit
def _add(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Add numbers below the prime 2^64 - 59, modulo it. A carry out of 64 bits is worth 59, and so is lacking only 59."""
    total = a + b
    total = tl.where(total < a, total + 59, total)
    wrapped = total + 59
    return tl.where(wrapped < 59, wrapped, total)


@triton.jit
def _reduced(a: tl.tensor) -> tl.tensor:
    wrapped = a + 59
    return tl.where(wrapped < 59, wrapped, a)


@triton.jit
def _multiply(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Multiply any 64-bit numbers, modulo 2^64 - 59: the high half counts 59 times, and so does what that carries."""
    high = tl.umulhi(a, b)
    fold = high * 59
    carried = tl.umulhi(high, high * 0 + 59) * 59
    return _add(_add(_reduced(a * b), _reduced(fold)), carried)


@triton.jit
def _key(address: tl.tensor, here: tl.tensor) -> tl.tensor:
    return tl.load(pointer_to(address, 8), mask=here[:, None], other=0).to(tl.uint64, bitcast=True)


@triton.jit
def _pairs(lane: tl.tensor, lanes: tl.tensor, words: tl.tensor, low: tl.tensor, high: tl.tensor,
           shift: tl.constexpr) -> tl.tensor:  # fmt: skip
    """Return the sum over a row's lanes of (low word + its key) * (high word + its key), uint64[rows, 1]."""
    inside = lane < lanes
    first = tl.load(words + 2 * lane + shift, mask=inside, other=0).to(tl.uint32, bitcast=True)
    second = tl.load(words + 2 * lane + shift + 1, mask=inside, other=0).to(tl.uint32, bitcast=True)
    terms = (low + first[None, :]).to(tl.uint64) * (high + second[None, :]).to(tl.uint64)
    return tl.sum(tl.where(inside[None, :], terms, terms * 0), axis=1)[:, None]


@triton.jit(do_not_specialize=["rows", "units", "lanes"])
def digest(axes: tl.tensor, src: tl.tensor, dst: tl.tensor, row_keys: tl.tensor, token_keys: tl.tensor,
           words: tl.tensor, sums: tl.tensor, rows: tl.tensor, units: tl.tensor, lanes: tl.tensor,
           row_axes: tl.constexpr, column_axes: tl.constexpr, block_rows: tl.constexpr, block_lanes: tl.constexpr,
           unit: tl.constexpr, src_group: tl.constexpr, src_align: tl.constexpr, dst_group: tl.constexpr,
           dst_align: tl.constexpr, copies: tl.constexpr) -> None:  # fmt: skip
    """Add the digest of all rows to `sums`, int64[2]: the sum of its low 32-bit halves, and that of its high ones.

    `words` are the key words as int32. With `copies` rows are written to the target, too.
    """
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    here = rows_present(row, rows, axes, row_axes)
    src_at = row_addresses(row, here, src, axes, row_axes, 2)
    dst_at = row_addresses(row, here, dst, axes, row_axes, 3)
    lane = tl.arange(0, block_lanes)
    value = tl.zeros([block_rows, block_lanes], tl.int64)
    for k in tl.static_range(8 // unit):
        column = lane * (8 // unit) + k
        there = column < units
        src_in = offset(column, axes, row_axes, column_axes, 2)[None, :]
        piece = read(src_at, src_in, here, there, unit, src_group, False, src_align)
        if copies:
            dst_in = offset(column, axes, row_axes, column_axes, 3)[None, :]
            write(dst_at, dst_in, piece, here, there, unit, dst_group, False, dst_align)
        piece = piece.to(tl.int64)
        if unit == 4:
            piece = piece & 0xFFFFFFFF
        value |= piece << (8 * unit * k)
    low = value.to(tl.uint32)
    high = (value >> 32).to(tl.uint32)
    x0 = _pairs(lane, lanes, words, low, high, 0)
    x1 = _pairs(lane, lanes, words, low, high, 2)
    key_at = row_addresses(row, here, row_keys, axes, row_axes, 4)
    hashed = _add(_multiply(_key(key_at, here), x0), _multiply(_key(key_at + 8, here), x1))
    hashed = _add(hashed, _key(key_at + 16, here))
    hashed = _multiply(hashed, _key(row_addresses(row, here, token_keys, axes, row_axes, 5), here))
    hashed = tl.where(here[:, None], hashed, hashed * 0)
    tl.atomic_add(sums, tl.sum(tl.sum((hashed & 0xFFFFFFFF).to(tl.int64), axis=1), axis=0))
    tl.atomic_add(sums + 1, tl.sum(tl.sum((hashed >> 32).to(tl.int64), axis=1), axis=0))
