"""Steps of random dense programs: each takes the value before it and gives the next one.

A step is a name and a small number that picks the operator, the dim, the other operand. One that
does not fit the value's shape leaves it alone, so any list of steps is a program. Values are
float64 and stay finite; what an operator gives beside (indices, masks) goes back into the value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap.rules import elementwise

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
GROUP, NUM_RANKS = "fuzz", 2
MAX_ELEMENTS = 3000


@dataclasses.dataclass
class State:
    """What steps may read: earlier values, the last one is theirs to change; and a parameter."""

    values: list[Tensor]
    weight_P: Tensor

    def weight(self, *shape: int) -> Tensor:
        """The first parameters, of that shape."""
        num = 1
        for size in shape:
            num *= size
        return self.weight_P[:num].view(shape)

    def like(self, y: Tensor) -> Tensor:
        """An earlier value of that shape, or else the value itself."""
        return next((v for v in reversed(self.values[:-1]) if v.shape == y.shape), y)


Step = Callable[[State, Tensor, int], Tensor]


def ramp(y: Tensor) -> Tensor:
    """A known value of the shape of `y`, the same in every slice's place."""
    return (torch.arange(y.shape[-1], dtype=y.dtype) + 1) / (y.shape[-1] + 1)


def positive(y: Tensor) -> Tensor:
    """Between 0.1 and 0.9."""
    return y.sigmoid() * 0.8 + 0.1


def number(y: Tensor) -> Tensor:
    return y if y.is_floating_point() else y.to(torch.float64)


# ---- elementwise ---------------------------------------------------------------------------------

_OF_BITS = (aten.bitwise_not, aten.logical_not)
_UNARY: list[Callable[[Tensor], Tensor]] = [
    (lambda y, op=op: op(y > 0) if op in _OF_BITS else op(positive(y))) for op in elementwise.UNARY
]
_BITS = {
    aten.logical_and, aten.logical_or, aten.logical_xor, aten.bitwise_and, aten.bitwise_or,
    aten.bitwise_xor,
}  # fmt: skip
_BINARY_OTHERS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    aten.clamp: lambda y, z: y.clamp(-0.3, 0.7),
    aten.masked_fill: lambda y, z: y.masked_fill(z > 0.5, 0.25),
    aten.lerp: lambda y, z: y.lerp(z, 0.3),
    aten.addcmul: lambda y, z: torch.addcmul(y, y, z),
    aten.addcdiv: lambda y, z: torch.addcdiv(y, y, z),
    aten.clamp_min: lambda y, z: y.clamp_min(0.2),
    aten.clamp_max: lambda y, z: y.clamp_max(0.6),
}


def _binary(op: Any) -> Callable[[Tensor, Tensor], Tensor]:
    if op in _BINARY_OTHERS:
        return _BINARY_OTHERS[op]
    if op in _BITS:
        return lambda y, z: op(y > 0.5, z > 0.4)
    return lambda y, z: op(y, z)


_BINARY = [_binary(op) for op in elementwise.BINARY]


def _cast(op: Any) -> Callable[[Tensor], Tensor]:
    match op:
        case aten.to:
            return lambda y: y.to(torch.float32).to(torch.float64)
        case aten.type_as:
            return lambda y: y.type_as(y)
        case aten._to_copy:
            return lambda y: aten._to_copy(y, dtype=torch.float64)
        case aten.detach:
            return lambda y: y + y.detach()
        case _:
            return lambda y: op(y) * 1.5


_CASTS = [_cast(op) for op in elementwise.CASTS]


def unary(s: State, y: Tensor, k: int) -> Tensor:
    return number(_UNARY[k % len(_UNARY)](y)).tanh()


