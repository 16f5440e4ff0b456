"""Measures the exactness certificate: has a row the same bits alone and among others?

Every check runs a kernel on many rows at once and again on parts of them, of every number of rows
and at every offset, and compares bits, forward and backward. What is found is evidence, not proof:
sizes between those that are tried are taken to be as their class.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap.certificate import Certificate, class_of, environment, key, name_of

DTYPES = (torch.float32, torch.bfloat16)
VECTORS = (1, 2, 4, 8, 16, 32, 64)
"""Elements that a vectorised loop may take at once."""
LENGTHS_OF_RUNS = (*range(1, 65), 96, 128)
Kernel = Callable[[Tensor], Tensor]

FUNCTIONS: dict[str, Kernel] = {
    "exp": torch.exp, "log": lambda x: torch.log(x.abs()), "log1p": lambda x: torch.log1p(x.abs()),
    "sqrt": lambda x: torch.sqrt(x.abs()), "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
    "reciprocal": torch.reciprocal, "sin": torch.sin, "cos": torch.cos, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "erf": torch.erf, "expm1": torch.expm1, "exp2": torch.exp2,
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus, "elu": F.elu, "selu": F.selu, "mish": F.mish,
    "log_sigmoid": F.logsigmoid, "leaky_relu": F.leaky_relu, "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
}  # fmt: skip
"""Elementwise functions, by the name of the operator, that some code paths may round otherwise."""


def rms_norm(x: Tensor) -> Tensor:
    """As autograd takes it apart, operator by operator."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


ROWS: dict[str, Kernel] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "rms_norm": rms_norm,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(x.shape[0]) * 0, reduction="none"),
}
"""What reads the whole of each row."""
COUNTS = (*range(1, 10), 15, 16, 17, 33)


@dataclasses.dataclass(frozen=True)
class Extent:
    """How much is tried.

    max_size: the largest K, N and row length. max_rows: rows of the largest product.
    few_rows: every number of rows up to here; a sample beyond.
    """

    max_size: int = 2048
    max_rows: int = 512
    few_rows: int = 48

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of rows to try."""
        sample = (63, 64, 65, 96, 127, 128, 181, 200, 255, 256, 300, 383)
        return (*range(1, self.few_rows + 1), *(m for m in sample if m < self.max_rows))

    @property
    def sizes(self) -> tuple[int, ...]:
        """One power of two per class."""
        return tuple(1 << i for i in range(class_of(self.max_size).bit_length()))


def probe(device: torch.device, extent: Extent | None = None) -> Certificate:
    """Measure all of it; a few minutes on a core."""
    extent = extent or Extent()
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        return Certificate(
            environment(device),
            extent.max_rows,
            {name_of(dtype): dict(products(dtype, extent)) for dtype in DTYPES},
            {name_of(dtype): functions(dtype) for dtype in DTYPES},
            {
                name_of(dtype): {
                    name: tuple(classes_of_rows(kernel, dtype, extent))
                    for name, kernel in ROWS.items()
                }
                for dtype in DTYPES
            },
            {name_of(dtype): tuple(attentions(dtype)) for dtype in DTYPES},
        )


# --- products -------------------------------------------------------------------------------------


def products(dtype: torch.dtype, extent: Extent) -> Iterator[tuple[str, int]]:
    """The classes of (K, N) whose products give a row the same bits, from how many rows on."""
    for inner, columns in itertools.product(extent.sizes, repeat=2):
        shapes = itertools.product(_samples(inner), _samples(columns))
        least = [least_rows(dtype, k, n, extent) for k, n in shapes]
        if None not in least:
            yield key(inner, columns), max(rows for rows in least if rows is not None)


def _samples(size: int) -> tuple[int, ...]:
    """Sizes that stand for a class: its power of two, and an odd one."""
    return (size,) if size < 4 else (size, size // 4 * 3 + 1)


def least_rows(dtype: torch.dtype, inner: int, columns: int, extent: Extent) -> int | None:
    """From how many rows on, with the matrix stored either way, and with a bias."""
    rows = torch.randn(extent.max_rows, inner).to(dtype)
    matrix = torch.randn(inner, columns).to(dtype)
    turned = matrix.t().contiguous().t()
    bias = torch.randn(columns).to(dtype)
    kernels = (
        lambda x: x @ matrix,
        lambda x: x @ turned,
        lambda x: torch.addmm(bias, x, turned),
    )
    found = [row_invariant_from(kernel, rows, extent) for kernel in kernels]
    return None if None in found else max(least for least in found if least is not None)


def row_invariant_from(kernel: Kernel, rows: Tensor, extent: Extent) -> int | None:
    """The least number of rows from which on every number gives the bits of all `rows`; None where
    that is beyond those that are tried one by one."""
    whole = kernel(rows)
    least = 1
    for count in reversed(extent.counts):
        if not _is_exact_part(kernel, rows, whole, count):
            least = count + 1
            break
    return least if least <= extent.few_rows else None


def _is_exact_part(kernel: Kernel, rows: Tensor, whole: Tensor, count: int) -> bool:
    """Parts of `rows` of one count, at several offsets."""
    starts = {0, count % 7, len(rows) // 2 - count // 3, len(rows) - count}
    return all(
        is_same(kernel(rows[start : start + count]), whole[start : start + count])
        for start in starts
        if 0 <= start <= len(rows) - count
    )


def is_same(one: Tensor, other: Tensor) -> bool:
    """Equal bits, up to the sign of a zero; NaN where NaN is."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


