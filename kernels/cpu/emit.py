"""Emits vector code into functions that numba compiles, where LLVM would not make it from scalar loops by itself.

Vectors have 16 numbers of 32 bits, which LLVM splits where registers are shorter. Addresses are integers or pointers,
and offsets count bytes. They are not checked: callers own the arithmetic.

`compiled` marks compiled functions with a digest of this folder, because numba's disk cache notices changes only in the
file of the function itself.
"""

import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import extending, njit, types
from numba.core import cgutils
from numba.core.caching import NullCache

LANES = 16
LOG2_E = 1.4426950408889634
# 2 ** r for |r| <= 1/2, to 1e-7
_EXP2 = (1.5353362e-4, 1.3398874e-3, 9.6184370e-3, 5.5503324e-2, 2.4022648e-1, 6.9314720e-1, 1.0)

F32, F16 = ir.FloatType(), ir.HalfType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
VEC, VEC_I32 = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
_HALF_SUMS = (  # for `sums`: the lanes of two vectors that are added to those 8, 4, 2 and 1 after them
    (8, [*range(8), *range(16, 24)]),
    (4, [first + i for first in (0, 8, 16, 24) for i in range(4)]),
    (2, [first + i for lane in range(0, LANES, 4) for first in (lane, lane + LANES) for i in range(2)]),
    (1, [first + i for lane in range(0, LANES, 4) for first in (lane, lane + LANES) for i in (0, 2)]),
)
VEC_I16, VEC_I8, VEC_F16 = ir.VectorType(I16, LANES), ir.VectorType(I8, LANES), ir.VectorType(F16, LANES)
PAIRS = ir.VectorType(I16, 2 * LANES)  # pairs of bf16, as one operand of a dot product
_POINTER = I8.as_pointer()