def binary(s: State, y: Tensor, k: int) -> Tensor:
    """With an earlier value, or with one that every slice shares."""
    others = (s.like, lambda y: ramp(y) if y.dim() else y)
    other = others[k // len(_BINARY) % 2](y)
    return number(_BINARY[k % len(_BINARY)](positive(y), positive(other)))


def cast(s: State, y: Tensor, k: int) -> Tensor:
    return _CASTS[k % len(_CASTS)](y)


def arithmetic(s: State, y: Tensor, k: int) -> Tensor:
    z = s.like(y)
    match k % 10:
        case 0:
            return y + z
        case 1:
            return y - 0.5 * z
        case 2:
            return y * z
        case 3:
            return y / positive(z)
        case 4:
            return y * ramp(y) if y.dim() else y * 2
        case 5:
            return y + ramp(y) if y.dim() else y + 1
        case 6:
            return number((y * 3).long() // 2) + y
        case 7:
            return number(y > z) + number(y.round().eq(z.round())) + y
        case 8:
            return y + s.values[0].sum() / 100
        case _:
            return y * s.weight(y.shape[-1]) if y.dim() and _is_small(y.shape[-1]) else -y


def loss(s: State, y: Tensor, k: int) -> Tensor:
    z, reduction = positive(s.like(y)).detach(), "mean" if k // 7 % 4 == 3 else "none"
    p = positive(y)
    functions: list[Callable[[], Tensor]] = [
        lambda: F.mse_loss(p, z, reduction=reduction),
        lambda: F.l1_loss(p, z, reduction=reduction),
        lambda: F.smooth_l1_loss(p, z, reduction=reduction),
        lambda: F.huber_loss(p, z, reduction=reduction),
        lambda: F.kl_div(p.log(), z, reduction=reduction),
        lambda: F.binary_cross_entropy(p, z, reduction=reduction),
        lambda: F.binary_cross_entropy_with_logits(y, z, reduction=reduction),
    ]
    return functions[k % 7]() + (y if reduction == "mean" else 0)


def filled(s: State, y: Tensor, k: int) -> Tensor:
    mask = F.dropout(y, 0.5, training=False)
    match k % 7:
        case 0:
            return mask + torch.zeros_like(y)
        case 1:
            return y * torch.ones_like(y) * 0.5
        case 2:
            return y + torch.full_like(y, 0.25)
        case 3:
            return y + aten.fill(y, 0.5)
        case 4:
            return y + aten.zero(y)
        case 5:
            return y + y.new_zeros(y.shape) + y.new_full(y.shape, 0.5)
        case _:
            return y * y.new_ones(y.shape) + torch.zeros(y.shape, dtype=y.dtype)


def created(s: State, y: Tensor, k: int) -> Tensor:
    if not y.dim():
        return y
    num = y.shape[-1]
    match k % 5:
        case 0:
            return y * torch.ones(num, dtype=y.dtype)
        case 1:
            return y + torch.full((num,), 0.5, dtype=y.dtype)
        case 2:
            return y + torch.empty(num, dtype=y.dtype).zero_()
        case 3:
            return y + y.new_empty(num).fill_(1)
        case _:
            return y * (torch.arange(num, dtype=y.dtype) + y.shape[0])


def drawn(s: State, y: Tensor, k: int) -> Tensor:
    """Operators that draw for the whole batch, in a way that no draw changes the value."""
    match k % 5:
        case 0:
            return y + torch.rand_like(y) * 0
        case 1:
            return y + torch.randn_like(y) * 0
        case 2:
            return y + torch.bernoulli(torch.ones_like(y))
        case 3:
            return y + number(torch.randint_like(y, 1, 2))
        case _:
            return y + F.dropout(torch.zeros_like(y), 0.5, training=True)


# ---- products ------------------------------------------------------------------------------------


def _is_small(*sizes: Any) -> bool:
    """Whether a parameter of these sizes can be had; never of a size that the batch has a part in."""
    num = 1
    for size in sizes:
        if not isinstance(size, int):
            return False
        num *= size
    return num <= 256


def product(s: State, y: Tensor, k: int) -> Tensor:
    if not y.dim() or not _is_small(y.shape[-1], 4):
        return y
    num = y.shape[-1]
    match k % 9:
        case 0:
            return y @ s.weight(num, 4)
        case 1:
            return F.linear(y, s.weight(4, num))
        case 2:
            return F.linear(y, s.weight(2, num), s.weight(2))
        case 3:
            return y @ s.weight(num)
        case 4 if y.dim() >= 2:
            return y @ y.transpose(-1, -2) / num
        case 5 if y.dim() >= 2:
            return torch.einsum("...d,df->...f", y, s.weight(num, 3))
        case 6 if y.dim() >= 2:
            return torch.addmm(s.weight(3), y.reshape(-1, num), s.weight(num, 3))
        case 7 if y.dim() == 3:
            return torch.einsum("abd,abe->ade", y, s.like(y))
        case 8 if y.dim() == 3:
            return torch.bmm(y, s.like(y).transpose(1, 2)) / num
        case _:
            return y.matmul(s.weight(num, 2))


def attended(s: State, y: Tensor, k: int) -> Tensor:
    if y.dim() != 4:
        y = y.unsqueeze(1) if y.dim() == 3 else y
    if y.dim() != 4:
        return y
    # torch 2.13 reads beyond a single row whose strides are those of a transposed one.
    q, v = s.like(y).contiguous(), y.contiguous()
    return F.scaled_dot_product_attention(q, v, v, is_causal=bool(k % 2))


def normed(s: State, y: Tensor, k: int) -> Tensor:
    if not y.dim() or not _is_small(y.shape[-1]):
        return y
    num = y.shape[-1]
    match k % 5:
        case 0:
            return F.rms_norm(y, (num,), s.weight(num), 1e-3)
        case 1:
            return F.layer_norm(y, (num,), s.weight(num), None, 1e-3)
        case 2 if y.dim() == 3 and isinstance(y.shape[1], int):
            return F.group_norm(y, 1, eps=1e-3)
        case 3 if y.dim() == 3 and isinstance(y.shape[1], int):
            mean, var = s.weight(y.shape[1]), s.weight(y.shape[1]).abs() + 1
            running = (None, None) if k // 5 % 2 else (mean, var)
            return F.batch_norm(y, *running, training=bool(k // 5 % 2), eps=1e-3)
        case _:
            return F.layer_norm(y, (num,), eps=1e-3)


def per_sample(s: State, y: Tensor, k: int) -> Tensor:
    if y.dim() != 3 or not all(isinstance(size, int) for size in y.shape[1:]):
        return y
    num, long = y.shape[1], y.shape[2]
    if long < 2 or num * 3 > 200:
        return y
    square = y.unsqueeze(2)
    match k % 8:
        case 0:
            return F.conv1d(y, s.weight(num, num, 1))
        case 1:
            return F.conv2d(square, s.weight(num, num, 1, 1)).squeeze(2)
        case 2:
            return F.avg_pool1d(y, 2)
        case 3:
            return F.max_pool1d(y, 2)
        case 4:
            return F.adaptive_avg_pool1d(y, 2)
        case 5:
            return F.avg_pool2d(square, (1, 2)).squeeze(2)
        case 6:
            return F.max_pool2d(square, (1, 2)).squeeze(2)
        case _:
            return F.adaptive_avg_pool2d(square, (1, 2)).squeeze(2)


# ---- sums and orders -----------------------------------------------------------------------------


def reduced(s: State, y: Tensor, k: int) -> Tensor:
    if not y.dim():
        return y
    dim, keep = k // 15 % y.dim(), bool(k // 45 % 2)
    match k % 15:
        case 0 | 1:
            return y.sum(dim, keep)
        case 2:
            return y.mean(dim, keep)
        case 3:
            return y.amax(dim, keep)
        case 4:
            return y.amin(dim, keep)
        case 5:
            return positive(y).prod(dim, keep)
        case 6:
            return number((y > 0).any(dim, keep)) + y.amax(dim, keep)
        case 7:
            return number((y > 0).all(dim, keep)) + y.amin(dim, keep)
        case 8:
            return torch.linalg.vector_norm(positive(y), dim=dim, keepdim=keep)
        case 9:
            return y.logsumexp(dim, keep)
        case 10:
            return y.var(dim, correction=0, keepdim=keep)
        case 11:
            return (positive(y) * 2 + ramp(y)).std(dim, correction=0, keepdim=keep)
        case 12:
            return number((y > 0).count_nonzero(dim)) + y.sum(dim)
        case 13:
            return y.sum()
        case _:
            return aten.norm(positive(y), 2, [dim], keep)


def extreme(s: State, y: Tensor, k: int) -> Tensor:
    if not y.dim():
        return y
    dim = k // 8 % y.dim()
    match k % 8:
        case 0:
            return y.max(dim).values
        case 1:
            return y.min(dim).values
        case 2:
            return torch.add(*torch.var_mean(y, dim, correction=0))
        case 3:
            spread = positive(y) * 2 + ramp(y)
            return torch.add(*torch.std_mean(spread, dim, correction=0))
        case 4:
            return y.kthvalue(1, dim).values
        case 5:
            return y.median(dim).values
        case 6:
            return y.round().mode(dim).values + y.amax(dim)
        case _:
            return y.max()


def along(s: State, y: Tensor, k: int) -> Tensor:
    if not y.dim():
        return y
    dim = k // 11 % y.dim()
    match k % 11:
        case 0:
            return y.softmax(dim)
        case 1:
            return y.log_softmax(dim)
        case 2:
            return aten._softmax(y, dim, False)
        case 3:
            return aten._log_softmax(y, dim, False)
        case 4:
            return y.cumsum(dim)
        case 5:
            return positive(y).cumprod(dim)
        case 6:
            return y.logcumsumexp(dim)
        case 7:
            return F.glu(torch.cat([y, y], dim), dim)
        case 8:
            return y.cummax(dim).values
        case 9:
            return y.cummin(dim).values
        case _:
            return y.flip(dim) if k % 2 else y.roll(1, dim)


def ordered(s: State, y: Tensor, k: int) -> Tensor:
    """Indices come from the data and go into the value."""
    if not y.dim():
        return y
    dim = k // 9 % y.dim()
    match k % 9:
        case 0:
            return y.topk(1, dim).values
        case 1:
            values, ids = y.topk(1, dim)
            return values + y.gather(dim, ids)
        case 2:
            return y.sort(dim).values
        case 3:
            return y.gather(dim, y.argsort(dim, stable=True))
        case 4:
            return torch.take_along_dim(y, y.argmax(dim, keepdim=True), dim)
        case 5:
            return y.gather(dim, y.argmin(dim, keepdim=True)) + y
        case 6:
            ids = y.argmax(-1)
            return number(F.one_hot(ids, y.shape[-1])) + y if isinstance(y.shape[-1], int) else y
        case 7:
            ids = (positive(y) * 4).long()
            return F.embedding(ids, s.weight(4, 3)).sum(-1) + y
        case _:
            ids = y.argmax(dim, keepdim=True)
            return torch.zeros_like(y).scatter(dim, ids, 1.0) + y


def indexed(s: State, y: Tensor, k: int) -> Tensor:
    if not y.dim() or not isinstance(y.shape[-1], int):
        return y
    num, dim = y.shape[-1], y.dim() - 1
    ids = torch.arange(num).flip(0)
    order = y.reshape(-1).argsort(stable=True)
    match k % 14:
        case 12:
            (picked,) = torch.where(y.flatten(1)[:, 0] > 0)
            return torch.zeros_like(y).index_add(0, picked, y[picked])
        case 13:
            picked = (y.flatten(1)[:, 0] > 0).nonzero().squeeze(1)
            return torch.zeros_like(y).index_add(0, picked, y[picked]) + y
        case 0:
            return y[..., ids]
        case 1:
            return y.index_select(dim, ids)
        case 2:
            return torch.where(y > 0, y, s.like(y) * 0.5)
        case 3:
            return torch.zeros_like(y).index_add(dim, ids, y)
        case 4:
            return torch.zeros_like(y).index_copy(dim, ids, y)
        case 5:
            return y.scatter_add(dim, ids.expand(y.shape), s.like(y))
        case 6:
            return y.scatter_reduce(dim, ids.expand(y.shape), s.like(y), "sum")
        case 7:
            return y.masked_select(y > 0).sum() + y
        case 8:
            return y.reshape(-1)[order].view(y.shape)
        case 9:
            return torch.zeros_like(y.reshape(-1)).index_put([order], y.reshape(-1)).view(y.shape)
        case 10:
            counts = torch.bincount((positive(y.reshape(-1)) * 4).long(), minlength=4)
            return y + number(counts.sum())
        case _:
            return y + number((positive(y).detach() * 4).histc(4, 0, 4)).sum()


# ---- shapes --------------------------------------------------------------------------------------


def shaped(s: State, y: Tensor, k: int) -> Tensor:
    if not y.dim():
        return y.unsqueeze(0) if k % 2 else y.view(())
    num, at = y.dim(), k // 26 % y.dim()
    last: Any = y.shape[-1]
    functions: dict[int, Callable[[], Tensor]] = {
        0: lambda: y.transpose(at, (at + 1) % num),
        1: lambda: y.permute(*reversed(range(num))),
        2: lambda: y.movedim(at, 0),
        3: lambda: y.swapaxes(at, 0) + 0,
        4: lambda: y.unsqueeze(at),
        5: lambda: y.unsqueeze(at).squeeze(at),
        6: lambda: y.select(at, 0) if num > 1 else y,
        7: lambda: y.narrow(at, 0, 1),
        8: lambda: y[..., 1:] if last != 1 else y,
        9: lambda: y.flatten(0, 1) if num > 1 else y,
        10: lambda: y.reshape(y.shape[0], -1),
        11: lambda: y.reshape(-1, last),
        12: lambda: y.contiguous().view(*y.shape[:-1], 1, last),
        13: lambda: y.unflatten(-1, (1, last)),
        14: lambda: y.reshape_as(s.like(y)),
        15: lambda: y.contiguous().view_as(y),
        16: lambda: y.unsqueeze(at).expand(*y.shape[:at], 2, *y.shape[at:]),
        17: lambda: torch.broadcast_to(y, (2, *y.shape)).sum(0),
        18: lambda: y[..., :1].expand_as(y) + y,
        19: lambda: y.tril() if num > 1 else y,
        20: lambda: y.triu() if num > 1 else y,
        21: lambda: F.pad(y, (1, 0)),
        22: lambda: y.repeat(*[1] * (num - 1), 2),
        23: lambda: y.tile(2),
        24: lambda: y.mT if num > 1 else y,
        25: lambda: y.repeat_interleave(2, dim=at),
    }
    return functions[k % 26]()


def parted(s: State, y: Tensor, k: int) -> Tensor:
    if not y.dim():
        return y
    dim = k // 10 % y.dim()
    num: Any = y.shape[dim]
    match k % 10:
        case 0:
            return torch.cat([y, s.like(y)], dim)
        case 1:
            return torch.stack([y, s.like(y)], dim)
        case 2:
            return y.chunk(2, dim)[0]
        case 3:
            return y.split(1, dim)[0]
        case 4 if isinstance(num, int) and num > 1:
            return y.split([1, num - 1], dim)[1]
        case 5:
            return y.tensor_split(2, dim)[0] if isinstance(num, int) else y
        case 6 if isinstance(num, int):
            return torch.add(y.unbind(dim)[0], y.unbind(dim)[-1])
        case 7:
            return torch.cat([y, torch.zeros_like(y)], dim)
        case 8:
            pairs = torch.view_as_complex(torch.stack([y, s.like(y)], -1))
            return torch.view_as_real(pairs * 2).sum(-1)
        case _:
            return torch.stack([y, y * 2], -1).sum(-1)


def written(s: State, y: Tensor, k: int) -> Tensor:
    """In place, into a copy."""
    z = y * 1
    match k % 4:
        case 0 if z.dim():
            z[..., 0].add_(1)
        case 1:
            z.mul_(0.5).add_(y)
        case 2 if z.dim():
            z[..., :1] = 0
        case _:
            z.copy_(y * 2)
    return z


def scored(s: State, y: Tensor, k: int) -> Tensor:
    """A loss of classes, per row or over all rows."""
    if y.dim() < 2 or not isinstance(y.shape[-1], int):
        return y
    rows = y.reshape(-1, y.shape[-1])
    classes = rows.detach().argmax(-1)
    match k % 3:
        case 0:
            return F.cross_entropy(rows, classes, reduction="none").view(y.shape[:-1])
        case 1:
            return F.cross_entropy(rows, classes) + y
        case _:
            return F.nll_loss(rows.log_softmax(-1), classes, reduction="none").view(y.shape[:-1])


# ---- collectives ---------------------------------------------------------------------------------


def exchanged(s: State, y: Tensor, k: int) -> Tensor:
    """An all-to-all of blocks of a dim that is even; of the batch's own dim every eighth time."""
    dims = [
        d for d in range(y.dim()) if isinstance(y.shape[d], int) and y.shape[d] % NUM_RANKS == 0
    ]
    if not dims:
        return y
    dim = dims[k % len(dims)]
    rows = y.movedim(dim, 0).contiguous()
    half = rows.shape[0] // NUM_RANKS
    sent = c10d.all_to_all_single(rows, [half] * NUM_RANKS, [half] * NUM_RANKS, GROUP)
    return c10d.wait_tensor(sent).movedim(0, dim)


def gathered(s: State, y: Tensor, k: int) -> Tensor:
    """A collective that slices never take part in."""
    if not y.dim():
        return y
    match k % 3:
        case 0:
            return c10d.wait_tensor(c10d.all_reduce(y.contiguous(), "sum", GROUP)) / NUM_RANKS
        case 1:
            all_rows = c10d.all_gather_into_tensor(y.contiguous(), NUM_RANKS, GROUP)
            return c10d.wait_tensor(all_rows)[: y.shape[0]]
        case _:
            twice = torch.cat([y, y])
            part = c10d.reduce_scatter_tensor(twice, "sum", NUM_RANKS, GROUP)
            return c10d.wait_tensor(part) / NUM_RANKS


STEPS: dict[str, Step] = {
    step.__name__: step
    for step in (
        unary, binary, cast, arithmetic, loss, filled, created, drawn, product, attended, normed,
        per_sample, reduced, extreme, along, ordered, indexed, shaped, parted, written, scored,
        exchanged, gathered,
    )
}  # fmt: skip


def function_of(
    steps: tuple[tuple[str, int], ...],
) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """The program of x [B, S, D] and parameters [P]: the last value, and one from its middle."""

    def program(x: Tensor, weight_P: Tensor) -> tuple[Tensor, ...]:
        state = State([x], weight_P)
        for name, k in steps:
            y = STEPS[name](state, state.values[-1], k)
            state.values.append(y if _fits(y) else y.flatten()[:7])
        return state.values[-1], state.values[len(state.values) // 2]

    return program


def _fits(y: Tensor) -> bool:
    num: Any = y.numel()
    return bool(num <= MAX_ELEMENTS)
