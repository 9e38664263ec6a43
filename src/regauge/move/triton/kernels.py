"""Two kernels: relayout, with or without a conversion, and conversion with scales that are computed from the values.

A program moves a block of rows times columns of one `Tiles`. What a row and a column is, `schedule` decides; the
kernels read it from a small table. `axes` is int64[row axes + column axes, 6], innermost axis first. Each axis has a
count, a padded count (its steps in the flattened index: those beyond the count are masked) and the bytes from one
index to the next in the source, the target, the source's scales and the target's. What remains of a row's
index after its axes is the tile; `src`, `dst`, `src_scale` and `dst_scale` are its addresses, int64[tiles].

Only what Triton 3.2 has: loads, stores, integers, bit casts, and a maximum over a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regauge.move.triton.formats import (
    bits_of,
    decode,
    decode_scale,
    encode,
    encode_scale,
    float_of,
    product,
    quotient,
    round_to,
)


@triton.jit
def offset(
    index: tl.tensor, axes: tl.tensor, first: tl.constexpr, count: tl.constexpr, operand: tl.constexpr
) -> tl.tensor:
    """Return the bytes from the start of a tile to `index` (int32), flattened over `count` axes."""
    total = index.to(tl.int64) * 0
    for k in tl.static_range(first, first + count):
        n = tl.load(axes + k * 6 + 1).to(tl.int32)
        total += (index % n).to(tl.int64) * tl.load(axes + k * 6 + operand)
        index = index // n
    return total


@triton.jit
def row_addresses(
    row: tl.tensor, here: tl.tensor, bases: tl.tensor, axes: tl.tensor, row_axes: tl.constexpr, operand: tl.constexpr
) -> tl.tensor:
    """Return the addresses at which rows begin for one operand, int64[rows, 1]."""
    tile = row
    for k in tl.static_range(row_axes):
        tile = tile // tl.load(axes + k * 6 + 1).to(tl.int32)
    begin = tl.load(bases + tile, mask=here, other=0)
    return (begin + offset(row, axes, 0, row_axes, operand))[:, None]


@triton.jit
def rows_present(row: tl.tensor, rows: tl.tensor, axes: tl.tensor, row_axes: tl.constexpr) -> tl.tensor:
    """Return which rows there are. Only the innermost row axis is ever padded."""
    here = row < rows
    if row_axes:
        here &= row % tl.load(axes + 1).to(tl.int32) < tl.load(axes).to(tl.int32)
    return here


@triton.jit
def pointer_to(address: tl.tensor, size: tl.constexpr) -> tl.tensor:
    """Return int64 addresses as pointers to integers of `size` bytes."""
    if size == 1:
        pointer = address.to(tl.pointer_type(tl.uint8))
    elif size == 2:
        pointer = address.to(tl.pointer_type(tl.int16))
    elif size == 4:
        pointer = address.to(tl.pointer_type(tl.int32))
    else:
        pointer = address.to(tl.pointer_type(tl.int64))
    return pointer


@triton.jit
def _hinted(row_at: tl.tensor, column_at: tl.tensor, size: tl.constexpr, group: tl.constexpr, down: tl.constexpr,
            align: tl.constexpr) -> tl.tensor:  # fmt: skip
    """Return pointers that the compiler knows to lie side by side in groups, so that it moves vectors.

    It takes the hint on a sum of pointer and offset; on a pointer made of a number Triton 3.2 forgets it.
    """
    if size == 1:
        pointer = pointer_to(row_at, 1) + column_at
    elif size == 2:
        pointer = pointer_to(row_at, 2) + (column_at >> 1)
    elif size == 4:
        pointer = pointer_to(row_at, 4) + (column_at >> 2)
    else:
        pointer = pointer_to(row_at, 8) + (column_at >> 3)
    if down:
        pointer = tl.max_contiguous(tl.multiple_of(pointer, [align, size]), [group, 1])
    else:
        pointer = tl.max_contiguous(tl.multiple_of(pointer, [size, align]), [1, group])
    return pointer


@triton.jit
def _mask(here: tl.tensor, there: tl.tensor, group: tl.constexpr, down: tl.constexpr) -> tl.tensor:
    """Return which elements there are, rows `here` and columns `there`; groups are there whole or not at all."""
    mask = here[:, None] & there[None, :]
    if down:
        mask = tl.max_constancy(mask, [group, 1])
    else:
        mask = tl.max_constancy(mask, [1, group])
    return mask


@triton.jit
def _bytes(address: tl.tensor, mask: tl.tensor, size: tl.constexpr) -> tl.tensor:
    code = tl.load(pointer_to(address, 1), mask=mask, other=0).to(tl.int32)
    for k in tl.static_range(1, size):
        code |= tl.load(pointer_to(address + k, 1), mask=mask, other=0).to(tl.int32) << (8 * k)
    return code


@triton.jit
def read(row_at: tl.tensor, column_at: tl.tensor, here: tl.tensor, there: tl.tensor, size: tl.constexpr,
         group: tl.constexpr, down: tl.constexpr, align: tl.constexpr) -> tl.tensor:  # fmt: skip
    """Load codes: int32, zero above the element's bits (words of 8 bytes: int64).

    Elements lie at `row_at`, int64[rows, 1], plus `column_at`, int64[1, columns]. `align` 0: at any address.
    """
    mask = _mask(here, there, group, down)
    if align == 0:
        code = _bytes(row_at + column_at, mask, size)
    else:
        code = tl.load(_hinted(row_at, column_at, size, group, down, align), mask=mask, other=0)
        if size == 1:
            code = code.to(tl.int32)
        elif size == 2:
            code = code.to(tl.int32) & 0xFFFF
    return code


@triton.jit
def write(row_at: tl.tensor, column_at: tl.tensor, code: tl.tensor, here: tl.tensor, there: tl.tensor,
          size: tl.constexpr, group: tl.constexpr, down: tl.constexpr, align: tl.constexpr) -> None:  # fmt: skip
    """Store codes, or words of 8 bytes, where `read` would load them."""
    mask = _mask(here, there, group, down)
    if align == 0:
        for k in tl.static_range(size):
            tl.store(pointer_to(row_at + column_at + k, 1), ((code >> (8 * k)) & 0xFF).to(tl.uint8), mask=mask)
    else:
        pointer = _hinted(row_at, column_at, size, group, down, align)
        if size == 1:
            tl.store(pointer, code.to(tl.uint8), mask=mask)
        elif size == 2:
            tl.store(pointer, code.to(tl.int16), mask=mask)
        else:
            tl.store(pointer, code, mask=mask)


@triton.jit
def _read_scale(address: tl.tensor, mask: tl.tensor, size: tl.constexpr, align: tl.constexpr) -> tl.tensor:
    """Load scales: float32 (`size` 4) or float8_e8m0fnu (1). `align` 0: they lie at any address."""
    if align == 0:
        code = _bytes(address, mask, size)
    else:
        code = tl.load(pointer_to(address, size), mask=mask, other=0).to(tl.int32)
    return decode_scale(code, size)


@triton.jit
def _write_scale(address: tl.tensor, scale: tl.tensor, mask: tl.tensor, size: tl.constexpr,
                 align: tl.constexpr) -> None:  # fmt: skip
    code = encode_scale(scale, size)
    if align == 4:
        tl.store(pointer_to(address, size), code, mask=mask)
    else:
        for k in tl.static_range(size):
            tl.store(pointer_to(address + k, 1), ((code >> (8 * k)) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def _values(row_at: tl.tensor, column_at: tl.tensor, scale: tl.tensor, here: tl.tensor, there: tl.tensor,
            dtype: tl.constexpr, size: tl.constexpr, group: tl.constexpr, down: tl.constexpr, align: tl.constexpr,
            scaled: tl.constexpr, nan_bits: tl.constexpr) -> tl.tensor:  # fmt: skip
    """Return values in float32, and which of the codes made of them are negative. `scale` counts when `scaled`."""
    wide = decode(read(row_at, column_at, here, there, size, group, down, align), dtype)
    value = float_of(wide)
    negative = wide < 0
    if scaled:
        value = product(value, scale, nan_bits)
        negative = negative ^ (bits_of(scale) < 0)
    return value, negative


@triton.jit
def _codes(value: tl.tensor, negative: tl.tensor, scale: tl.tensor, dtype: tl.constexpr, scaled: tl.constexpr,
           rule: tl.constexpr, src_dtype: tl.constexpr, nan_bits: tl.constexpr) -> tl.tensor:  # fmt: skip
    """Return the codes of values. `scale` counts when `scaled`."""
    if scaled:
        if rule == "reciprocal":
            one = float_of(bits_of(scale) * 0 + 0x3F800000)
            value = product(value, quotient(one, scale, nan_bits), nan_bits)
        else:
            value = quotient(value, scale, nan_bits)
        if rule == "divide_source":
            value = float_of(round_to(bits_of(value), src_dtype))
        negative = negative ^ (bits_of(scale) < 0)
    return encode(bits_of(value), negative, dtype)


@triton.jit(do_not_specialize=["rows", "columns"])
def relayout(axes: tl.tensor, src: tl.tensor, dst: tl.tensor, src_scale: tl.tensor, dst_scale: tl.tensor,
             rows: tl.tensor, columns: tl.tensor, row_axes: tl.constexpr, column_axes: tl.constexpr,
             block_rows: tl.constexpr, block_columns: tl.constexpr, src_dtype: tl.constexpr, src_size: tl.constexpr,
             src_group: tl.constexpr, src_down: tl.constexpr, src_align: tl.constexpr, src_scaled: tl.constexpr,
             src_scale_size: tl.constexpr, src_scale_align: tl.constexpr, dst_dtype: tl.constexpr,
             dst_size: tl.constexpr, dst_group: tl.constexpr, dst_down: tl.constexpr, dst_align: tl.constexpr,
             dst_scaled: tl.constexpr, dst_scale_size: tl.constexpr, dst_scale_align: tl.constexpr,
             column_scales: tl.constexpr, rule: tl.constexpr, nan_bits: tl.constexpr) -> None:  # fmt: skip
    """Copy words of `src_size` bytes (src_dtype ""), or convert, with scales that lie in memory if any."""
    across = tl.cdiv(columns, block_columns)
    row = tl.program_id(0) // across * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(0) % across * block_columns + tl.arange(0, block_columns)
    here = rows_present(row, rows, axes, row_axes)
    there = column < columns
    src_at = row_addresses(row, here, src, axes, row_axes, 2)
    dst_at = row_addresses(row, here, dst, axes, row_axes, 3)
    src_in = offset(column, axes, row_axes, column_axes, 2)[None, :]
    dst_in = offset(column, axes, row_axes, column_axes, 3)[None, :]
    if src_dtype == "":
        code = read(src_at, src_in, here, there, src_size, src_group, src_down, src_align)
    else:
        scale_mask = here[:, None]
        from_scale = 1.0
        if src_scaled:
            at = row_addresses(row, here, src_scale, axes, row_axes, 4)
            if column_scales:
                at += offset(column, axes, row_axes, column_axes, 4)[None, :]
                scale_mask = here[:, None] & there[None, :]
            from_scale = _read_scale(at, scale_mask, src_scale_size, src_scale_align)
        to_scale = 1.0
        if dst_scaled:
            at = row_addresses(row, here, dst_scale, axes, row_axes, 5)
            if column_scales:
                at += offset(column, axes, row_axes, column_axes, 5)[None, :]
                scale_mask = here[:, None] & there[None, :]
            to_scale = _read_scale(at, scale_mask, dst_scale_size, dst_scale_align)
        value, negative = _values(src_at, src_in, from_scale, here, there, src_dtype, src_size, src_group, src_down,
                                  src_align, src_scaled, nan_bits)  # fmt: skip
        code = _codes(value, negative, to_scale, dst_dtype, dst_scaled, rule, src_dtype, nan_bits)
    write(dst_at, dst_in, code, here, there, dst_size, dst_group, dst_down, dst_align)


@triton.jit
def _top(value: tl.tensor, here: tl.tensor, there: tl.tensor) -> tl.tensor:
    """Return the bits of each row's largest magnitude, int32[rows, 1]: integers order floats, and put NaN last."""
    mask = here[:, None] & there[None, :]
    return tl.max(tl.where(mask, bits_of(value) & 0x7FFFFFFF, 0), axis=1)[:, None]