# --- functions ------------------------------------------------------------------------------------


def functions(dtype: torch.dtype, known: Mapping[str, Kernel] = FUNCTIONS) -> dict[str, int]:
    """Per function, what a row's length has to be a multiple of; those that nothing helps are not
    in it."""
    found = {name: multiple_of(kernel, dtype) for name, kernel in known.items()}
    return {name: multiple for name, multiple in found.items() if multiple is not None}


def multiple_of(kernel: Kernel, dtype: torch.dtype, size: int = 1 << 22) -> int | None:
    """The least number of VECTORS that parts have to be a multiple of to have the bits of the
    whole; None where there is none. Of `size` elements: in bf16 a difference of the last bit of a
    float shows once in tens of thousands."""
    few = with_gradient(kernel, _values(1 << 13, dtype))
    exact = {length for length in LENGTHS_OF_RUNS if _is_exact_in(kernel, few, length)}
    many: Graded | None = None
    for multiple in VECTORS:
        needed = {length for length in LENGTHS_OF_RUNS if length % multiple == 0}
        if not needed <= exact:
            continue
        many = many or with_gradient(kernel, _values(size, dtype))
        if _is_exact_in(kernel, many, multiple) and _is_exact_apart(kernel, many, multiple):
            return multiple
    return None


def _values(size: int, dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.randn(size // 2), torch.randn(size // 2) * 8]).to(dtype)


@dataclasses.dataclass(frozen=True)
class Graded:
    """A kernel's operand and result, the gradient that went in and the one that came out."""

    x: Tensor
    y: Tensor
    above: Tensor
    gradient: Tensor


def with_gradient(kernel: Kernel, x: Tensor, above: Tensor | None = None) -> Graded:
    x = x.detach().requires_grad_()
    y = kernel(x)
    if above is None:
        above = torch.randn(y.shape).to(y.dtype)
    (gradient,) = torch.autograd.grad(y, x, above)
    return Graded(x.detach(), y.detach(), above, gradient)


def _is_exact_in(kernel: Kernel, whole: Graded, length: int) -> bool:
    """Runs of `length` elements, apart in memory, so that each is a loop of its own."""
    num_runs = whole.x.numel() // length

    def runs(flat: Tensor) -> Tensor:
        apart = torch.empty(num_runs, length + 3, dtype=flat.dtype)
        apart[:, :length] = flat[: num_runs * length].view(num_runs, length)
        return apart[:, :length]

    part = with_gradient(kernel, runs(whole.x), runs(whole.above))
    return all(
        is_same(found.reshape(-1), expected[: found.numel()])
        for found, expected in ((part.y, whole.y), (part.gradient, whole.gradient))
    )


def _is_exact_apart(kernel: Kernel, whole: Graded, multiple: int) -> bool:
    """Parts of the whole where they lie, which threads share out in another way."""
    size = whole.x.numel()
    for count in (1, 2, 3, 5, 17, 331, size // multiple // 3, size // multiple - 1):
        length = count * multiple
        for start in (0, multiple, 7 * multiple):
            if length and start + length <= size:
                here = slice(start, start + length)
                part = with_gradient(kernel, whole.x[here], whole.above[here])
                pairs = (part.y, whole.y[here]), (part.gradient, whole.gradient[here])
                if not all(is_same(*pair) for pair in pairs):
                    return False
    return True


# --- rows and attention ---------------------------------------------------------------------------


def classes_of_rows(kernel: Kernel, dtype: torch.dtype, extent: Extent) -> Iterator[str]:
    """The classes of row lengths for which a row has the same bits whatever is beside it."""
    for size in extent.sizes:
        num_rows = min(extent.max_rows, 96)
        rows = (torch.randn(num_rows, n).to(dtype) for n in _samples(size))
        if all(is_exact_by_rows(kernel, x, range(1, 34)) for x in rows):
            yield key(size)


def is_exact_by_rows(kernel: Kernel, rows: Tensor, counts: Iterable[int]) -> bool:
    """Forward and backward, of parts along dim 0."""
    whole = with_gradient(kernel, rows)
    for count in counts:
        for start in {0, 1, len(rows) // 2, len(rows) - count}:
            if not 0 <= start <= len(rows) - count:
                continue
            here = slice(start, start + count)
            part = with_gradient(kernel, rows[here], whole.above[here])
            pairs = (part.y, whole.y[here]), (part.gradient, whole.gradient[here])
            if not all(is_same(*pair) for pair in pairs):
                return False
    return True


CHANNELS = (4, 8, 16, 32, 64, 128)
LENGTHS = (1, 5, 33, 130)


def attentions(dtype: torch.dtype, widths: Sequence[int] = CHANNELS) -> Iterator[str]:
    """The classes of (query channels, value channels) for which a sequence has the same bits
    whatever is beside it, causal or not."""
    for channels, value_channels in itertools.product(widths, repeat=2):
        cases = itertools.product(LENGTHS, (False, True))
        if all(_is_exact_attention(dtype, channels, value_channels, *case) for case in cases):
            yield key(channels, value_channels)


def _is_exact_attention(
    dtype: torch.dtype, channels: int, value_channels: int, length: int, is_causal: bool
) -> bool:
    """One value holds queries, keys and values side by side, so that rows are its first dim."""
    sizes = [channels, channels, value_channels]
    x = torch.randn(5, length, 2, sum(sizes)).to(dtype)

    def kernel(x: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in x.split(sizes, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return is_exact_by_rows(kernel, x, (1, 3))