class Emit:
    """An emitter of LLVM instructions at a builder's position, for the kernels of this folder."""

    def __init__(self, builder: Any, features: frozenset[str] = frozenset()) -> None:
        """Set up. builder: llvmlite's, of the function to be compiled. features: of the processor for which code is
        compiled, by LLVM's names."""
        self.b = builder
        self.features = features

    # --- addresses and memory ---

    def at(self, base: Any, *offsets: Any) -> Any:
        """Return the pointer that lies `offsets` bytes, added up, after a pointer or an address."""
        if base.type == I64:
            base = self.b.inttoptr(base, _POINTER)
        base = self.b.bitcast(base, _POINTER)
        for offset in offsets:
            base = self.b.gep(base, [I64(offset) if isinstance(offset, int) else offset])
        return base

    def add(self, x: Any, y: Any) -> Any:
        return self.b.add(x, I64(y) if isinstance(y, int) else y)

    def mul(self, x: Any, y: Any) -> Any:
        return self.b.mul(x, I64(y) if isinstance(y, int) else y)

    def load(self, pointer: Any, kind: Any = VEC, align: int | None = None) -> Any:
        """Load a vector or a number. align: of the address, in bytes; None: a number's size."""
        if align is None:
            align = {F32: 4, F16: 2, I8: 1, I16: 2, I32: 4, I64: 8}[getattr(kind, "element", kind)]
        return self.b.load(self.b.bitcast(pointer, kind.as_pointer()), align=align)

    def store(self, value: Any, pointer: Any) -> None:
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=2)

    def prefetch(self, pointer: Any) -> None:
        self.call("llvm.prefetch.p0", ir.VoidType(), self.b.bitcast(pointer, _POINTER), I32(0), I32(2), I32(1))

    # --- numbers ---

    def call(self, name: str, result: Any, *args: Any, **options: Any) -> Any:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), args, **options)

    def splat(self, scalar: Any) -> Any:
        if isinstance(scalar, float):
            return ir.Constant(VEC, [scalar] * LANES)
        kind = ir.VectorType(scalar.type, LANES)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        return self.b.shuffle_vector(one, one, ir.Constant(VEC_I32, [0] * LANES))

    def words(self, value: int) -> Any:
        return ir.Constant(VEC_I32, [value] * LANES)

    def vector(self, value: Any = None) -> Any:
        """Return a vector variable that loops may change: of zeros, or with `value`."""
        return cgutils.alloca_once_value(self.b, ir.Constant(VEC, [0.0] * LANES) if value is None else value)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.call("llvm.fma.v16f32", VEC, x, y, z)

    def add_product(self, target: Any, x: Any, y: Any) -> None:
        self.b.store(self.fma(x, y, self.b.load(target)), target)

    def added_product(self, total: Any, x: Any, y: Any) -> Any:
        return self.fma(x, y, total)

    def dot(self, total: Any, x: Any, y: Any) -> Any:
        """Return total + the dot product of x and y in each of 16 lanes: a lane of x or y is a pair of bf16, of total
        an fp32 number. Needs AVX512_BF16."""
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", VEC, total, x, y)

    def larger(self, x: Any, y: Any) -> Any:
        """Return the larger of two numbers in each lane; y if one is NaN."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def reduce(self, name: str, x: Any) -> Any:
        """Return one number made of the lanes of a vector by `fadd` (their sum) or `fmax` (their maximum), in a
        tree."""
        first = [F32(0.0)] if name == "fadd" else []
        return self.call(f"llvm.vector.reduce.{name}.v16f32", F32, *first, x, fastmath=("reassoc",))

    def sum_lanes(self, x: Any) -> Any:
        """Return the sum of a vector's lanes. They are added in the same order as by `Emit.sums`, so results have the
        same bits."""
        while x.type.count > 1:
            half = x.type.count // 2
            parts = [self.shuffled(x, x, [*range(first, first + half)]) for first in (0, half)]
            x = self._added(*parts)
        return self.b.extract_element(x, I32(0))

    def sums(self, vectors: Sequence[Any]) -> Any:
        """Return a vector whose lane i is the sum of the lanes of vectors[i], for 16 vectors. Takes a third of the time
        of 16 calls of `sum_lanes`."""
        vectors = [vectors[4 * (n % 4) + n // 4] for n in range(LANES)]  # an order that makes the sums end up in order
        for distance, lows in _HALF_SUMS:
            pairs, highs = zip(vectors[::2], vectors[1::2], strict=True), [i + distance for i in lows]
            vectors = [self._added(self.shuffled(x, y, lows), self.shuffled(x, y, highs)) for x, y in pairs]
        return vectors[0]

    def _added(self, x: Any, y: Any) -> Any:
        return self.b.add(x, y) if isinstance(x.type.element, ir.IntType) else self.b.fadd(x, y)

    def shuffled(self, x: Any, y: Any, order: Sequence[int]) -> Any:
        """Return a vector of lanes taken from x and y, which have n lanes each. order: index of each lane; below n it
        is a lane of x, otherwise lane index - n of y."""
        return self.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(order)), list(order)))

    def dot_words(self, total: Any, x: Any, y: Any) -> Any:
        """Return total, 16 int32, plus the dot product of x and y in each lane: a lane of x or y is a pair of int16.
        Needs AVX512BW; with VNNI it is one instruction."""
        return self.b.add(total, self.call("llvm.x86.avx512.pmaddw.d.512", VEC_I32, x, y))

    def upper(self, x: Any) -> Any:
        """Return as fp32 the bf16 number in the lower half of each 32-bit word."""
        return self.b.bitcast(self.b.shl(x, self.words(16)), VEC)

    def bf16(self, pointer: Any) -> Any:
        """Load 16 bf16 numbers and convert them to fp32."""
        return self.upper(self.b.zext(self.load(pointer, VEC_I16), VEC_I32))

    def int8(self, pointer: Any) -> Any:
        """Load 16 int8 numbers and convert them to fp32."""
        return self.b.sitofp(self.b.sext(self.load(pointer, VEC_I8), VEC_I32), VEC)

    def scale(self, pointer: Any) -> Any:
        """Load one bf16 number, such as the scale of a packed head, and convert it to fp32."""
        return self.b.bitcast(self.b.shl(self.b.zext(self.load(pointer, I16), I32), I32(16)), F32)

    def halves(self, both: Any) -> tuple[Any, Any]:
        """Return (lower, upper) bf16 numbers of 16 words, each converted to fp32."""
        return self.upper(both), self.b.bitcast(self.b.and_(both, self.words(0xFFFF0000)), VEC)

    def exp2(self, x: Any) -> Any:
        """Compute 2 ** x for x <= 0; values below the range give 0."""
        low = self.splat(-150.0)
        is_low = self.b.fcmp_ordered("<", x, low)
        x = self.b.select(is_low, low, x)
        whole = self.call("llvm.rint.v16f32", VEC, x)
        rest, out = self.b.fsub(x, whole), self.splat(_EXP2[0])
        for coefficient in _EXP2[1:]:
            out = self.fma(out, rest, self.splat(coefficient))
        # 2 ** whole in two factors, since one of them alone would leave the range of exponents.
        # The sum's lower bits are the whole number; converting a NaN would be undefined.
        magic = self.b.bitcast(self.b.fadd(whole, self.splat(12_582_912.0)), VEC_I32)
        exponent = self.b.sub(magic, self.words(0x4B400000))
        half = self.b.ashr(exponent, self.words(1))
        for part in (half, self.b.sub(exponent, half)):
            scale = self.b.shl(self.b.add(part, self.words(127)), self.words(23))
            out = self.b.fmul(out, self.b.bitcast(scale, VEC))
        return self.b.select(is_low, self.splat(0.0), out)

    def swish(self, x: Any) -> Any:
        """Compute x / (1 + exp(-x)) from exp(-|x|), which cannot overflow."""
        small = self.exp2(self.b.fmul(self.call("llvm.fabs.v16f32", VEC, x), self.splat(-LOG2_E)))
        over = self.b.select(self.b.fcmp_ordered("<", x, self.splat(0.0)), small, self.splat(1.0))
        return self.b.fmul(x, self.b.fdiv(over, self.b.fadd(self.splat(1.0), small)))


class WideEmit(Emit):
    """An emitter for processors with AVX-512 and its instructions for bf16."""

    coefficients: tuple[float, ...] = _EXP2
    """The polynomial of 2 ** r for |r| <= 1/2, the highest power first."""

    def exp2(self, x: Any) -> Any:
        """Compute 2 ** x for x <= 0; values below the range give 0."""
        x = self.larger(self.splat(-200.0), x)
        whole = self.call("llvm.rint.v16f32", VEC, x)
        rest, out = self.b.fsub(x, whole), self.splat(self.coefficients[0])
        for coefficient in self.coefficients[1:]:
            out = self.fma(out, rest, self.splat(coefficient))
        return self.call("llvm.x86.avx512.mask.scalef.ps.512", VEC, out, whole, out, I16(-1), I32(4))

    def narrowed(self, low: Any, high: Any) -> Any:
        """Round 32 numbers to bf16, to nearest and ties to even."""
        return self.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRS, high, low)


class ElementEmit(WideEmit):
    """An emitter whose offsets count elements of the pointer's type, not bytes."""

    def at(self, base: Any, *offsets: Any) -> Any:
        """Return the pointer that lies `offsets` elements, added up, after a pointer."""
        for offset in offsets:
            base = self.b.gep(base, [I64(offset) if isinstance(offset, int) else offset])
        return base


