"""How long a step is predicted to take, and takes: an MoE model on two ranks, over a real link.

    python -m benchmarks.predictions --link 400 [--json]

As root: the link is a real one of that bandwidth between two network namespaces. The ranks measure
a cost table of the step over this link, as `overlap hardware --measure` does. Then the step is
compiled anew with that table, at 1, 2 and 4 slices, and the variants take turns; each is predicted
for this rank's batch and balanced routing, as `overlap.explain` shows it. Measured is forward and
backward of the slower rank.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import overlap
from benchmarks import handwritten
from benchmarks.handwritten import Shape
from benchmarks.netns import LinkUnavailable, shaped_link
from benchmarks.slicing import RANK_ENV, CompiledModel, profile_file, take_turns
from overlap import measure
from overlap.config import Config

AXIS, SLICES = "batch", (1, 2, 4)


def predict_and_measure(link_mbit: float, repeats: int, shape: Shape) -> list[dict[str, Any]]:
    """On a rank: a row for each number of slices."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    batch = handwritten.make_batch(shape, rank)

    def step_of(compile_module: Callable[[nn.Module], Any]) -> tuple[Any, Callable[..., Tensor]]:
        module = CompiledModel(handwritten.make_model(shape, rank, world))
        forward = compile_module(module)

        def step(*inputs: Tensor) -> Tensor:
            module.zero_grad()
            loss = forward(*inputs)
            loss.backward()
            return loss.detach()

        return forward, step

    def make_step(compile_module: Callable[[nn.Module], Any]) -> Callable[[], Tensor]:
        _, step = step_of(compile_module)
        return lambda: step(*batch)

    with tempfile.TemporaryDirectory() as folder:
        profile, costs = profile_file(Path(folder), link_mbit), Path(folder) / "costs.json"
        measure.measure(make_step, Config(axis=AXIS, hardware=profile)).save(costs)
        torch.compiler.reset()
        options = {"axis": AXIS, "hardware": profile, "costs": str(costs)}
        compiled: dict[str, Any] = {}
        steps: dict[str, Callable[..., Tensor]] = {}
        for slices in SLICES:
            name = f"overlap, N={slices}"
            own: dict[str, Any] = options | {"slices": slices}
            compiled[name], steps[name] = step_of(
                lambda module, own=own: torch.compile(
                    module, backend="overlap", fullgraph=True, options=own
                )
            )
            steps[name](*batch)
    steps_ms = take_turns(steps, batch, repeats)
    dist.barrier()
    dist.destroy_process_group()
    return [
        _row(name, overlap.explain(compiled[name]).predicted_us / 1e3, steps_ms[name])
        for name in steps
    ]


def _row(name: str, predicted_ms: float, steps_ms: list[float]) -> dict[str, Any]:
    measured = handwritten.quartiles(steps_ms)
    return {
        "variant": name,
        "predicted_ms": round(predicted_ms, 1),
        "step_ms": measured,
        "error": round(predicted_ms / measured["median"] - 1, 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = handwritten.make_parser("predictions", __doc__)
    options = parser.parse_args(argv)
    try:
        with shaped_link(options.link) as shaped:
            arguments = (options.link, options.repeats, Shape())
            rows = shaped.run(predict_and_measure, *arguments, env=RANK_ENV)[0]
    except LinkUnavailable as error:
        parser.exit(1, f"{error}\n")
    if options.json:
        print(json.dumps(rows))
        return 0
    print(f"2-layer MoE, 2 ranks, {options.link:g} Mbit/s between network namespaces; ms a step")
    print(f"{'variant':14} {'predicted':>10} {'min':>7} {'q1':>7} {'median':>7} {'error':>8}")
    for row in rows:
        ms = row["step_ms"]
        print(
            f"{row['variant']:14} {row['predicted_ms']:10.1f} {ms['min']:7.1f} {ms['q1']:7.1f}"
            f" {ms['median']:7.1f} {100 * row['error']:+6.1f} %"
        )
    return 0


if __name__ == "__main__":
    from benchmarks import predictions  # by its name, which the ranks can import

    raise SystemExit(predictions.main())
