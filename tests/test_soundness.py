"""May it be sliced? Every program runs sliced and as written, and has to give the same; beside that
each says whether it must be sliced throughout or which operators must be computed once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlap import certificate, probe
from tests.dist import run_ranks
from tests.sliced import compare

S, D = 3, 6


class Body(nn.Module):
    """`fn(module, *inputs)` with a few parameters and buffers to use."""

    def __init__(self, fn: Callable[..., Any], train: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fn = fn
        self.w = nn.Parameter(torch.randn(D, D) / D**0.5)
        self.b = nn.Parameter(torch.randn(D))
        self.table = nn.Parameter(torch.randn(11, D))
        self.norm = nn.RMSNorm(D)
        self.bn = nn.BatchNorm1d(D)
        self.register_buffer("count", torch.zeros(D))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.bn.running_mean.uniform_(-1, 1)
        self.train(train)

    def forward(self, *inputs: Any) -> Any:
        return self.fn(self, *inputs)


def rows(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, S, D, generator=torch.Generator().manual_seed(batch)),)


def rows_2d(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, D, generator=torch.Generator().manual_seed(batch)),)


def tokens(batch: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 11, (batch, S), generator=torch.Generator().manual_seed(batch)),)


def rows_and_labels(batch: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(batch)
    labels = torch.randint(0, D, (batch, S), generator=generator)
    labels[:, 0] = -100
    return torch.randn(batch, S, D, generator=generator), labels


@dataclasses.dataclass(frozen=True)
class Program:
    """once: operators that have to be computed once, on joined values; none where all is sliced."""

    fn: Callable[..., Any]
    once: frozenset[str] = frozenset()
    inputs: Callable[[int], tuple[Tensor, ...]] = rows
    train: bool = True
    rtol: float = 2e-5


def once(*names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names)


def rotary(m: Body, x: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(x.shape[1]), torch.arange(1, D // 2 + 1) * 0.1)
    turn = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex((x @ m.w).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(2)


def attention(m: Body, x: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    q, k, v = ((x @ m.w * scale).unflatten(-1, (2, -1)).transpose(1, 2) for scale in (1, 2, 3))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
    return y.transpose(1, 2).flatten(2)


def documents_in_rows(m: Body, x: Tensor) -> Tensor:
    """A mask per batch row, computed from the row's own data."""
    document = (x[..., 0] > 0).long().cumsum(1)
    return attention(m, x, (document[:, None, :, None] == document[:, None, None, :]))


def documents_folded(m: Body, x: Tensor) -> Tensor:
    """Packed documents: the batch is folded into the sequence, attention is over all of it."""
    flat = (x @ m.w).flatten(0, 1)
    document = torch.arange(flat.shape[0]) // x.shape[1]
    mask = document[:, None] == document[None, :]
    return F.scaled_dot_product_attention(flat[None], flat[None], flat[None], attn_mask=mask)[0]


def balance_loss(m: Body, x: Tensor) -> tuple[Tensor, Tensor]:
    """The usual auxiliary loss: not linear in the means over tokens."""
    scores = (x.flatten(0, 1) @ m.w).softmax(-1)
    return x * scores.view_as(x), (scores.mean(0) * scores.mean(0)).sum()


