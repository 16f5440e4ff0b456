"""recompute: what the partitioner may recompute in the backward, and what it may not.

    node of a checkpointed region        the user's policy, or recompute
    collective outside of any            saved; its result crosses to the backward

Why it is correct: tags change what is saved, not what is computed. A collective runs again only
where the user's own checkpointing asks for it, on every rank alike; that is remarked.

Cost: the memory of saved collective results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from overlap import collectives, graph
from overlap.capture import checkpoint_region
from overlap.graph import Phase
from overlap.pipeline import Context, Effect

_ADVICE = "save all-to-alls with a selective checkpoint policy to run them once"


@dataclasses.dataclass(frozen=True)
class Policies:
    """Per checkpointed region the user's selective policy, or None for full recompute."""

    by_region: Mapping[int, Callable[..., Any] | None]


@dataclasses.dataclass(frozen=True)
class Recompute:
    name: str = "recompute"
    effect: Effect = Effect.ANNOTATE
    requires: Phase = Phase.NORMALIZED
    ensures: Phase = Phase.NORMALIZED

    def run(self, gm: fx.GraphModule, ctx: Context) -> None:
        policies = ctx.fact(Policies).by_region
        repeated: list[fx.Node] = []
        for node in gm.graph.nodes:
            if node.op != "call_function" or graph.is_backward(node):
                continue
            region = checkpoint_region(node)
            is_communication = collectives.is_start(node) or collectives.is_wait(node)
            if region is None:
                if is_communication:
                    graph.set_recompute_policy(node, CheckpointPolicy.MUST_SAVE)
                continue
            policy = _policy(node, policies.get(region))
            graph.set_recompute_policy(node, policy, region_id=region)
            if collectives.is_start(node) and _recomputes(policy):
                repeated.append(node)
        for node in repeated:
            ctx.remark("note", "runs again in the backward, as checkpoint asks", node, _ADVICE)


def _recomputes(policy: CheckpointPolicy) -> bool:
    return policy in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _policy(node: fx.Node, policy_fn: Callable[..., Any] | None) -> CheckpointPolicy:
    if policy_fn is None or not isinstance(node.target, torch._ops.OpOverload):
        return CheckpointPolicy.PREFER_RECOMPUTE
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), graph.fake_value)  # pyright: ignore
    answer = policy_fn(SelectiveCheckpointContext(is_recompute=False), node.target, *args, **kwargs)
    if isinstance(answer, bool):
        return CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
    return answer
