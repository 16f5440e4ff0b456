"""The baselines that slicing is measured against, written by hand: a training step of an MoE model.

    python -m benchmarks.handwritten --link 400 [--json]

Two ranks, expert parallel. Per layer: attention, router, dispatch (all-to-all), experts, combine
(all-to-all). The variants compute the same loss and gradients, within rounding:

    eager          each all-to-all is waited for where it is started
    sliced, N=2    the batch in N slices that take turns; while one's rows travel, another computes

      slice 0   attend |..dispatch..| experts |..combine..| attend ...
      slice 1           attend |..dispatch..| experts |..combine..| ...

each with gloo's all-to-all and with one made of sends and receives: gloo's takes twice as long for
a rank that enters late, which would flatter the sliced variants.

By hand means: each slice's forward and backward is cut at its all-to-alls into separate autograd
graphs; weight gradients are left out of them, and computed while the all-to-all that the input
gradients go into is in flight, each GEMM accumulating into the gradient.

Shapes: B batch, T tokens, D width, F expert width, K experts per token, N = B * T rows, R = N * K.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.netns import LinkUnavailable, shaped_link

Splits = list[int]
Linear = Callable[[Tensor, Tensor], Tensor]
AllToAll = Callable[[Tensor, Tensor, Splits, Splits], list[Any]]


@dataclass(frozen=True)
class Shape:
    batch: int = 8
    tokens: int = 128
    width: int = 256
    heads: int = 8
    expert_width: int = 512
    experts: int = 8
    experts_per_token: int = 2
    layers: int = 2
    classes: int = 256


# ---- the model ----------------------------------------------------------------------------------


@dataclass
class Layer:
    """Weights, all [out, in]; `up` and `down` hold this rank's experts."""

    norm_attention: Tensor
    qkv: Tensor
    out: Tensor
    norm_experts: Tensor
    router: Tensor
    up: list[Tensor]
    down: list[Tensor]

    def weights(self) -> list[Tensor]:
        dense = [self.norm_attention, self.qkv, self.out, self.norm_experts, self.router]
        return [*dense, *self.up, *self.down]


@dataclass
class Model:
    shape: Shape
    layers: list[Layer]
    norm: Tensor
    head: Tensor

    def weights(self) -> list[Tensor]:
        return [*(w for layer in self.layers for w in layer.weights()), self.norm, self.head]


def make_model(shape: Shape, rank: int, world: int) -> Model:
    """The same dense weights on every rank, and this rank's share of the experts."""
    generator = torch.Generator().manual_seed(0)

    def weight(*size: int) -> Tensor:
        drawn = torch.randn(size, generator=generator) / size[-1] ** 0.5
        return drawn.requires_grad_()

    def mine(weights: list[Tensor]) -> list[Tensor]:
        per_rank = len(weights) // world
        return weights[rank * per_rank : (rank + 1) * per_rank]

    def layer() -> Layer:
        d, f, experts = shape.width, shape.expert_width, range(shape.experts)
        return Layer(
            norm_attention=torch.ones(d, requires_grad=True),
            qkv=weight(3 * d, d),
            out=weight(d, d),
            norm_experts=torch.ones(d, requires_grad=True),
            router=weight(shape.experts, d),
            up=mine([weight(f, d) for _ in experts]),
            down=mine([weight(d, f) for _ in experts]),
        )

    layers = [layer() for _ in range(shape.layers)]
    norm = torch.ones(shape.width, requires_grad=True)
    return Model(shape, layers, norm, weight(shape.classes, shape.width))


def make_batch(shape: Shape, rank: int) -> tuple[Tensor, Tensor]:
    """x_BTD and the class of each token."""
    generator = torch.Generator().manual_seed(1 + rank)
    x_BTD = torch.randn(shape.batch, shape.tokens, shape.width, generator=generator)
    classes_BT = torch.randint(shape.classes, (shape.batch, shape.tokens), generator=generator)
    return x_BTD, classes_BT


@dataclass
class Routed:
    """What attention and router leave: rows sorted by expert, and how to put them back."""

    residual_ND: Tensor
    rows_RD: Tensor
    gate_R: Tensor
    token_R: Tensor
    counts_E: Tensor


