"""For each operator a program that has to be sliced, and one in which it has to be refused.

Programs get x, fp64 [B, 4, 6]; i, int64 [B, 4] in [0, 6); and w, fp64 [6, 6], which has no rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from overlap import placement as pl
from overlap.rules import elementwise

aten = torch.ops.aten
B = 5
Program = Callable[[Tensor, Tensor, Tensor], Any]
Call = Callable[[Any, Tensor, Tensor], Any]


def first(value: Any) -> Any:
    return value[0]


def rows(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


POSITIVE: dict[str, Program] = {
    "aten.pow": lambda x, i, w: aten.pow(x, 3),
    "aten.clamp": lambda x, i, w: aten.clamp(x, -0.5, 0.5) + aten.clamp(x, min=w[0]),
    "aten.clamp_min": lambda x, i, w: aten.clamp_min(x, 0.1),
    "aten.clamp_max": lambda x, i, w: aten.clamp_max(x, 0.1),
    "aten.masked_fill": lambda x, i, w: aten.masked_fill(x, x > 0, 0.5),
    "aten.where": lambda x, i, w: aten.where(x > 0, x, w[0]) + x[torch.where(i[:, 0] > 2)].sum(0),
    "aten.lerp": lambda x, i, w: aten.lerp(x, w[0], 0.3),
    "aten.addcmul": lambda x, i, w: aten.addcmul(x, x, w[0], value=2),
    "aten.addcdiv": lambda x, i, w: aten.addcdiv(x, x, w[0], value=2),
    "aten.bitwise_and": lambda x, i, w: aten.bitwise_and(i, 3),
    "aten.bitwise_or": lambda x, i, w: aten.bitwise_or(i, i + 1),
    "aten.bitwise_xor": lambda x, i, w: aten.bitwise_xor(i, 5),
    "aten.bitwise_not": lambda x, i, w: aten.bitwise_not(i),
    "aten.add": lambda x, i, w: aten.add(x, w[0], alpha=2) + aten.add(x.sum(0), x.sum(0)),
    "aten.sub": lambda x, i, w: aten.sub(x, w[0], alpha=2),
    "aten.mul": lambda x, i, w: aten.mul(x, w[0]) + aten.mul(w[0], x.sum(0)),
    "aten.div": lambda x, i, w: aten.div(x, w[0]) + aten.div(x.sum(0), 3),
    "aten.eq": lambda x, i, w: aten.eq(i, 3),
    "aten.floor_divide": lambda x, i, w: aten.floor_divide(i, 2),
    "aten.alias": lambda x, i, w: aten.alias(x),
    "aten.to": lambda x, i, w: aten.to(x, torch.float32),
    "aten._to_copy": lambda x, i, w: aten._to_copy(x.sum((0, 1)), dtype=torch.float32),
    "aten.type_as": lambda x, i, w: aten.type_as(i, x)[..., None] + aten.type_as(w[0], x),
    "aten.dropout": lambda x, i, w: aten.dropout(x, 0.5, False),
    "aten.zeros_like": lambda x, i, w: aten.zeros_like(x) + x,
    "aten.ones_like": lambda x, i, w: aten.ones_like(x) + x,
    "aten.full_like": lambda x, i, w: aten.full_like(x, 2.0) + x,
    "aten.empty_like": lambda x, i, w: aten.fill(aten.empty_like(x), 1.0) + x,
    "aten.fill": lambda x, i, w: aten.fill(x, 1.0) + x,
    "aten.zero": lambda x, i, w: aten.zero(x.detach()) + x,
    "aten.kl_div": lambda x, i, w: aten.kl_div(x, x.sigmoid(), 0),
    "aten.binary_cross_entropy": lambda x, i, w: aten.binary_cross_entropy(
        x.sigmoid(), w[0].sigmoid().expand_as(x), None, 0
    ),
    # contraction
    "aten.linear": lambda x, i, w: aten.linear(x, w, w[0]),
    "aten.matmul": lambda x, i, w: aten.matmul(x, w) + aten.matmul(w[:4, :4], x),
    "aten.mm": lambda x, i, w: aten.mm(rows(x), w),
    "aten.bmm": lambda x, i, w: aten.bmm(x, x.transpose(1, 2)),
    "aten.mv": lambda x, i, w: aten.mv(rows(x), w[0]),
    "aten.addmm": lambda x, i, w: aten.addmm(w[0], rows(x), w, beta=2),
    "aten.einsum": lambda x, i, w: aten.einsum("bsd,de->ebs", [x, w]),
    "aten.scaled_dot_product_attention": lambda x, i, w: aten.scaled_dot_product_attention(x, x, x),
    "aten.rms_norm": lambda x, i, w: aten.rms_norm(x, [6], w[0]),
    "aten.layer_norm": lambda x, i, w: aten.layer_norm(x, [6], w[0], w[1]),
    "aten.batch_norm": lambda x, i, w: aten.batch_norm(
        x, None, None, w[0, :4].detach(), w[1, :4].detach().abs(), False, 0.1, 1e-5, False
    ),
    "aten.group_norm": lambda x, i, w: aten.group_norm(x, 2),
    "aten.conv1d": lambda x, i, w: aten.conv1d(x, w[:, :4, None]),
    "aten.conv2d": lambda x, i, w: aten.conv2d(x.unsqueeze(1), w[:1, None, None, :3]),
    "aten.conv3d": lambda x, i, w: aten.conv3d(x[:, None, None], w[:1, None, None, None, :3]),
    "aten.avg_pool1d": lambda x, i, w: aten.avg_pool1d(x, [2]),
    "aten.avg_pool2d": lambda x, i, w: aten.avg_pool2d(x[:, None], [2, 2]),
    "aten.max_pool1d": lambda x, i, w: aten.max_pool1d(x, [2]),
    "aten.max_pool2d": lambda x, i, w: aten.max_pool2d(x[:, None], [2, 2]),
    "aten.adaptive_avg_pool1d": lambda x, i, w: aten.adaptive_avg_pool1d(x, [2]),
    "aten.adaptive_avg_pool2d": lambda x, i, w: aten.adaptive_avg_pool2d(x[:, None], [2, 2]),
    "aten.embedding": lambda x, i, w: aten.embedding(w, i, 2),
    "aten.one_hot": lambda x, i, w: aten.one_hot(i, 6),
    # reduction
    "aten.sum": lambda x, i, w: (aten.sum(x), aten.sum(x, [1]), aten.sum(x, [0], True)),
    "aten.max": lambda x, i, w: first(aten.max(x, 1)) + aten.max(x, w[0]).sum(1),
    "aten.min": lambda x, i, w: first(aten.min(x, -1)),
    "aten.norm": lambda x, i, w: aten.norm(x, 2, [1]),
    "aten.linalg_vector_norm": lambda x, i, w: aten.linalg_vector_norm(x, 2, [1]),
    "aten.kthvalue": lambda x, i, w: first(aten.kthvalue(x, 2, 1)),
    "aten.topk": lambda x, i, w: first(aten.topk(x, 2, -1, False)),
    "aten.flip": lambda x, i, w: aten.flip(x, [1, 2]),
    "aten.roll": lambda x, i, w: aten.roll(x, [1, 2], [1, 2]),
    "aten.sort": lambda x, i, w: first(aten.sort(x, 1)),
    "aten.argsort": lambda x, i, w: aten.argsort(x, -1),
    "aten.argmax": lambda x, i, w: aten.argmax(x, 1),
    "aten.argmin": lambda x, i, w: aten.argmin(x, 1, True),
    "aten.cross_entropy_loss": lambda x, i, w: aten.cross_entropy_loss(
        rows(x), i.flatten(), w[0].detach().abs(), 0, 2, 0.1
    ),
    "aten.nll_loss": lambda x, i, w: aten.nll_loss(rows(x), i.flatten(), None, 0),
    "aten.nll_loss_nd": lambda x, i, w: aten.nll_loss_nd(x.transpose(1, 2), i, None, 0),
    # shape
    "aten.view": lambda x, i, w: aten.view(x, [B * 4, -1]),
    "aten.reshape": lambda x, i, w: aten.reshape(x, [B, 24]),
    "aten._unsafe_view": lambda x, i, w: aten._unsafe_view(x, [B, 2, 12]),
    "aten.unflatten": lambda x, i, w: aten.unflatten(x, 0, [B, 1]),
    "aten.flatten": lambda x, i, w: aten.flatten(x, 0, 1),
    "aten.view_as": lambda x, i, w: aten.view_as(x, x * 2),
    "aten.reshape_as": lambda x, i, w: aten.reshape_as(rows(x), x),
    "aten.view_as_complex": lambda x, i, w: aten.view_as_complex(x.view(B, 4, 3, 2)).abs(),
    "aten.view_as_real": lambda x, i, w: aten.view_as_real(
        aten.view_as_complex(x.view(B, 4, 3, 2))
    ),
    "aten.expand": lambda x, i, w: (
        aten.expand(x[:, :1], [B, 4, 6]) + aten.expand(x, [2, -1, -1, -1])
    ),
    "aten.broadcast_to": lambda x, i, w: aten.broadcast_to(x[:, :1], [B, 4, 6]),
    "aten.expand_as": lambda x, i, w: aten.expand_as(x[:, :1], x) + aten.expand_as(w[0], x),
    "aten.transpose": lambda x, i, w: aten.transpose(x, 0, -1),
    "aten.t": lambda x, i, w: aten.t(rows(x)),
    "aten.permute": lambda x, i, w: aten.permute(x, [2, 0, 1]),
    "aten.swapaxes": lambda x, i, w: aten.swapaxes(x, 0, 1),
    "aten.swapdims": lambda x, i, w: aten.swapdims(x, 0, 1),
    "aten.movedim": lambda x, i, w: aten.movedim(x, 0, 2),
    "aten.moveaxis": lambda x, i, w: aten.moveaxis(x, 0, 2),
    "aten.mT": lambda x, i, w: aten.mT(x),
    "aten.numpy_T": lambda x, i, w: aten.numpy_T(rows(x)),
    "aten.adjoint": lambda x, i, w: aten.adjoint(x),
    "aten.unsqueeze": lambda x, i, w: aten.unsqueeze(x, 0) * aten.unsqueeze(x, -1).sum(-1),
    "aten.squeeze": lambda x, i, w: aten.squeeze(x[:, :1], 1),
    "aten.select": lambda x, i, w: aten.select(x, 1, -1),
    "aten.slice": lambda x, i, w: aten.slice(x, 1, 1, 3) + aten.slice(x, 0, None, None)[:, :1],
    "aten.narrow": lambda x, i, w: aten.narrow(x, 2, 1, 3),
    "aten.tril": lambda x, i, w: aten.tril(x),
    "aten.triu": lambda x, i, w: aten.triu(x, 1),
    "aten.pad": lambda x, i, w: aten.pad(x, [1, 0, 2, 0]),
    "aten.constant_pad_nd": lambda x, i, w: aten.constant_pad_nd(x, [1, 0, 2, 0], 3.0),
    "aten.repeat": lambda x, i, w: aten.repeat(x, [2, 1, 3, 1]),
    "aten.tile": lambda x, i, w: aten.tile(x, [2]),
    "aten.unbind": lambda x, i, w: first(aten.unbind(x, 1)),
    "aten.split": lambda x, i, w: first(aten.split(x, 3, 1)),
    "aten.split_with_sizes": lambda x, i, w: first(aten.split_with_sizes(x, [3, 1], 1)),
    "aten.chunk": lambda x, i, w: first(aten.chunk(x, 3, 1)),
    "aten.tensor_split": lambda x, i, w: first(aten.tensor_split(x, 3, 1)),
    "aten.unsafe_split": lambda x, i, w: first(aten.unsafe_split(x, 3, 1)),
    "aten.unsafe_chunk": lambda x, i, w: first(aten.unsafe_chunk(x, 3, 1)),
    "aten.unsafe_split_with_sizes": lambda x, i, w: first(
        aten.unsafe_split_with_sizes(x, [3, 1], 1)
    ),
    "aten.cat": lambda x, i, w: aten.cat([x, torch.ones(B, 1, 6, dtype=x.dtype)], 1),
    "aten.concat": lambda x, i, w: aten.concat([x, x], 2),
    "aten.stack": lambda x, i, w: aten.stack([x, x * 2], 0) + aten.stack([x, x], 0),
    # indexing
    "aten.index": lambda x, i, w: aten.index(w, [i]) + aten.index(x, [None, torch.arange(4)]),
    "aten.index_select": lambda x, i, w: aten.index_select(x, -1, torch.arange(2)),
    "aten.gather": lambda x, i, w: aten.gather(x, 2, i.unsqueeze(-1)),
    "aten.take_along_dim": lambda x, i, w: aten.take_along_dim(x, i.unsqueeze(-1), 2),
    "aten.scatter": lambda x, i, w: aten.scatter(x, 2, i.unsqueeze(-1), 0.5),
    "aten.scatter_add": lambda x, i, w: aten.scatter_add(x, 2, i.unsqueeze(-1), x[..., :1]),
    "aten.scatter_reduce": lambda x, i, w: aten.scatter_reduce(
        x, 2, i.unsqueeze(-1), x[..., :1], "amax", include_self=False
    ),
    "aten.nonzero_numpy": lambda x, i, w: x[first(aten.nonzero_numpy(i[:, 0] > 2))].sum(0),
    "aten.nonzero": lambda x, i, w: x[aten.nonzero(i[:, 0] > 2).squeeze(1)].sum(0),
    "aten.repeat_interleave": lambda x, i, w: (
        aten.repeat_interleave(x, 2, 0) + aten.repeat_interleave(x, 2, 1)[0, 0]
    ),
}
NEGATIVE: dict[str, Program] = {
    "aten.pow": lambda x, i, w: aten.pow(x.sum(0), 2),
    "aten.clamp": lambda x, i, w: aten.clamp(x.sum(0), 0),
    "aten.clamp_min": lambda x, i, w: aten.clamp_min(x.sum(0), 0),
    "aten.clamp_max": lambda x, i, w: aten.clamp_max(x.sum(0), 0),
    "aten.masked_fill": lambda x, i, w: aten.masked_fill(x.sum(0), w[0] > 0, 0.5),
    "aten.where": lambda x, i, w: aten.where(w[0] > 0, x.sum(0), 0.5),
    "aten.lerp": lambda x, i, w: aten.lerp(x.sum(0), w[0], 0.3),
    "aten.addcmul": lambda x, i, w: aten.addcmul(x.sum(0), w[0], w[0]),
    "aten.addcdiv": lambda x, i, w: aten.addcdiv(x.sum(0), w[0], w[0]),
    "aten.bitwise_and": lambda x, i, w: aten.bitwise_and(i.sum(0), 3),
    "aten.bitwise_or": lambda x, i, w: aten.bitwise_or(i.sum(0), 3),
    "aten.bitwise_xor": lambda x, i, w: aten.bitwise_xor(i.sum(0), 3),
    "aten.bitwise_not": lambda x, i, w: aten.bitwise_not(i.sum(0)),
    "aten.add": lambda x, i, w: aten.add(x.sum(0), 1),
    "aten.sub": lambda x, i, w: aten.sub(x.sum(0), w[0]),
    "aten.mul": lambda x, i, w: aten.mul(x.sum(0), x.sum(0)),
    "aten.div": lambda x, i, w: aten.div(w[0], x.sum(0)),
    "aten.eq": lambda x, i, w: aten.eq(i.sum(0), 3),
    "aten.floor_divide": lambda x, i, w: aten.floor_divide(i.sum(0), 2),
    "aten.to": lambda x, i, w: aten.to(x.sum(0), torch.int64),
    "aten._to_copy": lambda x, i, w: aten._to_copy(x.sum(0), dtype=torch.bfloat16),
    "aten.dropout": lambda x, i, w: aten.dropout(x.sum(0), 0.5, True),
    "aten.kl_div": lambda x, i, w: aten.kl_div(x, x, 1),
    "aten.binary_cross_entropy": lambda x, i, w: aten.binary_cross_entropy(
        x.sigmoid(), x.sigmoid()
    ),
    "aten.linear": lambda x, i, w: aten.linear(x.transpose(0, 2), torch.ones(2, B, dtype=x.dtype)),
    "aten.matmul": lambda x, i, w: aten.matmul(rows(x).t(), rows(x)),
    "aten.mm": lambda x, i, w: aten.mm(rows(x), rows(x).t()),
    "aten.bmm": lambda x, i, w: aten.bmm(x.transpose(0, 1), x.permute(1, 2, 0)),
    "aten.mv": lambda x, i, w: aten.mv(rows(x).t(), torch.ones(4 * B, dtype=x.dtype)),
    "aten.dot": lambda x, i, w: aten.dot(x[:, 0, 0], x[:, 0, 1]),
    "aten.addmm": lambda x, i, w: aten.addmm(rows(x), rows(x), w),
    "aten.einsum": lambda x, i, w: aten.einsum("bsd,bse->de", [x, x]),
    "aten.scaled_dot_product_attention": lambda x, i, w: aten.scaled_dot_product_attention(
        *[x.transpose(0, 1)] * 3
    ),
    "aten.rms_norm": lambda x, i, w: aten.rms_norm(x.permute(1, 2, 0), [B]),
    "aten.layer_norm": lambda x, i, w: aten.layer_norm(x, [B, 4, 6]),
    "aten.batch_norm": lambda x, i, w: aten.batch_norm(
        x, None, None, None, None, True, 0.1, 1e-5, False
    ),
    "aten.group_norm": lambda x, i, w: aten.group_norm(x.transpose(0, 1), 1),
    "aten.conv1d": lambda x, i, w: aten.conv1d(x.permute(1, 2, 0), w[:, :, None]),
    "aten.conv2d": lambda x, i, w: aten.conv2d(x[None], torch.ones(1, B, 1, 1, dtype=x.dtype)),
    "aten.conv3d": lambda x, i, w: aten.conv3d(x[None, None], w[:1, None, None, None, :1]),
    "aten.avg_pool1d": lambda x, i, w: aten.avg_pool1d(x[..., 0], [2]),
    "aten.avg_pool2d": lambda x, i, w: aten.avg_pool2d(x, [2, 2]),
    "aten.max_pool1d": lambda x, i, w: aten.max_pool1d(x[..., 0], [2]),
    "aten.max_pool2d": lambda x, i, w: aten.max_pool2d(x, [2, 2]),
    "aten.adaptive_avg_pool1d": lambda x, i, w: aten.adaptive_avg_pool1d(x[..., 0], [2]),
    "aten.adaptive_avg_pool2d": lambda x, i, w: aten.adaptive_avg_pool2d(x, [2, 2]),
    "aten.embedding": lambda x, i, w: aten.embedding(rows(x), i),
    "aten.one_hot": lambda x, i, w: aten.one_hot(i.sum(0), 40),
    "aten.sum": lambda x, i, w: aten.sum(aten._to_copy(x, dtype=torch.bfloat16), [0]),
    "aten.flip": lambda x, i, w: aten.flip(x, [0]),
    "aten.roll": lambda x, i, w: aten.roll(x, [1], []),
    "aten.max": lambda x, i, w: aten.max(x),
    "aten.min": lambda x, i, w: aten.min(x),
    "aten.norm": lambda x, i, w: aten.norm(x, 2),
    "aten.linalg_vector_norm": lambda x, i, w: aten.linalg_vector_norm(x, 2),
    "aten.kthvalue": lambda x, i, w: first(aten.kthvalue(x, 2, 0)),
    "aten.topk": lambda x, i, w: first(aten.topk(x, 2, 0)),
    "aten.sort": lambda x, i, w: first(aten.sort(x, 0)),
    "aten.argsort": lambda x, i, w: aten.argsort(x, 0),
    "aten.argmax": lambda x, i, w: aten.argmax(x),
    "aten.argmin": lambda x, i, w: aten.argmin(x, 0),
    "aten.multinomial": lambda x, i, w: aten.multinomial(x[:, 0].abs(), 2, True),
    "aten.randint_like": lambda x, i, w: aten.randint_like(x.detach(), 3) + x,
    "aten.native_dropout": lambda x, i, w: first(aten.native_dropout(x, 0.5, True)),
    "aten.cross_entropy_loss": lambda x, i, w: aten.cross_entropy_loss(rows(x), i.flatten()),
    "aten.nll_loss": lambda x, i, w: aten.nll_loss(rows(x), i.flatten()),
    "aten.nll_loss_nd": lambda x, i, w: aten.nll_loss_nd(x.transpose(1, 2), i),
    "aten.view": lambda x, i, w: aten.view(x, [6, 4 * B]),
    "aten.reshape": lambda x, i, w: aten.reshape(x.transpose(0, 1), [4 * B, 6]),
    "aten._unsafe_view": lambda x, i, w: aten._unsafe_view(x, [4, 30]),
    "aten.unflatten": lambda x, i, w: aten.unflatten(rows(x), 0, [4, B]),
    "aten.flatten": lambda x, i, w: aten.flatten(x.transpose(0, 1), 0, 1),
    "aten.view_as": lambda x, i, w: aten.view_as(x, torch.ones(4 * B, 6)),
    "aten.reshape_as": lambda x, i, w: aten.reshape_as(x.sum(0), torch.ones(24)),
    "aten.view_as_complex": lambda x, i, w: aten.view_as_complex(x.view(B, 4, 3, 2).sum(0)).abs(),
    "aten.view_as_real": lambda x, i, w: aten.view_as_real(
        aten.view_as_complex(x.view(B, 4, 3, 2)).sum(0)
    ),
    "aten.expand_as": lambda x, i, w: aten.expand_as(x.sum(0), x),
    "aten.broadcast_to": lambda x, i, w: aten.broadcast_to(x.sum(0), [2, 4, 6]),
    "aten.expand": lambda x, i, w: aten.expand(x.sum(0), [2, 4, 6]),
    "aten.t": lambda x, i, w: aten.t(x.sum(0)),
    "aten.transpose": lambda x, i, w: aten.transpose(x.sum(0), 0, 1),
    "aten.permute": lambda x, i, w: aten.permute(x.sum(0), [1, 0]),
    "aten.swapaxes": lambda x, i, w: aten.swapaxes(x.sum(0), 0, 1),
    "aten.swapdims": lambda x, i, w: aten.swapdims(x.sum(0), 0, 1),
    "aten.movedim": lambda x, i, w: aten.movedim(x.sum(0), 0, 1),
    "aten.moveaxis": lambda x, i, w: aten.moveaxis(x.sum(0), 0, 1),
    "aten.mT": lambda x, i, w: aten.mT(x.sum(0)),
    "aten.numpy_T": lambda x, i, w: aten.numpy_T(x.sum(0)),
    "aten.adjoint": lambda x, i, w: aten.adjoint(x.sum(0)),
    "aten.unsqueeze": lambda x, i, w: aten.unsqueeze(x.sum(0), 0),
    "aten.squeeze": lambda x, i, w: aten.squeeze(x, 0),
    "aten.select": lambda x, i, w: aten.select(x, 0, 1),
    "aten.slice": lambda x, i, w: aten.slice(x, 0, 1, 3),
    "aten.narrow": lambda x, i, w: aten.narrow(x, 0, 1, 3),
    "aten.tril": lambda x, i, w: aten.tril(rows(x)),
    "aten.triu": lambda x, i, w: aten.triu(rows(x)),
    "aten.pad": lambda x, i, w: aten.pad(x, [0, 0, 0, 0, 1, 0]),
    "aten.constant_pad_nd": lambda x, i, w: aten.constant_pad_nd(x, [0, 0, 0, 0, 1, 0]),
    "aten.repeat": lambda x, i, w: aten.repeat(x, [2, 1, 1]),
    "aten.tile": lambda x, i, w: aten.tile(x, [2, 1, 1]),
    "aten.unbind": lambda x, i, w: first(aten.unbind(x, 0)),
    "aten.split": lambda x, i, w: first(aten.split(x, 3, 0)),
    "aten.split_with_sizes": lambda x, i, w: first(aten.split_with_sizes(x, [3, 2], 0)),
    "aten.chunk": lambda x, i, w: first(aten.chunk(x, 3, 0)),
    "aten.tensor_split": lambda x, i, w: first(aten.tensor_split(x, 3, 0)),
    "aten.unsafe_split": lambda x, i, w: first(aten.unsafe_split(x, 3, 0)),
    "aten.unsafe_chunk": lambda x, i, w: first(aten.unsafe_chunk(x, 3, 0)),
    "aten.unsafe_split_with_sizes": lambda x, i, w: first(
        aten.unsafe_split_with_sizes(x, [3, 2], 0)
    ),
    "aten.cat": lambda x, i, w: aten.cat([x, x], 0),
    "aten.concat": lambda x, i, w: aten.concat([x, w.view(1, 6, 6)[:, :4]], 0),
    "aten.stack": lambda x, i, w: aten.stack([x.sum(0), w[:4]], 0),
    "aten.index": lambda x, i, w: aten.index(x, [i[:, 0].clamp(0, B - 1)]),
    "aten.index_select": lambda x, i, w: aten.index_select(x, -3, torch.arange(2)),
    "aten.gather": lambda x, i, w: aten.gather(x, 0, i.clamp(0, B - 1).unsqueeze(-1)),
    "aten.take_along_dim": lambda x, i, w: aten.take_along_dim(
        x, i.clamp(0, B - 1).unsqueeze(-1), 0
    ),
    "aten.scatter": lambda x, i, w: aten.scatter(
        x, 2, torch.zeros(1, 4, 1, dtype=torch.int64), 0.5
    ),
    "aten.scatter_add": lambda x, i, w: aten.scatter_add(
        w, 0, rows(i)[:, None].expand(-1, 6), rows(x)
    ),
    "aten.scatter_reduce": lambda x, i, w: aten.scatter_reduce(
        w, 0, rows(i)[:, None].expand(-1, 6), rows(x), "sum"
    ),
    "aten.index_add": lambda x, i, w: aten.index_add(w, 0, i.flatten(), rows(x)),
    "aten.index_put": lambda x, i, w: aten.index_put(x, [i[:, 0].clamp(0, B - 1)], x),
    "aten.index_copy": lambda x, i, w: (
        aten.index_copy(w, 0, i[0], x[0]) + aten.index_copy(x, 0, i[:, 0].clamp(0, B - 1), x)[0, 0]
    ),
    "aten.masked_select": lambda x, i, w: aten.masked_select(x, x > 0).sum(),
    "aten.nonzero": lambda x, i, w: aten.nonzero(i > 2).sum(),
    "aten.nonzero_numpy": lambda x, i, w: first(aten.nonzero_numpy(i.sum(0))).sum(),
    "aten.bincount": lambda x, i, w: aten.bincount(i.flatten()).sum(),
    "aten.histc": lambda x, i, w: aten.histc(x, 10),
    "aten.repeat_interleave": lambda x, i, w: aten.repeat_interleave(x, 2),
    "aten._grouped_mm": lambda x, i, w: aten._grouped_mm(
        rows(x).to(torch.bfloat16).repeat(1, 4),
        w.to(torch.bfloat16).repeat(4, 4)[None],
        torch.tensor([20], dtype=torch.int32),
    ),
    "aten.item": lambda x, i, w: w * aten.item(x.sum()),
}


def _both(packet: Any, positive: Call, negative: Call) -> None:
    POSITIVE.setdefault(pl.name_of(packet), _bound(packet, positive))
    NEGATIVE.setdefault(pl.name_of(packet), _bound(packet, negative))


def _bound(packet: Any, call: Call) -> Program:
    return lambda x, i, w: call(packet, x, w)


def _families() -> None:
    """Operators that are all called alike."""
    for packet in elementwise.UNARY:
        _both(packet, lambda f, x, w: f(x.sigmoid()), lambda f, x, w: f(x.sum(0)))
    for packet in elementwise.BINARY:
        _both(
            packet,
            lambda f, x, w: f(x.sigmoid(), w[0].sigmoid()),
            lambda f, x, w: f(x.sum(0), w[0]),
        )
    for packet in elementwise.CASTS:
        POSITIVE.setdefault(pl.name_of(packet), _bound(packet, lambda f, x, w: f(x)))
    for packet in elementwise.LOSSES:
        _both(
            packet,
            lambda f, x, w: f(x, x.detach() * 2, reduction=0),
            lambda f, x, w: f(x, x.detach() * 2),
        )
    for name in ("mean", "amax", "amin", "logsumexp", "count_nonzero", "var", "std"):
        _along(name, lambda f, x, dim: f(x, [dim]))
    for name in (
        "prod",
        "any",
        "all",
        "cumsum",
        "cumprod",
        "logcumsumexp",
        "softmax",
        "log_softmax",
    ):
        _along(name, lambda f, x, dim: f(x, dim))
    for name in ("_softmax", "_log_softmax"):
        _along(name, lambda f, x, dim: f(x, dim, False))
    for name in ("median", "mode", "cummax", "cummin"):
        _along(name, lambda f, x, dim: first(f(x, dim)))
    for name in ("var_mean", "std_mean"):
        _along(name, lambda f, x, dim: first(f(x, [dim])))
    _along("glu", lambda f, x, dim: f(x.repeat_interleave(2, 0), dim))
    for name in ("rand_like", "randn_like", "bernoulli", "rrelu"):
        call = _bound(getattr(aten, name), lambda f, x, w: f(x.sigmoid()) + x)
        NEGATIVE.setdefault(f"aten.{name}", call)


def _along(name: str, call: Callable[[Any, Tensor, int], Any]) -> None:
    _both(getattr(aten, name), lambda f, x, w: call(f, x, 1), lambda f, x, w: call(f, x, 0))


_families()
