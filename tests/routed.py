"""A routed MoE layer put together from exchangeable steps, so that each can be spelled in other
ways, right and wrong. Shape suffixes as in `models.moe`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

from overlap.certificate import NONE

D, E = 8, 8


def a2a(x: Tensor, outs: list[int] | None, ins: list[int] | None, group: str) -> Tensor:
    return funcol.all_to_all_single_autograd(x, outs, ins, group)


def count(ids_TK: Tensor) -> Tensor:
    ids_R = ids_TK.flatten()
    return torch.zeros(E, dtype=torch.int64).scatter_add(0, ids_R, torch.ones_like(ids_R))


def order_by(ids_TK: Tensor) -> Tensor:
    return ids_TK.flatten().argsort(stable=True)


def token_of(order_R: Tensor, top_k: int) -> Tensor:
    return order_R // top_k


def send_splits(counts_E: Tensor, ranks: int) -> list[int]:
    return counts_E.view(ranks, E // ranks).sum(1).tolist()


def by_expert(received_PL: Tensor, rows: Tensor) -> tuple[Tensor, Any]:
    """Rows by (source, expert) to rows by expert, with what brings them back."""
    index = regroup(received_PL, rows.shape[0])
    return rows[index], regroup(received_PL.t(), rows.shape[0])


def regroup(counts_AB: Tensor, num_rows: int) -> Tensor:
    lengths = counts_AB.t().flatten()
    old = (counts_AB.flatten().cumsum(0).view_as(counts_AB) - counts_AB).t().flatten()
    new = lengths.cumsum(0) - lengths
    return torch.arange(num_rows) + torch.repeat_interleave(
        old - new, lengths, output_size=num_rows
    )


def loop(m: Layer, rows_ND: Tensor, received_PL: Tensor) -> Tensor:
    parts = rows_ND.split(received_PL.sum(0).tolist())
    return torch.cat([F.relu(x @ w) for x, w in zip(parts, m.experts_LDD.unbind(0), strict=True)])


def take_back(rows: Tensor, back: Tensor) -> Tensor:
    return rows[back]


def weigh(x_TD: Tensor, rows_RD: Tensor, weights_TK: Tensor, order_R: Tensor, tok_R: Tensor):
    rows_RD = rows_RD * weights_TK.flatten()[order_R].unsqueeze(1)
    return torch.zeros_like(x_TD).index_add(0, tok_R, rows_RD)


@dataclasses.dataclass(frozen=True)
class Steps:
    top_k: int = 2
    pick: Callable[..., Any] = lambda m, x, k: (x @ m.router_DE).softmax(-1).topk(k)
    count: Callable[[Tensor], Tensor] = count
    between: Callable[[Tensor], Tensor] = lambda ids: ids
    order: Callable[[Tensor], Tensor] = order_by
    token: Callable[[Tensor, int], Tensor] = token_of
    gather: Callable[[Tensor, Tensor], Tensor] = lambda x, tok: x[tok]
    splits: Callable[[Tensor, int], list[int]] = send_splits
    regroup: Callable[[Tensor, Tensor], Any] = by_expert
    before: Callable[[Tensor], Tensor] = lambda rows: rows
    experts: Callable[..., Tensor] = loop
    back: Callable[[Tensor, Any], Tensor] = take_back
    weigh: Callable[..., Tensor] = weigh


class Layer(nn.Module):
    def __init__(self, steps: Steps, ranks: int, group: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps, self.ranks, self.group = steps, ranks, group
        self.router_DE = nn.Parameter(torch.randn(D, E))
        self.experts_LDD = nn.Parameter(torch.randn(E // ranks, D, D) / D**0.5)

    def forward(self, x_BSD: Tensor) -> Tensor:
        s = self.steps
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, ids_TK = s.pick(self, x_TD, s.top_k)
        counts_E = s.count(ids_TK)
        ids_TK = s.between(ids_TK)
        order_R = s.order(ids_TK)
        tok_R = s.token(order_R, s.top_k)
        rows_RD = self.exchange(s.gather(x_TD, tok_R), counts_E)
        return s.weigh(x_TD, rows_RD, weights_TK, order_R, tok_R).view_as(x_BSD) + x_BSD

    def exchange(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        s = self.steps
        received_E = funcol.all_to_all_single(counts_E, None, None, self.group)
        received_PL = received_E.view(self.ranks, E // self.ranks)
        ins = s.splits(counts_E, self.ranks)
        outs = s.splits(received_PL.flatten(), self.ranks)
        rows_ND = s.before(a2a(rows_RD, outs, ins, self.group))
        rows_ND, back = s.regroup(received_PL, rows_ND)
        rows_ND = s.back(s.experts(self, rows_ND, received_PL), back)
        return a2a(rows_ND, ins, outs, self.group)


# --- the same steps in other words ----------------------------------------------------------------


def count_onehot(ids: Tensor) -> Tensor:
    return F.one_hot(ids, E).sum((0, 1))


def count_onehot_twice(ids: Tensor) -> Tensor:
    return F.one_hot(ids, E).sum(1).sum(0)


def count_eq(ids: Tensor) -> Tensor:
    return (ids.unsqueeze(-1) == torch.arange(E)).sum((0, 1))


def count_map(ids: Tensor) -> Tensor:
    return torch.zeros(ids.shape[0], E, dtype=torch.bool).scatter(1, ids, True).sum(0)


def count_in_place(ids: Tensor) -> Tensor:
    counts = torch.zeros(E, dtype=torch.int64)
    counts.index_add_(0, ids.reshape(-1), torch.ones(ids.numel(), dtype=torch.int64))
    return counts


def gather_repeated(x: Tensor, order: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=0)[order]


def gather_expanded(x: Tensor, tok: Tensor) -> Tensor:
    return torch.gather(x, 0, tok.reshape(-1, 1).expand(-1, x.shape[1]))


def put_into_new(rows: Tensor, index: Tensor) -> Tensor:
    result = rows.new_empty(rows.shape)
    result[index, :] = rows
    return result


def weigh_scatter(x: Tensor, rows: Tensor, weights: Tensor, order: Tensor, tok: Tensor) -> Tensor:
    rows = weights.view(-1)[order][:, None] * rows
    return torch.zeros_like(x).scatter_add(0, tok[:, None].expand(-1, x.shape[1]), rows)


def weigh_expand_as(x: Tensor, rows: Tensor, weights: Tensor, order: Tensor, tok: Tensor) -> Tensor:
    rows = weights.view(-1)[order][:, None] * rows
    return torch.zeros_like(x).scatter_add(0, tok[:, None].expand_as(rows), rows)


def weigh_inverse(x: Tensor, rows: Tensor, weights: Tensor, order: Tensor, tok: Tensor) -> Tensor:
    rows = rows[order.argsort()].view(*weights.shape, -1)
    return (rows * weights.unsqueeze(-1)).sum(1)


def weigh_put(x: Tensor, rows: Tensor, weights: Tensor, order: Tensor, tok: Tensor) -> Tensor:
    restored = torch.zeros(order.shape[0], x.shape[1])
    restored[order] = rows
    return torch.einsum("tkd,tk->td", restored.view(*weights.shape, x.shape[1]), weights)


def weigh_copy(x: Tensor, rows: Tensor, weights: Tensor, order: Tensor, tok: Tensor) -> Tensor:
    restored = torch.zeros(order.shape[0], x.shape[1]).index_copy(0, order, rows)
    return (restored.view(*weights.shape, -1) * weights[..., None]).sum(1)


def regroup_labels(received_PL: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """A stable sort of the received rows by the number of their local expert."""
    num = received_PL.shape[1]
    labels = torch.arange(num).repeat(received_PL.shape[0])
    per_row = labels.repeat_interleave(received_PL.flatten(), output_size=rows.shape[0])
    index = per_row.argsort(stable=True)
    return rows[index], index


def back_put(rows: Tensor, index: Tensor) -> Tensor:
    result = torch.empty_like(rows)
    result[index] = rows
    return result


def back_argsort(rows: Tensor, index: Tensor) -> Tensor:
    return rows[index.argsort()]


def back_scatter(rows: Tensor, index: Tensor) -> Tensor:
    inverse = torch.zeros_like(index).scatter(0, index, torch.arange(rows.shape[0]))
    return rows[inverse]


def grouped(m: Layer, rows_ND: Tensor, received_PL: Tensor) -> Tensor:
    ends = received_PL.sum(0).cumsum(0).to(torch.int32)
    rows = torch._grouped_mm(rows_ND.bfloat16(), m.experts_LDD.bfloat16(), offs=ends)
    return F.relu(rows).type_as(rows_ND)


def shared_weight(m: Layer, rows_ND: Tensor, received_PL: Tensor) -> Tensor:
    """A product that the rows of all experts share."""
    return loop(m, rows_ND @ m.router_DE, received_PL)


def silu_of_all(m: Layer, rows_ND: Tensor, received_PL: Tensor) -> Tensor:
    """A function of the rows of all experts at once."""
    return F.silu(loop(m, rows_ND, received_PL))


def no_permute(received_PL: Tensor, rows: Tensor) -> tuple[Tensor, Any]:
    return rows, None


def pick_in_groups(m: Layer, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Only the best group of experts may be picked from."""
    scores = (x @ m.router_DE).sigmoid()
    per_group = scores.unflatten(1, (2, -1))
    best = per_group.topk(2, -1).values.sum(-1).topk(1, -1).indices
    out = torch.ones_like(per_group[..., 0], dtype=torch.bool).scatter(1, best, False)
    ids = per_group.masked_fill(out.unsqueeze(-1), float("-inf")).flatten(1).topk(k, -1).indices
    return scores.gather(1, ids), ids