def attend(shape: Shape, layer: Layer, x_BTD: Tensor, linear: Linear) -> Routed:
    """Attention, then the routing of every token to its experts."""
    b, t, d = x_BTD.shape
    qkv = linear(F.rms_norm(x_BTD, (d,), layer.norm_attention), layer.qkv)
    q, k, v = (p.view(b, t, shape.heads, -1).transpose(1, 2) for p in qkv.chunk(3, dim=-1))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x_BTD = x_BTD + linear(attended.transpose(1, 2).reshape(b, t, d), layer.out)

    residual_ND = x_BTD.view(-1, d)
    normed_ND = F.rms_norm(residual_ND, (d,), layer.norm_experts)
    scores_NE = linear(normed_ND, layer.router).softmax(-1)
    gate_NK, expert_NK = scores_NE.topk(shape.experts_per_token)
    expert_R, order_R = expert_NK.flatten().sort(stable=True)
    token_R = order_R // shape.experts_per_token
    return Routed(
        residual_ND=residual_ND,
        rows_RD=normed_ND.index_select(0, token_R),
        gate_R=gate_NK.flatten().index_select(0, order_R),
        token_R=token_R,
        counts_E=expert_R.bincount(minlength=shape.experts),
    )


def run_experts(layer: Layer, rows_RD: Tensor, counts: Splits, linear: Linear) -> Tensor:
    """The rows arrive by source rank, then local expert: `counts` of each, and leave so."""
    experts = len(layer.up)
    pieces = rows_RD.split(counts)
    results: list[Tensor] = []
    for expert, (up, down) in enumerate(zip(layer.up, layer.down, strict=True)):
        mine = torch.cat(pieces[expert::experts])
        done = linear(F.silu(linear(mine, up)), down)
        results += done.split(counts[expert::experts])
    sources = len(counts) // experts
    return torch.cat([result for source in range(sources) for result in results[source::sources]])


def combine(
    residual_ND: Tensor, rows_RD: Tensor, gate_R: Tensor, token_R: Tensor, batch: int
) -> Tensor:
    out_ND = residual_ND.index_add(0, token_R, rows_RD * gate_R[:, None])
    return out_ND.view(batch, -1, out_ND.shape[-1])


def loss_of(model: Model, x_BTD: Tensor, classes_BT: Tensor, linear: Linear) -> Tensor:
    """The sum over tokens."""
    normed_BTD = F.rms_norm(x_BTD, x_BTD.shape[-1:], model.norm)
    logits_NC = linear(normed_BTD, model.head).flatten(0, 1)
    return F.cross_entropy(logits_NC, classes_BT.flatten(), reduction="sum")


# ---- all-to-alls --------------------------------------------------------------------------------


def start_gloo(output: Tensor, source: Tensor, output_splits: Splits, splits: Splits) -> list[Any]:
    return [dist.all_to_all_single(output, source, output_splits, splits, async_op=True)]


def start_p2p(output: Tensor, source: Tensor, output_splits: Splits, splits: Splits) -> list[Any]:
    rank, works = dist.get_rank(), list[Any]()
    for peer, (to, own) in enumerate(
        zip(output.split(output_splits), source.split(splits), strict=True)
    ):
        if peer == rank:
            to.copy_(own)
            continue
        if to.numel():
            works.append(dist.irecv(to, peer))
        if own.numel():
            works.append(dist.isend(own, peer))
    return works


class Replayed:
    """gloo's all-to-all in the first step; later ones get what the first received, and nothing is
    sent: a step of computation alone, which no overlap can beat."""

    def __init__(self, num_in_step: int) -> None:
        self.num_in_step = num_in_step
        self.received: list[Tensor] = []
        self.num_calls = 0

    def __call__(
        self, output: Tensor, source: Tensor, output_splits: Splits, splits: Splits
    ) -> list[Any]:
        if self.num_calls < self.num_in_step:
            wait(start_gloo(output, source, output_splits, splits))
            self.received.append(output.clone())
        else:
            output.copy_(self.received[self.num_calls % self.num_in_step])
        self.num_calls += 1
        return []


def wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


@dataclass
class Plan:
    """Rows per rank of one dispatch; the combine and both backwards are its mirror images."""

    sent: Splits
    received: Splits
    per_expert: Splits

    @property
    def num_received(self) -> int:
        return sum(self.received)


