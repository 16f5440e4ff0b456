"""A transport of its own for tests: an all-to-all over the process group, as two operators.

`start` returns at once, with the buffer that will hold what arrives; `wait` returns it once it is
there. The backward of an exchange is the exchange back, as two operators again.

In a fake world this process is rank 0 beside ranks that have no rows, and return zeros for those they
get: sliced programs and those as written can be compared in one process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from overlap import Transport, register_transport
from overlap.runtime import groups
from tests import routed

_works: dict[int, list[dist.Work]] = {}


@torch.library.custom_op("overlap_tests::a2a_start", mutates_args=())
def start(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    buffer = x.new_zeros(sum(received), *x.shape[1:])
    if dist.get_backend(groups.resolve(group)) == "fake":
        buffer[: sent[0]] = x[: sent[0]]
        return buffer
    work = dist.all_to_all_single(
        buffer, x.contiguous(), list(received), list(sent), groups.resolve(group), async_op=True
    )
    assert work is not None
    _works.setdefault(buffer.untyped_storage().data_ptr(), []).append(work)
    return buffer


@torch.library.custom_op("overlap_tests::a2a_wait", mutates_args=())
def wait(buffer: Tensor) -> Tensor:
    for work in _works.pop(buffer.untyped_storage().data_ptr(), []):
        work.wait()
    return buffer.clone()


@start.register_fake
def _(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    return x.new_empty(sum(received), *x.shape[1:])


@wait.register_fake
def _(buffer: Tensor) -> Tensor:
    return torch.empty_like(buffer)


def _keep(ctx, inputs, output) -> None:
    _, ctx.received, ctx.sent, ctx.group = inputs


def _send_back(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
    gradient = wait(start(gradient, ctx.sent, ctx.received, ctx.group))
    return gradient, None, None, None


start.register_autograd(_send_back, setup_context=_keep)
wait.register_autograd(lambda ctx, gradient: gradient)


def all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    return wait(start(x, received, sent, group))


register_transport(
    Transport(
        torch.ops.overlap_tests.a2a_start,
        wait=torch.ops.overlap_tests.a2a_wait,
        rows="x",
        group="group",
        output_splits="received",
        input_splits="sent",
    )
)


class Layer(routed.Layer):
    """A routed layer over this transport."""

    def exchange(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        s = self.steps
        even = [routed.E // self.ranks] * self.ranks
        received_PL = all_to_all(counts_E, even, even, self.group).view(self.ranks, -1)
        ins, outs = counts_E.view(self.ranks, -1).sum(1).tolist(), received_PL.sum(1).tolist()
        rows_ND, back = s.regroup(received_PL, all_to_all(rows_RD, outs, ins, self.group))
        rows_ND = s.back(s.experts(self, rows_ND, received_PL), back)
        return all_to_all(rows_ND, ins, outs, self.group)