RIGHT: dict[str, Steps] = {
    "scatter_add": Steps(),
    "bincount": Steps(count=lambda ids: torch.bincount(ids.view(-1), minlength=E)),
    "histc": Steps(count=lambda ids: ids.float().histc(E, 0, E).long()),
    "histc_less_one": Steps(count=lambda ids: ids.int().float().histc(E, 0, E - 1).int().long()),
    "onehot": Steps(count=count_onehot),
    "onehot_twice": Steps(count=count_onehot_twice),
    "eq": Steps(count=count_eq),
    "map": Steps(count=count_map),
    "in_place": Steps(count=count_in_place),
    "sort": Steps(order=lambda ids: ids.reshape(-1).sort(stable=True)[1]),
    "unstable": Steps(order=lambda ids: ids.reshape(-1).argsort()),
    "div_floor": Steps(token=lambda order, k: torch.div(order, k, rounding_mode="floor")),
    "index_select": Steps(gather=lambda x, tok: x.index_select(0, tok)),
    "gather": Steps(gather=gather_expanded),
    "titan": Steps(
        top_k=3,
        count=lambda ids: ids.view(-1).float().histc(E, 0, E).long(),
        order=lambda ids: torch.argsort(ids.view(-1), stable=True),
        gather=gather_expanded,
        regroup=lambda r, rows: (rows[i := regroup(r, rows.shape[0])], i),
        experts=grouped,
        back=put_into_new,
        weigh=weigh_scatter,
    ),
    "repeated": Steps(token=lambda order, k: order, gather=gather_repeated, weigh=weigh_inverse),
    "scatter_back": Steps(weigh=weigh_scatter),
    "expand_as_back": Steps(weigh=weigh_expand_as),
    "inverse_back": Steps(weigh=weigh_inverse),
    "put_back": Steps(weigh=weigh_put),
    "copy_back": Steps(weigh=weigh_copy),
    "labels": Steps(regroup=regroup_labels, back=back_put),
    "labels_argsort": Steps(regroup=regroup_labels, back=back_argsort),
    "labels_scatter": Steps(regroup=regroup_labels, back=back_scatter),
    "regroup_put": Steps(
        regroup=lambda r, rows: (rows[i := regroup(r, rows.shape[0])], i), back=back_put
    ),
    "grouped": Steps(experts=grouped),
    "in_groups": Steps(pick=pick_in_groups),
    "top_1": Steps(top_k=1),
    "top_1_argmax": Steps(
        top_k=1, pick=lambda m, x, k: ((s := x @ m.router_DE).amax(-1, True), s.argmax(-1, True))
    ),
    "top_8": Steps(top_k=8),
    "sigmoid": Steps(pick=lambda m, x, k: (x @ m.router_DE).sigmoid().topk(k)),
    "sorted_values": Steps(
        count=lambda ids: torch.bincount(ids.flatten().sort().values, minlength=E)
    ),
    "clone_in_place": Steps(between=lambda ids: (ids.clone().add_(1), ids)[1]),
}