def loss_in_rows(m: Body, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = (x.flatten(0, 1) @ m.w).softmax(-1)
    return x * scores.view_as(x), scores.square().sum()


def row_scaled_loss(m: Body, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = (x.flatten(0, 1) @ m.w).softmax(-1)
    return x * scores.view_as(x), scores.square().sum() / (x.shape[0] * x.shape[1])


def counted(m: Body, x: Tensor) -> Tensor:
    y = x @ m.w
    with torch.no_grad():
        m.count += (y > 0).float().sum((0, 1))
        m.steps.add_(1)
    return y


def counted_copy(m: Body, x: Tensor) -> Tensor:
    y = x @ m.w
    m.count.copy_(m.count * 0.5 + y.detach().sum((0, 1)))
    return y


def read_after_write(m: Body, x: Tensor) -> Tensor:
    y = x @ m.w
    m.count.add_(y.detach().abs().sum((0, 1)))
    return y * m.count.rsqrt()


def read_before_write(m: Body, x: Tensor) -> Tensor:
    y = x @ m.w + m.count
    m.count.add_(1)
    return y + m.count


def write_through_view(m: Body, x: Tensor) -> Tensor:
    y = x @ m.w
    y[:, 0].mul_(2)
    return y + 1


def write_row(m: Body, x: Tensor) -> Tensor:
    y = x @ m.w
    y[0] = 0
    return y + 1


def write_read_by_other_view(m: Body, x: Tensor) -> Tensor:
    y = x @ m.w
    flat = y.view(-1, D)
    before = flat * 2
    y.add_(1)
    return before.view_as(y) + flat.view_as(y)


def write_twice_through_views(m: Body, x: Tensor) -> Tensor:
    zeros = torch.zeros(x.shape[0], x.shape[1], D)
    zeros.add_(x @ m.w)
    view = zeros.view(-1, D)
    view.mul_(3)
    return zeros + x


def accumulate_in_low_precision(m: Body, x: Tensor) -> Tensor:
    y = (x @ m.w).bfloat16()
    y.add_(x / 3)
    return y.float() * 2


def keep_dtype(m: Body, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.linear(x, m.w)
        z = F.linear(y - y.mean(0), m.w)
    return z.float()


def ungraded(m: Body, x: Tensor) -> Tensor:
    y = x @ m.w
    with torch.no_grad():
        steer = (y - y.mean(0)).tanh()
    return y * steer + (y - y.mean(0))


def tied(m: Body, ids: Tensor) -> Tensor:
    return F.embedding(ids, m.table) @ m.w @ m.table.t()


def entropy(reduction: str, **options: Any) -> Callable[..., Tensor]:
    def fn(m: Body, x: Tensor, labels: Tensor) -> Tensor:
        logits = (x @ m.w).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction=reduction, **options)

    return fn


def entropy_of_classes_first(m: Body, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((x @ m.w).transpose(1, 2), labels, reduction="none")


def entropy_weighted(m: Body, x: Tensor, labels: Tensor) -> Tensor:
    weight = m.b.detach().abs()
    return F.cross_entropy((x @ m.w).flatten(0, 1), labels.flatten(), weight, reduction="none")


def valid_mean(m: Body, x: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy((x @ m.w).flatten(0, 1), labels.flatten(), reduction="none")
    return losses.sum() / (labels != -100).sum()


def expert_loop(m: Body, x: Tensor) -> Tensor:
    """The loop over experts of a Hugging Face style block: rows picked by a mask per expert."""
    flat = x.flatten(0, 1)
    weights, picked = (flat @ m.w).softmax(-1).topk(2)
    mask = F.one_hot(picked, D).permute(2, 1, 0)
    result = torch.zeros_like(flat)
    for expert in range(D):
        choice, token = torch.where(mask[expert])
        current = flat[None, token].reshape(-1, D) * m.b[expert]
        result.index_add_(0, token, F.relu(current @ m.w) * weights[token, choice, None])
    return result.view_as(x)


def capacity(m: Body, x: Tensor) -> Tensor:
    """Rows beyond an expert's capacity are dropped: which ones depends on the rows before."""
    flat = x.flatten(0, 1)
    picked = (flat @ m.w).argmax(-1)
    onehot = F.one_hot(picked, D)
    position = (onehot.cumsum(0) * onehot).sum(-1)
    return flat * (position <= 4).unsqueeze(-1)


def sorted_by_key(m: Body, x: Tensor) -> Tensor:
    flat = (x @ m.w).flatten(0, 1)
    return flat[flat[:, 0].argsort()]


def regrouped_columns(m: Body, x: Tensor) -> Tensor:
    return (x @ m.w).transpose(0, 1).flatten(0, 1)


def neighbours(m: Body, x: Tensor) -> Tensor:
    y = x @ m.w
    return y[1:] - y[:-1]


def masked_rows(m: Body, x: Tensor) -> Tensor:
    flat = (x @ m.w).flatten(0, 1)
    return flat[flat[:, 0] > 0].sum(0)


def windows(m: Body, x: Tensor) -> Tensor:
    y = F.pad(x @ m.w, (0, 0, 1, 0))
    return F.conv1d(y.transpose(1, 2), m.w[:, :, None].expand(-1, -1, 2))


PROGRAMS: dict[str, Program] = {
    # rows stay apart
    "linear_relu": Program(lambda m, x: F.relu(F.linear(x, m.w, m.b))),
    "rms_norm_linear": Program(lambda m, x: F.linear(m.norm(x), m.w)),
    "layer_norm": Program(lambda m, x: F.layer_norm(x @ m.w, (D,), m.b)),
    "rotary": Program(rotary),
    "attention": Program(attention),
    "attention_causal": Program(lambda m, x: attention(m, x, is_causal=True)),
    "mask_whole": Program(lambda m, x: attention(m, x, torch.ones(S, S).tril().bool())),
    "mask_of_extent": Program(
        lambda m, x: attention(m, x, torch.ones(x.shape[0], 1, S, S).tril().bool())
    ),
    "mask_of_rows": Program(documents_in_rows),
    "softmax_last": Program(lambda m, x: (x @ m.w).softmax(-1).cumsum(-1)),
    "flip_last": Program(lambda m, x: (x @ m.w).flip(-1).roll(1, 1)),
    "sort_last": Program(lambda m, x: (x @ m.w).sort(-1).values),
    "glu": Program(lambda m, x: F.glu(x @ m.w) + (x @ m.w).chunk(2, -1)[0]),
    "windows": Program(windows),
    "einsum": Program(lambda m, x: torch.einsum("bsd,de->bse", x, m.w)),
    "einsum_of_extent": Program(
        lambda m, x: torch.einsum("bsd,bse->bde", x @ m.w, torch.ones(x.shape[0], S, 2))
    ),
    "times_vector": Program(lambda m, x: (x @ m.w) @ m.b),
    "column_times": Program(lambda m, x: m.w @ x.transpose(1, 2)),
    "shape_as_value": Program(lambda m, x: x @ m.w + x.shape[0]),
    "shape_as_scale": Program(lambda m, x: x @ m.w * x.shape[0] / (x.shape[0] * x.shape[1])),
    "zeros_of_extent": Program(lambda m, x: torch.zeros(x.shape[0], S, D) + x @ m.w),
    "position_of_row": Program(lambda m, x: x @ m.w + torch.arange(x.shape[0])[:, None, None]),
    "eye_of_extent": Program(lambda m, x: (x @ m.w).sum((1, 2))[:, None] * torch.eye(x.shape[0])),
    "expand_extent": Program(
        lambda m, x: (x @ m.w).unsqueeze(1).expand(x.shape[0], x.shape[0], S, D).sum((1, 2))
    ),
    "sum_returned": Program(lambda m, x: ((y := x @ m.w), y.square().sum())),
    "loss_in_rows": Program(loss_in_rows),
    "row_scaled_loss": Program(row_scaled_loss),
    "tied": Program(tied, inputs=tokens),
    "embedding_padding": Program(
        lambda m, i: F.embedding(i, m.table, padding_idx=3) @ m.w, inputs=tokens
    ),
    "entropy_none": Program(entropy("none"), inputs=rows_and_labels),
    "entropy_smoothed": Program(entropy("none", label_smoothing=0.3), inputs=rows_and_labels),
    "entropy_ignores": Program(entropy("none", ignore_index=-100), inputs=rows_and_labels),
    "entropy_classes_first": Program(entropy_of_classes_first, inputs=rows_and_labels),
    "entropy_weighted": Program(entropy_weighted, inputs=rows_and_labels),
    "batch_norm_eval": Program(lambda m, x: m.bn(x @ m.w), train=False, inputs=rows_2d),
    "expert_loop": Program(expert_loop),
    "where": Program(lambda m, x: torch.where(x > 0, x @ m.w, -x).clamp(min=m.b)),
    "empty_of_extent": Program(lambda m, x: torch.empty(x.shape).copy_(x @ m.w)),
    "dropout_eval": Program(lambda m, x: F.dropout(x @ m.w, 0.5, m.training), train=False),
    # rows mix: computed once
    "mean_over_rows": Program(lambda m, x: (y := x @ m.w) - y.mean(0), once("mean")),
    "cumsum": Program(lambda m, x: (x @ m.w).cumsum(0), once("cumsum")),
    "softmax_rows": Program(lambda m, x: (x @ m.w).softmax(0), once("softmax")),
    "flip": Program(lambda m, x: (x @ m.w).flip(0), once("flip")),
    "roll": Program(lambda m, x: (x @ m.w).roll(1, 0), once("roll")),
    "roll_flattened": Program(lambda m, x: (x @ m.w).roll(1), once("roll")),
    "sorted_by_key": Program(sorted_by_key, once("argsort", "index")),
    "sorted_with_values": Program(
        lambda m, x: (s := (x @ m.w).flatten(0, 1).sort(0)).values + s.indices, once("sort")
    ),
    "amax": Program(lambda m, x: (y := x @ m.w) / y.amax(0), once("amax")),
    "std": Program(lambda m, x: (y := x @ m.w) / y.std(0), once("std")),
    "square_of_sum": Program(lambda m, x: (x @ m.w).sum(0).square(), once("square")),
    "outer_product": Program(lambda m, x: (y := x @ m.w) @ y.t(), once("matmul"), rows_2d),
    "gram": Program(lambda m, x: (y := x @ m.w).t() @ y, once("matmul"), rows_2d),
    "diagonal": Program(
        lambda m, x: torch.einsum("ii->i", torch.ones(x.shape[0], x.shape[0]) * x[:, :1]),
        once("einsum"),
        rows_2d,
    ),
    "batch_norm_train": Program(lambda m, x: m.bn(x @ m.w), once("batch_norm"), rows_2d),
    "first_row": Program(lambda m, x: (y := x @ m.w) - y[0], once("select")),
    "first_row_of_range": Program(lambda m, x: (y := x @ m.w) - y[:1], once("slice")),
    "neighbours": Program(neighbours, once("slice")),
    "regrouped_columns": Program(regrouped_columns, once("reshape", "view", "flatten")),
    "masked_rows": Program(masked_rows, once("index")),
    "capacity": Program(capacity, once("cumsum")),
    "documents_folded": Program(documents_folded, once("scaled_dot_product_attention")),
    "balance_loss": Program(balance_loss, once("mean")),
    "valid_mean": Program(valid_mean, once("div"), rows_and_labels),
    "entropy_mean": Program(entropy("mean"), once("cross_entropy_loss"), rows_and_labels),
    "entropy_sum": Program(entropy("sum"), once("cross_entropy_loss"), rows_and_labels),
    "entropy_mean_smoothed": Program(
        entropy("mean", label_smoothing=0.3), once("cross_entropy_loss"), rows_and_labels
    ),
    "squeeze_row": Program(lambda m, x: (x @ m.w).squeeze(0) * 2, once("squeeze")),
    "pad_rows": Program(
        lambda m, x: F.pad(x @ m.w, (0, 0, 0, 0, 1, 0)), once("pad", "constant_pad_nd")
    ),
    "cat_rows": Program(lambda m, x: torch.cat([x @ m.w, x]), once("cat")),
    "embedding_by_frequency": Program(
        lambda m, i: F.embedding(i, m.table, scale_grad_by_freq=True), once("embedding"), tokens
    ),
    "low_precision_sum": Program(lambda m, x: (x @ m.w).bfloat16().sum(0), once("sum")),
    "random": Program(lambda m, x: x @ m.w + torch.rand_like(x), once("rand_like")),
    # buffers and writes
    "counted": Program(counted, once("add_")),
    "counted_copy": Program(counted_copy, once("add")),
    "read_after_write": Program(read_after_write, once("add_")),
    "read_before_write": Program(read_before_write),
    "write_through_view": Program(write_through_view, once("mul_")),
    "write_row": Program(write_row, once("matmul")),
    "write_read_by_other_view": Program(write_read_by_other_view, once("add_")),
    "write_twice": Program(write_twice_through_views, once("add")),
    "accumulate_low": Program(accumulate_in_low_precision),
    # modes
    "autocast": Program(keep_dtype, once("mean"), rtol=5e-2),
    "no_grad": Program(ungraded, once("mean")),
}


LITERAL = (
    "rotary", "attention", "mask_of_extent", "einsum_of_extent", "shape_as_value", "shape_as_scale",
    "zeros_of_extent", "position_of_row", "eye_of_extent", "expand_extent", "empty_of_extent",
    "expert_loop", "tied", "entropy_none", "sum_returned", "mean_over_rows", "flip",
    "sorted_by_key", "outer_product", "diagonal", "capacity", "documents_folded", "balance_loss",
    "counted", "read_after_write", "write_row", "autocast", "regrouped_columns", "squeeze_row",
    "cat_rows", "batch_norm_train", "valid_mean",
)  # fmt: skip
"""Programs that also run with sizes burned in."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_symbolic_batch(name: str) -> None:
    check(PROGRAMS[name], dynamic=True, batch=7, slices=(3,))


@pytest.mark.parametrize("name", LITERAL)
def test_literal_batch_that_equals_other_sizes(name: str) -> None:
    """Sizes burned in, and B = D = 6: a literal says nothing about the batch."""
    check(PROGRAMS[name], dynamic=False, batch=D, slices=(4,))


def check(program: Program, dynamic: bool, batch: int, slices: Sequence[int]) -> None:
    module = Body(program.fn, program.train)
    slicer = compare(module, [program.inputs(batch)], slices, dynamic, program.rtol)
    if program.once:
        assert slicer.refused & program.once, slicer.plan.refused
    else:
        assert not slicer.refused, [r.message for r in slicer.plan.refused]
        assert slicer.num_sliced


# ---- numerics='exact' -------------------------------------------------------------------------


def wide(m: Body, x: Tensor) -> Tensor:
    """Rows of whole vectors."""
    return torch.cat([x @ m.w] * 8, -1)


def used_thrice(m: Body, x: Tensor) -> Tensor:
    """Uses of one value on slices, and between them on joined values: gradients add up in order."""
    y = x @ m.w
    first, between, last = y.cumsum(0), y * 1.7, y.flip(0)
    return first * 0.3 + between * y + last * 0.9


def exact_rows(m: Body, x: Tensor) -> Tensor:
    return (m.norm(m.norm(x @ m.w) @ m.w + m.b) @ m.w) * m.b


EXACT: dict[str, Program] = {
    "silu": Program(lambda m, x: F.silu(x @ m.w), once("silu")),
    "sigmoid": Program(lambda m, x: torch.sigmoid(x @ m.w), once("sigmoid")),
    "softplus": Program(lambda m, x: F.softplus(x @ m.w), once("softplus")),
    "pow": Program(lambda m, x: (x @ m.w).abs() ** 1.7, once("pow")),
    "gelu_tanh": Program(lambda m, x: F.gelu(x @ m.w, approximate="tanh"), once("gelu")),
    "silu_of_whole_vectors": Program(lambda m, x: F.silu(wide(m, x))),
    "softplus_of_whole_vectors": Program(lambda m, x: F.softplus(wide(m, x)) * 2),
    "dropout": Program(lambda m, x: F.dropout(x @ m.w, 0.5, True), once("dropout")),
    "used_thrice": Program(used_thrice, once("cumsum", "flip")),
    "weights_used_thrice": Program(exact_rows),
    "one_sequence": Program(lambda m, x: F.relu(x @ m.w), once("matmul"), lambda b: rows(1)),
    "one_row": Program(lambda m, x: F.relu(x @ m.w), once("matmul"), lambda b: rows_2d(1)),
    "no_row": Program(lambda m, x: F.relu(x @ m.w), inputs=lambda b: rows_2d(0)),
}
"""More than those above: what exact numerics alone refuse, or must not."""
SLICED_EXACTLY = {
    "linear_relu", "rms_norm_linear", "rotary", "attention", "attention_causal", "softmax_last", "flip_last",
    "sort_last", "shape_as_value", "shape_as_scale", "zeros_of_extent", "position_of_row",
    "read_before_write", "silu_of_whole_vectors", "softplus_of_whole_vectors",
    "weights_used_thrice", "no_row", "dropout_eval",
}  # fmt: skip
"""Nothing of these is computed once."""


@dataclasses.dataclass(frozen=True)
class Found:
    """refused: operators that are computed once. error: why nothing is sliced. num_sliced: nodes."""

    refused: set[str]
    error: str
    num_sliced: int


def compare_exactly(rank: int, num_ranks: int, names: Sequence[str]) -> dict[str, Found]:
    """Every program with the certificate of this process, bitwise."""
    functions = ("sigmoid", "silu", "softplus", "gelu", "gelu_tanh", "tanh", "exp", "rsqrt")
    extent = probe.Extent(max_size=64, max_rows=96)
    dtype = torch.float32
    found = certificate.Certificate(
        certificate.environment(torch.device("cpu")),
        extent.max_rows,
        {"float32": dict(probe.products(dtype, dataclasses.replace(extent, max_size=8)))},
        {"float32": probe.functions(dtype, {n: probe.FUNCTIONS[n] for n in functions})},
        {
            "float32": {
                name: tuple(probe.classes_of_rows(kernel, dtype, extent))
                for name, kernel in probe.ROWS.items()
            }
        },
        {"float32": tuple(probe.attentions(dtype, (4,)))},
    )
    results: dict[str, Found] = {}
    for name in names:
        program = (PROGRAMS | EXACT)[name]
        module = Body(program.fn, program.train)
        slicer = compare(module, [program.inputs(13)], (3,), rtol=0.0, exact=found)
        results[name] = Found(
            slicer.refused if slicer.plan else set(),
            slicer.error,
            slicer.num_sliced if slicer.plan else 0,
        )
    return results


NUM_PARTS = 6


@pytest.mark.dist  # in a process of its own, for MKL reads its settings once
@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_exact_numerics(part: int) -> None:
    names = [*PROGRAMS, *EXACT][part::NUM_PARTS]
    [results] = run_ranks(compare_exactly, 1, names, timeout_s=290)
    for name, found in results.items():
        program = (PROGRAMS | EXACT)[name]
        once = program.once | {"aten.sum"}  # which exact numerics compute once, so that it is whole
        assert not program.once or found.refused & once, (name, found)
        if name in SLICED_EXACTLY:
            assert not found.refused and not found.error and found.num_sliced, (name, found)
