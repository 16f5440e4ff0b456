"""The compiler beside hand-written slicing: a training step of an MoE model on two ranks.

    python -m benchmarks.slicing --link 400 [--json]

As root, over a real link of that bandwidth between two network namespaces; otherwise over the
emulated one, which is then said. One run, all variants in turn on the same weights and batch:

    compute alone                  eager, its rows received once and for all: nothing is sent
    eager; eager, p2p              as anyone would write them (`benchmarks.handwritten`)
    sliced, N=2; sliced, N=4       sliced by hand
    overlap, N=1, 2, 4             the program as written, through `backend="overlap"`
    overlap, whole step, N=2, 4    the same, with `whole_step=True`
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol

from benchmarks import handwritten
from benchmarks.handwritten import VARIANTS, Layer, Model, Shape, Splits, Variant
from benchmarks.netns import LinkUnavailable, shaped_link
from overlap.runtime import launch, link, link_group

BY_HAND = ("eager", "eager, p2p", "sliced, N=2", "sliced, N=4")
COMPILED: dict[str, dict[str, Any]] = {
    "overlap, N=1": {"slices": 1},
    "overlap, N=2": {"slices": 2},
    "overlap, N=4": {"slices": 4},
    "overlap, whole step, N=2": {"slices": 2, "whole_step": True},
    "overlap, whole step, N=4": {"slices": 4, "whole_step": True},
}
"""Variants of the compiler and their options."""
QUARTILES = {"q1": 0.25, "median": 0.5, "q3": 0.75}
RANK_ENV = {"OMP_NUM_THREADS": "1", "MKL_CBWR": "AVX512,STRICT"}


class CompiledLayer(nn.Module):
    """One layer of the hand-written model, its weights registered, [B, T, D] to [B, T, D]."""

    def __init__(self, shape: Shape, layer: Layer) -> None:
        super().__init__()
        self.shape = shape
        self.group = dist.group.WORLD.group_name  # pyright: ignore[reportOptionalMemberAccess]
        self.num_ranks = dist.get_world_size()
        self.num_local = len(layer.up)
        self.weights = nn.ParameterList(nn.Parameter(w) for w in layer.weights())

    def forward(self, x_BTD: Tensor) -> Tensor:
        layer = self._layer()
        routed = handwritten.attend(self.shape, layer, x_BTD, F.linear)
        counts_E = routed.counts_E.view(self.shape.experts)  # bincount's size is data
        received_E = funcol.all_to_all_single(counts_E, None, None, self.group)
        sent = counts_E.view(self.num_ranks, -1).sum(1).tolist()
        received = received_E.view(self.num_ranks, -1).sum(1).tolist()
        rows = self._exchange(routed.rows_RD, received, sent)
        rows = handwritten.run_experts(layer, rows, received_E.tolist(), F.linear)
        rows = self._exchange(rows, sent, received)
        return handwritten.combine(
            routed.residual_ND, rows, routed.gate_R, routed.token_R, x_BTD.shape[0]
        )

    def _layer(self) -> Layer:
        weights, num_experts = list(self.weights), 2 * self.num_local
        dense, experts = weights[:-num_experts], weights[-num_experts:]
        return Layer(*dense, up=experts[: self.num_local], down=experts[self.num_local :])

    def _exchange(self, rows: Tensor, output_splits: Splits, splits: Splits) -> Tensor:
        return funcol.all_to_all_single_autograd(rows, output_splits, splits, self.group)


class CompiledModel(nn.Module):
    """The hand-written model's weights and layers, with functional all-to-alls for Dynamo."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.shape = model.shape
        self.layers = nn.ModuleList(CompiledLayer(model.shape, layer) for layer in model.layers)
        self.norm = nn.Parameter(model.norm)
        self.head = nn.Parameter(model.head)

    def forward(self, x_BTD: Tensor, classes_BT: Tensor) -> Tensor:
        """The mean loss over this rank's tokens."""
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        final = Model(self.shape, [], self.norm, self.head)
        return handwritten.loss_of(final, x_BTD, classes_BT, F.linear) / classes_BT.numel()