def intrinsic(function: Callable[..., Any]) -> Any:
    """Return numba's intrinsic made of `function`, without numba's own type hints, which are wrong."""
    return extending.intrinsic(function)


def emitted(emit: Callable[..., Any], result: types.Type = types.void, emitter: type[Emit] = Emit) -> Any:
    """Turn `emit`, which emits the code of a function, into a function that compiled code can call. When a call of it
    is compiled, `emit` receives an emitter of the class `emitter`, then the arguments: an array as its pointer, a tuple
    as its length, which is a constant. result: the numba type that the function returns."""

    def typed(_: Any, *kinds: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = []
            for kind, arg in zip(signature.args, args, strict=True):
                if isinstance(kind, types.Array):
                    values.append(context.make_array(kind)(context, builder, arg).data)
                else:
                    values.append(kind.count if isinstance(kind, types.UniTuple | types.Tuple) else arg)
            features = frozenset(context.codegen().magic_tuple()[2].split(","))
            made = emit(emitter(builder, features), *values)
            return context.get_dummy_value() if result is types.void else made

        return result(*kinds), generate

    typed.__name__, typed.__signature__ = emit.__name__, inspect.signature(emit)  # type: ignore[attr-defined]
    return extending.intrinsic(typed)


def emitted_value(result: types.Type, emitter: type[Emit] = Emit) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator like `emitted`, for functions that return a number of the numba type `result`."""
    return functools.partial(emitted, result=result, emitter=emitter)


def emitted_by(emitter: type[Emit]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator like `emitted`, with another class of emitters."""
    return functools.partial(emitted, emitter=emitter)


@emitted_value(types.float32)
def widened(e: Emit, x: ir.Value) -> Any:
    """Convert bf16 as uint16 to float32."""
    return e.b.bitcast(e.b.shl(e.b.zext(x, I32), I32(16)), F32)


@emitted_value(types.uint16)
def rounded(e: Emit, x: ir.Value) -> Any:
    """Convert float32 to bf16 as uint16, without a branch, so that loops around it are vectorised."""
    bits = e.b.bitcast(x, I32)
    odd = e.b.and_(e.b.lshr(bits, I32(16)), I32(1))
    up = e.b.lshr(e.b.add(bits, e.b.add(odd, I32(0x7FFF))), I32(16))
    nan = e.b.fcmp_unordered("uno", x, x)
    return e.b.trunc(e.b.select(nan, I32(0x7FC0), up), I16)


@emitted_value(types.CPointer(types.float32))
def fp32_at(e: Emit, address: ir.Value) -> Any:
    """Return an address as the pointer to fp32 that `numba.carray` takes."""
    return e.b.inttoptr(address, F32.as_pointer())


@emitted_value(types.CPointer(types.uint16))
def bf16_at(e: Emit, address: ir.Value) -> Any:
    """Return an address as the pointer to bf16 that `numba.carray` takes."""
    return e.b.inttoptr(address, I16.as_pointer())


@emitted_value(types.CPointer(types.int64))
def int64_at(e: Emit, address: ir.Value) -> Any:
    """Return an address as the pointer to int64 that `numba.carray` takes."""
    return e.b.inttoptr(address, I64.as_pointer())


@emitted_value(types.CPointer(types.uint8))
def bytes_at(e: Emit, address: ir.Value) -> Any:
    """Return an address as the pointer to bytes that `numba.carray` takes."""
    return e.b.inttoptr(address, _POINTER)


@emitted_value(types.float32)
def half_at(e: Emit, address: ir.Value) -> Any:
    """Return the fp16 number at an address, converted to fp32."""
    return e.b.fpext(e.load(e.at(address), F16), F32)


@functools.cache
def _digest() -> str:
    files: Sequence[Path] = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=16).hexdigest()


def keep_compiled(made: Any) -> None:
    """Let numba keep a compiled function in its cache on disk, until any file of this folder changes. Without a
    directory for the cache, the function is compiled anew at every start."""
    try:
        made.enable_caching()
        made._cache._cache_file._source_stamp = _digest()
    except (RuntimeError, AttributeError):
        made._cache = NullCache()


def keeps_compiled() -> bool:
    """Return whether there is a directory in which numba can keep compiled functions."""
    made: Any = njit(_nothing)
    keep_compiled(made)
    return not isinstance(made._cache, NullCache)


def _nothing() -> None:
    """Do nothing; a function that is never compiled."""


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator with which numba compiles a function at its first call with arguments of new types, and keeps
    the result on disk. options: of numba's njit."""

    def decorate(function: Callable[..., Any]) -> Any:
        made = njit(nogil=True, **options)(function)
        keep_compiled(made)
        return made

    return decorate
