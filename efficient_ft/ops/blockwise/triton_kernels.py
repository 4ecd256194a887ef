"""The Triton kernel of the block-wise Adam step. Importing this module requires Triton."""
# mypy: ignore-errors
# mypy cannot check code that Triton compiles.

import triton
import triton.language as tl


@triton.jit
def _noise(at, seed):
    """Return the values of `ops.storage.eight_bits.uniform` at the positions `at`."""
    h = (at + seed).to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    h = h ^ (h >> 16)
    return (h >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _load_codes(codes, at, mask, BITS: tl.constexpr):
    """Load the codes at the positions `at` as int32."""
    if BITS == 8:
        return tl.load(codes + at, mask=mask, other=0).to(tl.int32)
    both = tl.load(codes + at // 2, mask=mask, other=0).to(tl.int32)
    return (both >> (4 - 4 * (at % 2)).to(tl.int32)) & 15


@triton.jit
def _store_codes(codes, at, code, row, blocks, BITS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    if BITS == 8:
        tl.store(codes + at, code.to(tl.uint8), mask=row[:, None] < blocks)
    else:
        pairs = tl.reshape(code, (ROWS, SIZE // 2, 2)) << (4 - 4 * tl.arange(0, 2))[None, None, :]
        byte = row.to(tl.int64)[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
        tl.store(codes + byte, tl.sum(pairs, 2).to(tl.uint8), mask=row[:, None] < blocks)


@triton.jit
def adam_step(
    p, grad, ratio, scale, root, range_, factors, seed, blocks, BITS: tl.constexpr, ROWS: tl.constexpr,
    SIZE: tl.constexpr, RATIO_TOP: tl.constexpr, ROOT_TOP: tl.constexpr, UNIT: tl.constexpr, LARGEST: tl.constexpr,
    SHIFTS: tl.constexpr,
):  # fmt: skip
    """Compute `blockwise.adam_step` for ROWS blocks of SIZE values.

    The kernel has many parameters, because a kernel receives every pointer, size and constant separately.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row.to(tl.int64)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = row < blocks
    mask = inside[:, None] & (tl.arange(0, SIZE) >= 0)[None, :]
    ZERO: tl.constexpr = 2 ** (BITS - 1)
    l2, decay, beta1, rest1 = tl.load(factors), tl.load(factors + 1), tl.load(factors + 2), tl.load(factors + 3)
    beta2, rest2, correction = tl.load(factors + 4), tl.load(factors + 5), tl.load(factors + 6)
    eps, rate, smallest = tl.load(factors + 7), tl.load(factors + 8), tl.load(factors + 9)
    low = tl.load(range_ + 3 * row, mask=inside, other=0).to(tl.int32) << 16
    one = tl.load(range_ + 3 * row + 1, mask=inside, other=0).to(tl.int32) * UNIT
    shift = tl.load(range_ + 3 * row + 2, mask=inside, other=0).to(tl.float32)
    low += (shift * one.to(tl.float32) * (1 / SHIFTS)).to(tl.int32)
    code = _load_codes(root, at, mask, BITS)
    bits = tl.minimum(tl.maximum(low[:, None] + (code - 1) * one[:, None], 1), LARGEST)
    s = tl.where(code > 0, bits, 0).to(tl.float32, bitcast=True)
    signed = _load_codes(ratio, at, mask, BITS) - ZERO
    m = (signed * tl.abs(signed)).to(tl.float32) * tl.load(scale + row, mask=inside, other=0)[:, None] * s
    x = tl.load(p + at, mask=mask, other=0)
    g = tl.load(grad + at, mask=mask, other=0)
    g = tl.where(l2 == 0, g, x * l2 + g)
    m = m * beta1 + g * rest1
    s = tl.sqrt_rn(s * s * beta2 + g * g * rest2)
    tl.store(p + at, x * decay - tl.div_rn(m, s * correction + eps) * rate, mask=mask)
    u = tl.div_rn(m, s)
    u = tl.where(tl.abs(u) <= 3.4028234663852886e38, u, 0.0)
    new_scale = tl.maximum(tl.max(tl.abs(u), 1), smallest) * (1 / RATIO_TOP**2)
    tl.store(scale + row, new_scale, mask=inside)
    noise = _noise(at.to(tl.int32), seed)
    bits = tl.minimum(s.to(tl.int32, bitcast=True) & 0x7FFFFFFF, LARGEST)
    low = tl.min(tl.where(bits > 0, bits, LARGEST), 1) >> 16
    span = tl.max(bits, 1) - (low << 16)
    distance = tl.where(span > 0, (span + (ROOT_TOP * UNIT - 1)) // (ROOT_TOP * UNIT), 1)
    tl.store(range_ + 3 * row, low.to(tl.int16), mask=inside)
    tl.store(range_ + 3 * row + 1, distance.to(tl.int16), mask=inside)
    one = (distance * UNIT).to(tl.float32)[:, None]
    place = (bits - (low << 16)[:, None]).to(tl.float32) * tl.div_rn(1.0, one)
    rest = place - tl.floor(place)
    up = (noise < rest + tl.minimum(one * 2.384185791015625e-07, 1.0) * (rest - rest * rest)).to(tl.int32)
    code = tl.minimum(tl.floor(place).to(tl.int32) + up, ROOT_TOP) + 1
    down = tl.sum(tl.where(bits > 0, (rest * SHIFTS).to(tl.int32) - up * SHIFTS, 0), 1)
    positive = tl.maximum(tl.sum((bits > 0).to(tl.int32), 1), 1)
    # Triton's // rounds towards zero, but the shift is rounded down even if it is negative.
    shift = tl.where(down < 0, -((positive - 1 - down) // positive), down // positive)
    tl.store(range_ + 3 * row + 2, shift.to(tl.int16), mask=inside)
    _store_codes(root, at, tl.where(bits > 0, code, 0), row, blocks, BITS, ROWS, SIZE)
    noise = noise * 4096 - tl.floor(noise * 4096)
    size = tl.abs(u) * tl.div_rn(1.0, new_scale)[:, None]
    whole = tl.floor(tl.sqrt_rn(size))
    code = tl.minimum(whole.to(tl.int32) + (noise * (2 * whole + 1) < size - whole * whole).to(tl.int32), RATIO_TOP)
    _store_codes(ratio, at, ZERO + tl.where(u < 0, -code, code), row, blocks, BITS, ROWS, SIZE)