def compiled_step(model: Model, options: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """Forward and backward through the backend; leaves the gradients in its own parameters."""
    module = CompiledModel(model)
    forward = torch.compile(module, backend="overlap", fullgraph=True, options=options)

    def step(x_BTD: Tensor, classes_BT: Tensor) -> Tensor:
        module.zero_grad()
        loss = forward(x_BTD, classes_BT)
        loss.backward()
        return loss.detach()

    return step


def measure(backend: str, link_mbit: float, repeats: int, shape: Shape) -> dict[str, list[float]]:
    """Milliseconds of each step of each variant, the slower rank's; the variants take turns."""
    if backend == link_group.EMULATED:
        link_group.register(link.LinkConfig(bandwidth_mbit=link_mbit))
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    x_BTD, classes_BT = handwritten.make_batch(shape, rank)
    model = handwritten.make_model(shape, rank, world)
    alone = Variant(1, handwritten.Replayed(4 * shape.layers))
    steps: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "compute alone": functools.partial(alone.step, model)
    }
    steps |= {name: functools.partial(VARIANTS[name].step, model) for name in BY_HAND}
    with tempfile.TemporaryDirectory() as folder:
        profile = profile_file(Path(folder), link_mbit)
        for name, options in COMPILED.items():
            own = handwritten.make_model(shape, rank, world)
            steps[name] = compiled_step(own, options | {"hardware": profile})
        for step in steps.values():  # the first call compiles
            step(x_BTD, classes_BT)
    steps_ms = take_turns(steps, (x_BTD, classes_BT), repeats)
    dist.barrier()
    dist.destroy_process_group()
    return steps_ms


def take_turns(
    steps: Mapping[str, Callable[..., Tensor]], batch: tuple[Tensor, ...], repeats: int
) -> dict[str, list[float]]:
    """Milliseconds of each of `repeats` calls of every step, the slower rank's, all in turn."""
    steps_ms: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            dist.barrier()
            start_s = time.perf_counter()
            step(*batch)
            took_ms = torch.tensor([1e3 * (time.perf_counter() - start_s)], dtype=torch.float64)
            dist.all_reduce(took_ms, dist.ReduceOp.MAX)
            steps_ms[name].append(took_ms.item())
    return steps_ms


def profile_file(folder: Path, link_mbit: float) -> str:
    """A hardware profile with this link: the compiler is told what the link is, as users would."""
    path = folder / "link.toml"
    gbps = link_mbit / 8e3
    path.write_text(f'base = "cpu"\nnode_gbps = {gbps}\nnetwork_gbps = {gbps}\n')
    return str(path)


def main(argv: Sequence[str] | None = None) -> int:
    options = handwritten.make_parser("slicing", __doc__).parse_args(argv)
    try:
        with shaped_link(options.link) as shaped:
            ranks = shaped.run(
                measure, "gloo", options.link, options.repeats, Shape(), env=RANK_ENV
            )
        kind = f"{options.link:g} Mbit/s between network namespaces"
    except LinkUnavailable as error:
        kind = f"an emulated link of {options.link:g} Mbit/s ({error})"
        arguments = (link_group.EMULATED, options.link, options.repeats, Shape())
        ranks = launch.launch(
            measure, *arguments, options=launch.LaunchOptions(num_ranks=2, env=RANK_ENV)
        )
    rows = handwritten.rows_of(f"2-layer MoE, 2 ranks, {kind}", ranks[0])
    beside = beside_by_hand(ranks[0])
    for row in rows:
        row["by_hand_over_this"] = beside.get(row["variant"])
    handwritten.show(rows, options.json)
    if not options.json:
        print("\nspeed beside the same slices by hand, of the steps of each turn:")
        for name, ratio in beside.items():
            print(f"{name:26} {ratio['median']:.3f} ({ratio['q1']:.3f} to {ratio['q3']:.3f})")
    return 0


def beside_by_hand(steps_ms: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """For each variant of the compiler: time of the hand-written step of as many slices over its
    own, in each turn; quartiles over the turns. One slice is as written."""
    by_hand = {1: "eager", 2: "sliced, N=2", 4: "sliced, N=4"}
    ratios = {
        name: np.divide(steps_ms[by_hand[options["slices"]]], steps_ms[name])
        for name, options in COMPILED.items()
    }
    return {
        name: {q: round(float(np.quantile(r, p)), 3) for q, p in QUARTILES.items()}
        for name, r in ratios.items()
    }


if __name__ == "__main__":
    from benchmarks import slicing  # by its name, which the ranks can import

    raise SystemExit(slicing.main())
