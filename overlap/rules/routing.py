"""Collectives: the routed exchange, proven by equal forms.

An all-to-all may be sliced only when its rows are grouped by a key of the row itself and its splits
are that key's counts. Then the counts of the slices add up to the whole's, every rank gets the same
rows, in another order, and the combine brings each slice's rows back to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import sympy
import torch

from overlap import collectives
from overlap import placement as pl
from overlap.placement import Counts, Decision, Form, Op, Scalar, Split

_c10d = torch.ops._c10d_functional
_ADVICE = (
    "rows must be sorted by expert id and split by the counts of those ids; "
    "otherwise leave this exchange un-sliced with slices=1"
)


@pl.register_rule(_c10d.wait_tensor)
def wait(op: Op) -> Decision:
    return Decision(op.place(collectives.awaited(op.node)))


@pl.register_rule(_c10d.all_to_all_single)
def all_to_all(op: Op) -> Decision:
    outs, ins = collectives.splits_of(op.node)
    match op.place(collectives.rows_of(op.node)):
        case Counts(form):
            return Decision(Counts(_exchanged_counts(op, form, outs, ins)))
        case Split(0, pl.Sorted() as rows, meaning) if not isinstance(meaning, pl.INDEX_MEANINGS):
            return Decision(Split(0, _dispatched(op, rows, outs, ins)))
        case Split(0, pl.Received() as rows, meaning) if not isinstance(meaning, pl.INDEX_MEANINGS):
            return Decision(Split(0, _combined(op, rows, outs, ins)))
        case Split(0, pl.Base()):
            raise op.refuse(
                "sends rows by their position in the batch, so rows of a slice would go to other "
                "ranks than they do in the whole batch",
                _ADVICE,
            )
        case Split(dim, pl.Base() as rows) if dim > 0:
            # Each rank sends blocks of another dim; every slice sends its rows of the same blocks.
            return Decision(Split(dim, rows))
        case _:
            raise op.refuse("sends rows that are neither sorted by expert nor received", _ADVICE)


def _exchanged_counts(op: Op, form: Form, outs: Sequence[Any], ins: Sequence[Any]) -> Form:
    """Counts of all ids, sent in equal blocks: rank r receives block r of every source."""
    num_ids = form.matrix.shape[-1]
    if not form.is_identity or not form.base.startswith("hist:"):
        raise op.refuse("exchanges sums of counts", "exchange the counts of all experts")
    block = form.matrix.shape[0] / max(len(ins), 1)
    if not ins or any(size != block for size in (*ins, *outs)) or len(ins) != len(outs):
        raise op.refuse(
            f"exchanges counts in blocks of {ins} and {outs}, expected equal ones", _ADVICE
        )
    base = f"recv:{op.node.name}:{form.base}:{collectives.group_of(op.node)}:{len(ins)}"
    return Form(np.eye(num_ids, dtype=np.int64).reshape(form.matrix.shape), base)


def _scalar_forms(op: Op, sizes: Sequence[Any]) -> tuple[Form, ...]:
    forms: list[Form] = []
    for size in sizes:
        place = op.place(size)
        if not isinstance(place, Scalar):
            raise op.refuse(
                f"splits its rows by {size}, which is not read from the counts of their key",
                _ADVICE,
            )
        forms.append(place.form)
    if not forms:
        raise op.refuse("splits its rows evenly, by their position in the batch", _ADVICE)
    return tuple(forms)


def _sends_nothing(op: Op, rows: pl.Sorted, sizes: Sequence[Any]) -> bool:
    """Whether a rank has no rows at all, so that tracing made every split of them a literal 0.

    Its peers' slices still send to it, so it takes part in each of their exchanges.
    """
    is_empty = pl.same(rows.per_batch_row * op.batch, sympy.Integer(0))
    return is_empty and len(sizes) > 0 and all(isinstance(n, int) and n == 0 for n in sizes)


def _are_blocks(forms: Sequence[Form]) -> bool:
    """Whether form r sums block r of as many equal blocks of ids as there are forms."""
    num_ids = forms[0].matrix.shape[-1]
    if num_ids % len(forms):
        return False
    blocks = np.kron(
        np.eye(len(forms), dtype=np.int64), np.ones(num_ids // len(forms), dtype=np.int64)
    )
    return all(
        form.base == forms[0].base and np.array_equal(form.matrix, block)
        for form, block in zip(forms, blocks, strict=True)
    )


def _dispatched(op: Op, rows: pl.Sorted, outs: Sequence[Any], ins: Sequence[Any]) -> pl.Received:
    received = _scalar_forms(op, outs)
    if not _sends_nothing(op, rows, ins):
        _check_sent(op, rows, _scalar_forms(op, ins))
    num_ranks, num_ids = len(ins), received[0].matrix.shape[-1]
    prefix, _, tail = received[0].base.partition(f":hist:{rows.key}:")
    expected_tail = f"{collectives.group_of(op.node)}:{num_ranks}"
    if not prefix.startswith("recv:") or tail != expected_tail:
        raise op.refuse("receives by counts that were exchanged for another key or group", _ADVICE)
    if not _are_blocks(received) or len(received) != num_ranks:
        raise op.refuse("splits its rows by sums over the wrong experts", _ADVICE)
    per_rank = num_ids // num_ranks
    units = np.eye(num_ids, dtype=np.int64)
    segments = tuple(
        pl.Segment(Form(units[r * per_rank + e], received[0].base), (r, e))
        for r in range(num_ranks)
        for e in range(per_rank)
    )
    return pl.Received(op.node.name, segments, rows)


def _check_sent(op: Op, rows: pl.Sorted, sent: Sequence[Form]) -> None:
    """Raise unless the splits of sorted rows are the counts of their key, rank by rank."""
    if sent[0].base != f"hist:{rows.key}":
        raise op.refuse(
            f"splits its rows by counts of {_key_of(sent[0])}, expected those of {rows.key}, by "
            "which they are sorted",
            _ADVICE,
        )
    if not _are_blocks(sent):
        raise op.refuse("splits its rows by sums over the wrong experts", _ADVICE)


def _key_of(form: Form) -> str:
    return form.base.removeprefix("hist:")


def _combined(op: Op, rows: pl.Received, outs: Sequence[Any], ins: Sequence[Any]) -> pl.Sorted:
    """The way back: received rows in the order they came in, splits swapped."""
    labels = [segment.label for segment in rows.segments]
    num_ids = rows.segments[0].length.matrix.shape[-1]
    if labels != sorted(labels) or len(labels) != num_ids:
        raise op.refuse("sends rows back in another order than they came in", _ADVICE)
    sent = _scalar_forms(op, ins)
    ranks = sorted({rank for rank, _ in labels})
    by_rank = [pl.total([s.length for s in rows.segments if s.label[0] == r]) for r in ranks]
    if list(sent) != by_rank:
        raise op.refuse("sends back other row counts than were received", _ADVICE)
    if len(outs) != len(ins):
        raise op.refuse("receives other row counts than were sent", _ADVICE)
    if not _sends_nothing(op, rows.back, outs):
        _check_sent(op, rows.back, _scalar_forms(op, outs))
    if rows.segments[0].length.base.split(":")[-2] != collectives.group_of(op.node):
        raise op.refuse("sends rows back over another group than they came over", _ADVICE)
    return rows.back


@pl.register_rule(
    _c10d.all_gather_into_tensor, _c10d.reduce_scatter_tensor, _c10d.all_reduce, _c10d.broadcast
)
def other_collective(op: Op) -> Decision:
    raise op.refuse("exchanges rows of the whole batch", "only a routed all-to-all can be sliced")