# --- and wrong ------------------------------------------------------------------------------------


def mutate(ids: Tensor) -> Tensor:
    ids.add_(1).remainder_(E)
    return ids


def mutate_view(ids: Tensor) -> Tensor:
    ids.reshape(-1).add_(1).remainder_(E)
    return ids


def halves(received_PL: Tensor, rows: Tensor) -> tuple[Tensor, Any]:
    """Regroups by the transposed counts: segments of the wrong lengths."""
    return by_expert(received_PL.t().reshape(received_PL.shape), rows)


def weigh_by_order(x: Tensor, rows: Tensor, weights: Tensor, order: Tensor, tok: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, tok, rows * order[:, None])


def capped(ids_TK: Tensor) -> Tensor:
    """Ids beyond an expert's capacity go to expert 0: it depends on the rows before."""
    onehot = F.one_hot(ids_TK.flatten(), E)
    position = (onehot.cumsum(0) * onehot).sum(-1).view_as(ids_TK)
    return torch.where(position <= 3, ids_TK, 0)


def even_splits(counts_E: Tensor, ranks: int) -> list[int]:
    return [24 * 2 // ranks] * ranks


def pick_by_position(m: Layer, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(x.shape[0] * k).view(-1, k) % E
    return (x @ m.router_DE).softmax(-1).gather(1, ids), ids


WRONG: dict[str, tuple[Steps, str]] = {
    "other_key": (Steps(count=lambda ids: count((ids + 1) % E)), "adds up rows by"),
    "count_of_first_choice": (Steps(count=lambda ids: count(ids[:, 0])), "counts of"),
    "count_of_chunk": (Steps(count=lambda ids: count(ids.chunk(2, 1)[0])), "counts of"),
    "count_as_bool": (Steps(count=lambda ids: count(ids.bool().long())), ""),
    "descending": (
        Steps(order=lambda ids: ids.flatten().argsort(descending=True, stable=True)),
        "from high to low",
    ),
    "unsorted": (Steps(order=lambda ids: torch.arange(ids.numel())), "neither sorted"),
    "flipped_counts": (Steps(count=lambda ids: count(ids).flip(0)), "aten.flip"),
    "wrong_division": (Steps(token=lambda order, k: order // 4), ""),
    "transposed_blocks": (
        Steps(splits=lambda c, p: c.view(-1, p).sum(0).tolist()),
        "wrong experts",
    ),
    "no_permute": (Steps(regroup=no_permute, back=lambda rows, _: rows), "inside the run"),
    "no_unpermute": (Steps(back=lambda rows, _: rows), "another order"),
    "wrong_segments": (Steps(regroup=halves), ""),
    "position_scaling": (
        Steps(before=lambda rows: rows * torch.arange(rows.shape[0])[:, None]),
        "as data",
    ),
    "mean_of_rows": (Steps(before=lambda rows: rows - rows.mean(0)), "aten.mean"),
    "mean_of_rows_by_size": (Steps(before=lambda rows: rows - rows.sum(0) / rows.shape[0]), ""),
    "order_scaling": (Steps(weigh=weigh_by_order), "as data"),
    "even_splits": (Steps(splits=even_splits), "splits its rows by"),
    "position_ids": (Steps(pick=pick_by_position), ""),
    "capacity": (Steps(between=capped), ""),
    "mutated": (Steps(between=mutate), ""),
    "mutated_view": (Steps(between=mutate_view), "writes in place"),
    "half_of_rows": (
        Steps(weigh=lambda x, rows, w, order, tok: x + rows[: x.shape[0]]),
        "takes a range",
    ),
}


# --- on ranks -------------------------------------------------------------------------------------


def compare_on_ranks(
    rank: int,
    ranks: int,
    names: tuple[str, ...],
    batches: tuple[tuple[int, ...], ...],
    slices: int,
    axis: str = "batch",
    is_exact: bool = False,
) -> list[tuple[int, int]]:
    """Compare layers, sliced and as written, on batches of a size per rank; per layer how many
    nodes run once per slice, and how often it was compiled. Bitwise along experts; with
    `is_exact` without any certificate."""
    from tests.sliced import RTOL, compare

    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    group = dist.group.WORLD.group_name
    inputs = []
    for batch in batches:
        generator = torch.Generator().manual_seed(rank)
        inputs.append((torch.randn(batch[rank], 6, D, generator=generator),))
    result = []
    for name in names:
        steps = RIGHT[name] if name in RIGHT else WRONG[name][0]
        rtol = 0.0 if axis == "expert" else RTOL
        layer = Layer(steps, ranks, group)
        exact = NONE if is_exact else None
        slicer = compare(layer, inputs, (slices,), rtol=rtol, axis=axis, exact=exact)
        result.append((slicer.num_sliced, slicer.num_compiles))
    return result