def exchange_counts(counts_E: Tensor) -> Plan:
    """Tell every rank how many rows its experts get; waits for the answer.

    Always with gloo's all-to-all: 64 bytes take 0.1 ms with it, and 3 ms with send and receive.
    """
    world = dist.get_world_size()
    even = [len(counts_E) // world] * world
    received_E = torch.empty_like(counts_E)
    wait(start_gloo(received_E, counts_E, even, even))
    return Plan(
        sent=counts_E.view(world, -1).sum(1).tolist(),
        received=received_E.view(world, -1).sum(1).tolist(),
        per_expert=received_E.tolist(),
    )


# ---- as written ---------------------------------------------------------------------------------


class Exchange(torch.autograd.Function):
    """An all-to-all of rows that is waited for at once, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, output_splits: Splits, splits: Splits, start: AllToAll
    ) -> Tensor:
        ctx.mirrored = splits, output_splits, start
        output = rows.new_empty(sum(output_splits), rows.shape[1])
        wait(start(output, rows, output_splits, splits))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return Exchange.apply(grad.contiguous(), *ctx.mirrored), None, None, None


def eager_step(model: Model, x_BTD: Tensor, classes_BT: Tensor, start: AllToAll) -> Tensor:
    """Forward and backward as anyone would write them; returns the mean loss."""
    num_tokens = classes_BT.numel()
    for layer in model.layers:
        routed = attend(model.shape, layer, x_BTD, F.linear)
        plan = exchange_counts(routed.counts_E)
        rows = Exchange.apply(routed.rows_RD, plan.received, plan.sent, start)
        rows = run_experts(layer, rows, plan.per_expert, F.linear)
        rows = Exchange.apply(rows, plan.sent, plan.received, start)
        x_BTD = combine(
            routed.residual_ND, rows, routed.gate_R, routed.token_R, classes_BT.shape[0]
        )
    loss = loss_of(model, x_BTD, classes_BT, F.linear) / num_tokens
    loss.backward()
    return loss.detach()


# ---- sliced by hand -----------------------------------------------------------------------------


class LinearWithoutWeightGrad(torch.autograd.Function):
    """x @ weight.T, whose backward leaves the weight's gradient to `later`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, later: WeightGrads) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.later.pending.append((weight, grad.flatten(0, -2), x.flatten(0, -2)))
        return grad @ weight if ctx.needs_input_grad[0] else None, None, None


@dataclass
class WeightGrads:
    """Weight gradients still to be computed; to be run while something is in flight."""

    pending: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return LinearWithoutWeightGrad.apply(x, weight, self)

    def run(self) -> None:
        with torch.no_grad():
            for weight, grad, x in self.pending:
                if weight.grad is None:
                    weight.grad = grad.t() @ x
                else:
                    weight.grad.addmm_(grad.t(), x)
        self.pending.clear()


@dataclass
class Cut:
    """Where one slice's autograd graph is cut in a layer: each side's end of it."""

    plan: Plan
    routed: Routed
    residual: Tensor
    gate: Tensor
    received: Tensor
    computed: Tensor
    returned: Tensor


def one_slice(
    model: Model,
    x_BTD: Tensor,
    classes_BT: Tensor,
    num_tokens: int,
    start: AllToAll,
    losses: list[Tensor],
) -> Generator[None]:
    """Forward and backward of a slice; yields where its rows travel, for another to compute."""
    later, cuts = WeightGrads(), list[Cut]()
    for layer in model.layers:
        routed = attend(model.shape, layer, x_BTD, later.linear)
        plan = exchange_counts(routed.counts_E)
        rows = routed.rows_RD.detach()
        received = rows.new_empty(plan.num_received, rows.shape[1])
        works = start(received, rows, plan.received, plan.sent)
        yield
        wait(works)
        received.requires_grad_()
        computed = run_experts(layer, received, plan.per_expert, later.linear)
        returned = torch.empty_like(rows)
        works = start(returned, computed.detach(), plan.sent, plan.received)
        yield
        wait(works)
        returned.requires_grad_()
        residual = routed.residual_ND.detach().requires_grad_()
        gate = routed.gate_R.detach().requires_grad_()
        x_BTD = combine(residual, returned, gate, routed.token_R, classes_BT.shape[0])
        cuts.append(Cut(plan, routed, residual, gate, received, computed, returned))

    loss = loss_of(model, x_BTD, classes_BT, later.linear) / num_tokens
    losses.append(loss.detach())
    loss.backward()
    for cut in reversed(cuts):
        grad_computed = torch.empty_like(cut.computed)
        works = start(grad_computed, _grad(cut.returned), cut.plan.received, cut.plan.sent)
        later.run()
        yield
        wait(works)
        cut.computed.backward(grad_computed)
        grad_rows = torch.empty_like(cut.routed.rows_RD)
        works = start(grad_rows, _grad(cut.received), cut.plan.sent, cut.plan.received)
        later.run()
        yield
        wait(works)
        torch.autograd.backward(
            [cut.routed.residual_ND, cut.routed.gate_R, cut.routed.rows_RD],
            [_grad(cut.residual), _grad(cut.gate), grad_rows],
        )
    later.run()


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad.contiguous()


def sliced_step(
    model: Model, x_BTD: Tensor, classes_BT: Tensor, start: AllToAll, slices: int
) -> Tensor:
    """The slices take turns, in an order that is the same on every rank; returns the mean loss."""
    losses: list[Tensor] = []
    turns = [
        one_slice(model, x, classes, classes_BT.numel(), start, losses)
        for x, classes in zip(x_BTD.chunk(slices), classes_BT.chunk(slices), strict=True)
    ]
    while turns:
        turns = [turn for turn in turns if next(turn, "done") is None]
    return torch.stack(losses).sum()


# ---- measuring ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    slices: int
    start: AllToAll

    def step(self, model: Model, x_BTD: Tensor, classes_BT: Tensor) -> Tensor:
        """Leaves the gradients in the weights; returns the mean loss over this rank's tokens."""
        for weight in model.weights():
            weight.grad = None
        if self.slices == 1:
            return eager_step(model, x_BTD, classes_BT, self.start)
        return sliced_step(model, x_BTD, classes_BT, self.start, self.slices)


VARIANTS = {
    "eager": Variant(1, start_gloo),
    "eager, p2p": Variant(1, start_p2p),
    "sliced, N=2": Variant(2, start_gloo),
    "sliced, N=4": Variant(4, start_gloo),
    "sliced, N=2, p2p": Variant(2, start_p2p),
    "sliced, N=4, p2p": Variant(4, start_p2p),
}


def measure(names: list[str], repeats: int, shape: Shape) -> dict[str, list[float]]:
    """Milliseconds of each step of each variant, the slower rank's; the variants take turns."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, (x_BTD, classes_BT) = make_model(shape, rank, world), make_batch(shape, rank)
    steps_ms: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(-1, repeats):  # the first is a warm-up
        for name in names:
            dist.barrier()
            start_s = time.perf_counter()
            VARIANTS[name].step(model, x_BTD, classes_BT)
            took_ms = torch.tensor([1e3 * (time.perf_counter() - start_s)], dtype=torch.float64)
            dist.all_reduce(took_ms, dist.ReduceOp.MAX)
            if repeat >= 0:
                steps_ms[name].append(took_ms.item())
    dist.barrier()
    dist.destroy_process_group()
    return steps_ms


def quartiles(ms: Sequence[float]) -> dict[str, float]:
    """Minimum, lower quartile and median."""
    return {
        "min": round(min(ms), 1),
        "q1": round(float(np.quantile(ms, 0.25)), 1),
        "median": round(float(np.median(ms)), 1),
    }


def rows_of(case: str, steps_ms: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row per variant; speed-ups compare the lower quartiles with eager's."""
    lower = {name: float(np.quantile(ms, 0.25)) for name, ms in steps_ms.items()}
    return [
        {
            "case": case,
            "variant": name,
            "step_ms": quartiles(ms),
            "speedup": round(lower["eager"] / lower[name], 2),
            "speedup_over_p2p": round(lower["eager, p2p"] / lower[name], 2),
        }
        for name, ms in steps_ms.items()
    ]


def print_rows(rows: list[dict[str, Any]]) -> None:
    print(f"{rows[0]['case']}; milliseconds a step, speed-up of the lower quartiles")
    print(f"{'variant':26} {'min':>7} {'q1':>7} {'median':>7} {'over eager':>11} {'over p2p':>9}")
    for row in rows:
        ms = row["step_ms"]
        print(
            f"{row['variant']:26} {ms['min']:7.1f} {ms['q1']:7.1f} {ms['median']:7.1f}"
            f" {row['speedup']:10.2f}x {row['speedup_over_p2p']:8.2f}x"
        )


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The options of a benchmark of steps over a link: `link`, `repeats`, `json`."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--link", type=float, default=400, metavar="MBIT", help="bandwidth")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    return parser


def show(rows: list[dict[str, Any]], is_json: bool) -> None:
    if is_json:
        print(json.dumps(rows))
    else:
        print_rows(rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("handwritten", __doc__)
    options = parser.parse_args(argv)
    try:
        with shaped_link(options.link) as link:
            steps_ms = link.run(measure, list(VARIANTS), options.repeats, Shape())[0]
    except LinkUnavailable as error:
        parser.exit(1, f"{error}\n")
    rows = rows_of(f"2-layer MoE, 2 ranks, {options.link:g} Mbit/s between namespaces", steps_ms)
    show(rows, options.json)
    return 0


if __name__ == "__main__":
    from benchmarks import handwritten  # by its name, which the ranks can import

    raise SystemExit(handwritten.main())