@triton.jit
def _computed(top: tl.tensor, most: tl.constexpr, floor: tl.constexpr, pow2: tl.constexpr) -> tl.tensor:
    """Return rows' scales from the bits of their largest magnitudes; `most` and `floor` are bits, too."""
    finite = tl.minimum(top, 0x7F7FFFFF)
    bits = bits_of(tl.math.div_rn(float_of(finite), float_of(finite * 0 + most)))
    bits = tl.maximum(bits, floor)
    if pow2:
        bits = (bits + 0x7FFFFF) & 0x7F800000
    return float_of(bits)


@triton.jit(do_not_specialize=["rows", "columns"])
def quantize(axes: tl.tensor, src: tl.tensor, dst: tl.tensor, src_scale: tl.tensor, dst_scale: tl.tensor,
             rows: tl.tensor, columns: tl.tensor, row_axes: tl.constexpr, column_axes: tl.constexpr,
             block_rows: tl.constexpr, block_columns: tl.constexpr, src_dtype: tl.constexpr, src_size: tl.constexpr,
             src_group: tl.constexpr, src_down: tl.constexpr, src_align: tl.constexpr, src_scaled: tl.constexpr,
             src_scale_size: tl.constexpr, src_scale_align: tl.constexpr, dst_dtype: tl.constexpr,
             dst_size: tl.constexpr, dst_group: tl.constexpr, dst_down: tl.constexpr, dst_align: tl.constexpr,
             dst_scale_size: tl.constexpr, dst_scale_align: tl.constexpr, rule: tl.constexpr, most: tl.constexpr,
             floor: tl.constexpr, pow2: tl.constexpr, blocks: tl.constexpr) -> None:  # fmt: skip
    """Convert to 8 bits and store each row's scale, computed from its values. `most` and `floor`: bits of float32.

    A row is `blocks` blocks wide; if that is more than one, it is read twice.
    """
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    here = rows_present(row, rows, axes, row_axes)
    src_at = row_addresses(row, here, src, axes, row_axes, 2)
    dst_at = row_addresses(row, here, dst, axes, row_axes, 3)
    scale_at = row_addresses(row, here, dst_scale, axes, row_axes, 5)
    from_scale = 1.0
    if src_scaled:
        at = row_addresses(row, here, src_scale, axes, row_axes, 4)
        from_scale = _read_scale(at, here[:, None], src_scale_size, src_scale_align)
    column = tl.arange(0, block_columns)
    if blocks == 1:
        there = column < columns
        src_in = offset(column, axes, row_axes, column_axes, 2)[None, :]
        value, negative = _values(src_at, src_in, from_scale, here, there, src_dtype, src_size, src_group, src_down,
                                  src_align, src_scaled, False)  # fmt: skip
        scale = _computed(_top(value, here, there), most, floor, pow2)
        code = _codes(value, negative, scale, dst_dtype, True, rule, src_dtype, False)
        dst_in = offset(column, axes, row_axes, column_axes, 3)[None, :]
        write(dst_at, dst_in, code, here, there, dst_size, dst_group, dst_down, dst_align)
    else:
        top = tl.zeros([block_rows, 1], tl.int32)
        for start in range(0, blocks * block_columns, block_columns):
            there = start + column < columns
            src_in = offset(start + column, axes, row_axes, column_axes, 2)[None, :]
            value, negative = _values(src_at, src_in, from_scale, here, there, src_dtype, src_size, src_group, src_down,
                                      src_align, src_scaled, False)  # fmt: skip
            top = tl.maximum(top, _top(value, here, there))
        scale = _computed(top, most, floor, pow2)
        for start in range(0, blocks * block_columns, block_columns):
            there = start + column < columns
            src_in = offset(start + column, axes, row_axes, column_axes, 2)[None, :]
            value, negative = _values(src_at, src_in, from_scale, here, there, src_dtype, src_size, src_group, src_down,
                                      src_align, src_scaled, False)  # fmt: skip
            code = _codes(value, negative, scale, dst_dtype, True, rule, src_dtype, False)
            dst_in = offset(start + column, axes, row_axes, column_axes, 3)[None, :]
            write(dst_at, dst_in, code, here, there, dst_size, dst_group, dst_down, dst_align)
    _write_scale(scale_at, scale, here[:, None], dst_scale_size, dst_scale_align)
