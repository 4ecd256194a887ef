"""Triton kernels of the storage formats. Importing this module requires Triton.

The kernels of the sparse format compare magnitudes. A magnitude (`bits`) consists of the bits of a float without the
sign, interpreted as a 32-bit integer. A row consists of pieces of `length` elements, and `step` is the distance between
pieces. The row length `n` and the distance `stride` between rows are in units of `UNIT` elements, so that the compiler
knows the alignment. The first dimension of each auxiliary tensor is the row index.

Kernels have many parameters, because a kernel receives every pointer, size and constant separately.
"""
# mypy: ignore-errors
# mypy cannot check code that Triton compiles.

import triton
import triton.language as tl


@triton.jit
def _load(row, at, n, step, length, PIECES: tl.constexpr):
    """Load the elements of a row at the indices `at`. Load 0 for indices beyond the end of the row."""
    memory = (at // length).to(tl.int64) * step + at % length if PIECES else at
    return tl.load(row + memory, mask=at < n, other=0)


@triton.jit
def _load_bits(row, at, n, step, length, PIECES: tl.constexpr, LARGEST: tl.constexpr):
    """Load the magnitudes of the elements of a row at the indices `at`.

    For indices after the end of the row, load −1, which is less than all magnitudes.
    """
    return tl.where(at < n, _load(row, at, n, step, length, PIECES).to(tl.int32) & LARGEST, -1)


@triton.jit
def _bisect(low, high, sample, rank):
    """Return the half of the range from `low` to `high` that contains the sample value at `rank` (from 0)."""
    middle = low + (high - low) // 2
    above = (tl.sum((sample <= middle).to(tl.int32)) <= rank) & (low < high)
    return tl.where(above, middle + 1, low), tl.where(above, high, middle)


@triton.jit
def bracket(
    x, state, n, stride, step, length, hop, first, last, EQUAL: tl.constexpr,
    M: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr, PIECES: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Write the values at the ranks `first` and `last` of a subsample to `state` (row, 2).

    The subsample consists of M values that are `hop` elements apart. If a row has fewer than M elements, the subsample
    is padded with −1. For a rank outside the subsample, 0 or `LARGEST` is written. Only the `BITS` highest bits are
    computed. The value at `first` is rounded down, and the value at `last` is rounded up. `EQUAL` means that both ranks
    are equal.
    """
    n, stride = n * UNIT, stride * UNIT
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, M)
    if n > M:
        at = ((at.to(tl.int64) * hop) % n).to(tl.int32)
    sample = _load_bits(x + row * stride, at, n, step, length, PIECES, LARGEST)
    low, high = tl.full((), 0, tl.int32), tl.full((), LARGEST, tl.int32)
    low_2, high_2 = low, high
    for _ in range(BITS):
        low, high = _bisect(low, high, sample, first)
        if not EQUAL:
            low_2, high_2 = _bisect(low_2, high_2, sample, last)
    tl.store(state + 2 * row, low)
    tl.store(state + 2 * row + 1, high if EQUAL else high_2)


@triton.jit
def gather(
    x, state, number, found, offset, candidates, n, stride, step, length, room,
    TILE: tl.constexpr, UNIT: tl.constexpr, PIECES: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Write at most `room` magnitudes per row that are in the range given by `state` to `candidates` (row, room).

    `number` (row,) counts the candidates and must be 0 before the call. For each tile, the kernel writes two counts to
    `found` (row, tile, 2): number of magnitudes above the range and number of candidates in each tile. The index of the
    first candidate of each tile is written to `offset` (row, tile).
    """
    n, stride = n * UNIT, stride * UNIT
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    low, high = tl.load(state + 2 * row), tl.load(state + 2 * row + 1)
    bits = _load_bits(x + row * stride, tile * TILE + tl.arange(0, TILE), n, step, length, PIECES, LARGEST)
    inside = (bits >= low) & (bits <= high)
    so_far = tl.cumsum(inside.to(tl.int32), 0)
    count = tl.max(so_far)
    start = tl.atomic_add(number + row, count, sem="relaxed")
    at = start + so_far - 1
    tl.store(candidates + row * room + at, bits, mask=inside & (at < room))
    own = row * tl.num_programs(1) + tile
    tl.store(found + 2 * own, tl.sum((bits > high).to(tl.int32)))
    tl.store(found + 2 * own + 1, count)
    tl.store(offset + own, start)


@triton.jit
def select(
    x, state, number, found, candidates, threshold, n, stride, step, length, rank, tiles, room, SHORT: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr, PIECES: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Write the magnitude at `rank` to `threshold` (row,).

    The magnitude is selected from the candidates. If the candidates do not contain this rank, or if there are too many
    candidates, the full row is searched.
    """
    n, stride = n * UNIT, stride * UNIT
    row = tl.program_id(0).to(tl.int64)
    low, high = tl.load(state + 2 * row), tl.load(state + 2 * row + 1)
    t = tl.arange(0, TILES)
    above = tl.sum(tl.load(found + 2 * (row * tiles + t), mask=t < tiles, other=0))
    count = tl.load(number + row)
    below = n - above - count
    is_candidate = (below <= rank) & (rank < below + count)
    at = tl.arange(0, SHORT)
    if is_candidate & (count <= SHORT) & (count <= room):
        values = tl.load(candidates + row * room + at, mask=at < count, other=LARGEST)
        while low < high:
            low, high = _bisect(low, high, values, rank - below)
    else:
        low, high = tl.where(is_candidate, low, 0), tl.where(is_candidate, high, LARGEST)
        while low < high:
            middle = low + (high - low) // 2
            counts = tl.zeros((TILE,), tl.int32)
            for tile in range(tl.cdiv(n, TILE)):
                bits = _load_bits(x + row * stride, tile * TILE + tl.arange(0, TILE), n, step, length, PIECES, LARGEST)
                counts += ((bits >= 0) & (bits <= middle)).to(tl.int32)
            up = tl.sum(counts) <= rank
            low, high = tl.where(up, middle + 1, low), tl.where(up, high, middle)
    tl.store(threshold + row, low)


@triton.jit
def count(
    x, state, threshold, number, found, offset, candidates, n, stride, step, length, room,
    GATHERED: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr, PIECES: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Count how many magnitudes of each tile are above `threshold` (row,), and how many equal `threshold`.

    Both counts are written to `found` (row, tile, 2).
    """
    n, stride = n * UNIT, stride * UNIT
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    bound = tl.load(threshold + row)
    own = row * tl.num_programs(1) + tile
    at = tl.arange(0, TILE)
    if GATHERED:
        inside = (bound >= tl.load(state + 2 * row)) & (bound <= tl.load(state + 2 * row + 1))
        if inside & (tl.load(number + row) <= room):
            above, size = tl.load(found + 2 * own), tl.load(found + 2 * own + 1)
            start = row * room + tl.load(offset + own)
            bits = tl.load(candidates + start + at, mask=at < size, other=-2)
        else:
            above = tl.full((), 0, tl.int32)
            bits = _load_bits(x + row * stride, tile * TILE + at, n, step, length, PIECES, LARGEST)
    else:
        above = tl.full((), 0, tl.int32)
        bits = _load_bits(x + row * stride, tile * TILE + at, n, step, length, PIECES, LARGEST)
    tl.store(found + 2 * own, above + tl.sum((bits > bound).to(tl.int32)))
    tl.store(found + 2 * own + 1, tl.sum((bits == bound).to(tl.int32)))


@triton.jit
def write(
    x, threshold, found, values, bitmap, n, stride, step, length, kept,
    TILE: tl.constexpr, TILES: tl.constexpr, UNIT: tl.constexpr,
    PIECES: tl.constexpr, LARGEST: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Write the kept values and the bitmap. All values whose magnitude is above the threshold are kept.

    If the threshold is exact, the first values whose magnitude equals the threshold are also kept, so that `kept`
    values are kept in total. If the threshold is sampled, only the first `kept` of these values are kept in each row.
    """
    n, stride = n * UNIT, stride * UNIT
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    t = tl.arange(0, TILES)
    own = found + row * tiles * 2
    above_of = tl.load(own + 2 * t, mask=t < tiles, other=0)
    equal_of = tl.load(own + 2 * t + 1, mask=t < tile, other=0)
    room = tl.maximum(kept - tl.sum(above_of), 0) if EXACT else 0
    above_before = tl.sum(tl.where(t < tile, above_of, 0))
    equal_before = tl.sum(equal_of)
    at = tile * TILE + tl.arange(0, TILE)
    inside = at < n
    value = _load(x + row * stride, at, n, step, length, PIECES)
    bits = value.to(tl.int32) & LARGEST
    bound = tl.load(threshold + row)
    above, equal = inside & (bits > bound), inside & (bits == bound)
    # One cumulative sum computes both counts, because a tile has fewer than 2¹⁶ elements.
    so_far = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    equal_so_far = equal_before + (so_far >> 16)
    last = above_before + (so_far & 0xFFFF) + tl.minimum(equal_so_far, room)
    keep = (above | (equal & (equal_so_far <= room))) & (last <= kept)
    tl.store(values + row * kept + last - 1, value, mask=keep)
    eight = tl.reshape(keep.to(tl.int32), (TILE // 8, 8)) << tl.arange(0, 8)[None, :]
    byte = tile * (TILE // 8) + tl.arange(0, TILE // 8)
    tl.store(bitmap + row * tl.cdiv(n, 8) + byte, tl.sum(eight, 1).to(tl.uint8), mask=byte < tl.cdiv(n, 8))


@triton.jit
def _load_flags(bitmap, row, tile, n, TILE: tl.constexpr):
    """Load one tile of the bitmap as a tensor of bits (TILE / 8, 8)."""
    byte = tile * (TILE // 8) + tl.arange(0, TILE // 8)
    bytes_ = tl.load(bitmap + row * tl.cdiv(n, 8) + byte, mask=byte < tl.cdiv(n, 8), other=0).to(tl.int32)
    return (bytes_[:, None] >> tl.arange(0, 8)[None, :]) & 1


@triton.jit
def count_flags(bitmap, found, n, TILE: tl.constexpr, UNIT: tl.constexpr):
    """Write the number of set bits of each tile to `found` (row, tile)."""
    n = n * UNIT
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    flags = _load_flags(bitmap, row, tile, n, TILE)
    tl.store(found + row * tl.num_programs(1) + tile, tl.sum(tl.sum(flags, 1)))


@triton.jit
def spread(values, bitmap, found, x, n, kept, TILE: tl.constexpr, TILES: tl.constexpr, UNIT: tl.constexpr):
    """Write the values to x (row, n) at the set bits of the bitmap, and zeros elsewhere."""
    n = n * UNIT
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    t = tl.arange(0, TILES)
    before = tl.sum(tl.load(found + row * tiles + t, mask=t < tile, other=0))
    flags = tl.reshape(_load_flags(bitmap, row, tile, n, TILE), (TILE,))
    offset = before + tl.cumsum(flags, 0) - 1
    value = tl.load(values + row * kept + offset, mask=flags > 0, other=0)
    at = tile * TILE + tl.arange(0, TILE)
    tl.store(x + row * n + at, value.to(x.dtype.element_ty), mask=at < n)


@triton.jit
def convert(x, y, overflow, count, WATCHED: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Convert x to the dtype of y. If `WATCHED` is True, set `overflow` if a finite magnitude exceeds `LARGEST`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, mask=inside, other=0)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)
    if WATCHED:
        magnitude = tl.abs(value)
        beyond = (magnitude > LARGEST) & (magnitude < float("inf"))
        if tl.max(beyond.to(tl.int32)) > 0:
            tl.store(overflow, 1)


@triton.jit
def _noise(at, seed):
    """Return the values of `storage.eight_bits.uniform` at the positions `at`."""
    h = (at + tl.load(seed)).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    h = h ^ (h >> 16)
    return (h >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def quantize(x, low, step, seed, q, count, groups, inner, BLOCK: tl.constexpr):
    """Quantize x to codes that count steps above the `low` value of each group.

    A hash of the position and the seed determines the rounding.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    group = (at // inner) % groups
    scaled = (tl.load(x + at, mask=inside, other=0).to(tl.float32) - tl.load(low + group)) * tl.load(step + group)
    scaled = tl.minimum(tl.maximum(tl.floor(scaled + _noise(at, seed)), 0.0), 255.0)
    tl.store(q + at, scaled.to(tl.uint8), mask=inside)


@triton.jit
def dequantize(q, low, step, x, count, groups, inner, BLOCK: tl.constexpr):
    """Write the values that the codes q represent to x."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    group = (at // inner) % groups
    steps = tl.load(q + at, mask=inside, other=0).to(tl.float32)
    tl.store(x + at, tl.load(low + group) + steps * tl.load(step + group), mask=inside)


@triton.jit
def extremes(x, low, high, rows, groups, inner, share, width, R: tl.constexpr, C: tl.constexpr):
    """Write the extremes of `share` rows and `width` columns of a group to `low` and `high` (part, cut, group)."""
    part, group, cut = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    least, most = tl.full((R, C), float("inf"), tl.float32), tl.full((R, C), float("-inf"), tl.float32)
    stop, end = tl.minimum((part + 1) * share, rows), tl.minimum((cut + 1) * width, inner)
    for first in range(part * share, stop, R):
        r = first + tl.arange(0, R)[:, None]
        for start in range(cut * width, end, C):
            c = start + tl.arange(0, C)[None, :]
            inside = (r < stop) & (c < end)
            value = tl.load(x + (r.to(tl.int64) * groups + group) * inner + c, mask=inside, other=0).to(tl.float32)
            finite = tl.abs(value) < float("inf")  # tl.minimum and tl.maximum ignore NaN
            least = tl.minimum(least, tl.where(inside, tl.where(finite, value, float("-inf")), float("inf")))
            most = tl.maximum(most, tl.where(inside, tl.where(finite, value, float("inf")), float("-inf")))
    own = (part * tl.num_programs(2) + cut) * groups + group
    tl.store(low + own, tl.min(tl.min(least, 1), 0))
    tl.store(high + own, tl.max(tl.max(most, 1), 0))


@triton.jit
def _part(x, group, k, part, length, n, pieces, piece, stride, T: tl.constexpr, W: tl.constexpr):
    """Load part k of T groups, and return the values (T, W), their indices, and a mask of the valid positions."""
    j = tl.arange(0, W)[None, :]
    first = group[:, None] * length
    at = first + k * part + j
    inside = (j < part) & (at < n)
    start = first // piece * stride + first % piece if pieces > 1 else first
    return tl.load(x + start + k * part + j, mask=inside, other=0).to(tl.float32), at, inside


@triton.jit
def group_pack(
    x, seed, codes, ranges, groups, length, part, n, pieces, piece, stride,
    BITS: tl.constexpr, RANDOM: tl.constexpr, PARTS: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Write the codes and ranges of T groups. A group consists of `PARTS` parts of `part` <= W values.

    All codes of a part are stored at the same bit position of different bytes. A part is half of a group with 4 bits, a
    quarter of a group with 2 bits, and an eighth of a group with 3 bits.
    """
    group = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    low, high = tl.full((T,), float("inf"), tl.float32), tl.full((T,), float("-inf"), tl.float32)
    finite = tl.full((T,), 1, tl.int32)
    for k in tl.static_range(PARTS):
        value, at, inside = _part(x, group, k, part, length, n, pieces, piece, stride, T, W)
        real = tl.abs(value) < float("inf")
        finite = tl.minimum(finite, tl.min(real.to(tl.int32), 1))
        low = tl.minimum(low, tl.min(tl.where(inside & real, value, float("inf")), 1))
        high = tl.maximum(high, tl.max(tl.where(inside & real, value, float("-inf")), 1))
    low = tl.where(finite > 0, low, 0.0) + 0.0
    high = tl.where(finite > 0, high, 0.0)
    low_half = low.to(tl.float16)
    if RANDOM:  # the minimum is rounded down, and the step is rounded up
        bits = low_half.to(tl.int16, bitcast=True)
        above = (low_half.to(tl.float32) > low) & (tl.abs(low_half.to(tl.float32)) < float("inf"))
        below = tl.where(bits > 0, bits - 1, bits + 1)
        low_half = tl.where(above, below, bits).to(tl.int16).to(tl.float16, bitcast=True)
    levels = tl.full((T,), 2.0**BITS - 1, tl.float32)
    wide = tl.div_rn(high - low_half.to(tl.float32), levels)
    step_half = tl.where(wide > 0, wide, 0.0).to(tl.float16)
    if RANDOM:
        bits = step_half.to(tl.int16, bitcast=True)
        short = step_half.to(tl.float32) < wide
        step_half = tl.where(short, bits + 1, bits).to(tl.int16).to(tl.float16, bitcast=True)
    low_fits = tl.abs(low_half.to(tl.float32)) < float("inf")
    fits = low_fits & (step_half.to(tl.float32) < float("inf"))
    step = tl.where(fits & (finite > 0), step_half.to(tl.float32), 0.0)
    inverse = tl.where(step > 0, tl.div_rn(tl.full((T,), 1.0, tl.float32), tl.where(step > 0, step, 1.0)), 0.0)
    stored = tl.where(low_fits & (fits == 0), float("inf"), low_half.to(tl.float32))
    stored = tl.where(finite > 0, stored, float("nan"))
    exists = group < groups
    tl.store(ranges + group, stored.to(tl.float16), mask=exists)
    tl.store(ranges + groups + group, step.to(tl.float16), mask=exists)
    base = tl.where(fits, low_half.to(tl.float32), 0.0)
    first, second, third = tl.zeros((T, W), tl.int32), tl.zeros((T, W), tl.int32), tl.zeros((T, W), tl.int32)
    for k in tl.static_range(PARTS):
        value, at, inside = _part(x, group, k, part, length, n, pieces, piece, stride, T, W)
        steps = (tl.where(tl.abs(value) < float("inf"), value, 0.0) - base[:, None]) * inverse[:, None]
        if RANDOM:
            steps += _noise(at, seed)
        else:
            steps += 0.5
        steps = tl.minimum(tl.maximum(tl.floor(steps), 0.0), 2.0**BITS - 1)
        code = tl.where(inside & (inverse > 0)[:, None], steps, 0.0).to(tl.int32)
        if BITS == 3:
            if k % 2 == 0:
                first |= (code & 3) << k
            else:
                second |= (code & 3) << (k - 1)
            third |= (code >> 2) << k
        else:
            first |= code << (k * BITS)
    j = tl.arange(0, W)[None, :]
    here = (j < part) & exists[:, None]
    out = codes + group[:, None] * (length * BITS // 8) + j
    tl.store(out, first.to(tl.uint8), mask=here)
    if BITS == 3:
        tl.store(out + part, second.to(tl.uint8), mask=here)
        tl.store(out + 2 * part, third.to(tl.uint8), mask=here)


@triton.jit
def group_unpack(
    codes, ranges, x, groups, length, part, n,
    BITS: tl.constexpr, PARTS: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Write the values of T groups to x. See `group_pack` for the layout of a group."""
    group = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    exists = group < groups
    low = tl.load(ranges + group, mask=exists, other=0).to(tl.float32)[:, None]
    step = tl.load(ranges + groups + group, mask=exists, other=0).to(tl.float32)[:, None]
    j = tl.arange(0, W)[None, :]
    here = (j < part) & exists[:, None]
    source = codes + group[:, None] * (length * BITS // 8) + j
    first = tl.load(source, mask=here, other=0).to(tl.int32)
    if BITS == 3:
        second = tl.load(source + part, mask=here, other=0).to(tl.int32)
        third = tl.load(source + 2 * part, mask=here, other=0).to(tl.int32)
    for k in tl.static_range(PARTS):
        if BITS == 3:
            code = (first >> k) & 3 if k % 2 == 0 else (second >> (k - 1)) & 3
            code |= ((third >> k) & 1) << 2
        else:
            code = (first >> (k * BITS)) & (2**BITS - 1)
        at = group[:, None] * length + k * part + j
        value = code.to(tl.float32) * step + low
        tl.store(x + at, value.to(x.dtype.element_ty), mask=here & (at < n))
