"""Ranks compare what they decided about a graph before it runs for the first time, and so before
any collective that they would not share.

    the first rank      compare_set(key, decided)  ─▶  its own: it goes on
    every other rank    compare_set(key, decided)  ─▶  the first's: equal, or DivergenceError

The values lie in the store of the default process group. One request per rank, group and graph,
however many ranks there are, and nobody waits: a rank that compiles alone, again or not at all
keeps no other waiting. The rank that raises starts none of the graph's collectives; the end of its
process is what ends the job.

A key has nothing of a batch in it, so that ranks with other batches meet under it. Programs of
different structure never meet: what they do is no decision about one program.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist
from torch import fx
from torch.distributed import distributed_c10d as c10d

from overlap import graph, printing
from overlap.errors import DivergenceError
from overlap.runtime import groups

MAX_BYTES = 60_000
"""Of the starts in one value; a digest stands for the rest."""


@dataclasses.dataclass(frozen=True)
class Decided:
    """What a rank decided about a graph, as far as the ranks of `group` have to decide alike.

    options: by name, as in {"slices": 4}.
    starts: the collectives of the group, in the order in which the graph starts them.
    """

    group: str
    options: Mapping[str, int | str]
    starts: Sequence[str]


def compare(key: str, decided: Decided) -> None:
    """Hold what this rank decided against what the first rank of the group decided under `key`.

    Nothing happens where ranks cannot differ: without a process group, in a fake one, and in a
    group of one rank. Raises DivergenceError, which names both ranks and the first difference, and
    torch.distributed.DistError if the store is out of reach.
    """
    store = _store(decided.group)
    if store is not None:
        compare_in(store, dist.get_rank(), key, decided)


def compare_in(store: dist.Store, rank: int, key: str, decided: Decided) -> None:
    """The same, for the global `rank`, in a store that the ranks share."""
    own = dataclasses.replace(decided, starts=_shortened(decided.starts))
    value = json.dumps({"rank": rank, **dataclasses.asdict(own)})
    found = json.loads(store.compare_set(f"overlap/{decided.group}/{key}", "", value))
    other: int = found.pop("rank")
    sides = {f"rank {other}": Decided(**found)}
    sides[f"rank {rank}" + (" (recompiled)" if other == rank else "")] = own
    if differences := list(_differences(*sides.items())):
        raise DivergenceError(
            f"{' and '.join(sides)} decided differently: {', and '.join(differences)}; give all "
            "ranks the same options, hardware profile, cost table and exactness certificate, and "
            "if they have them, report it"
        )


def structure_of(gm: fx.GraphModule) -> str:
    """A digest of what a captured program computes with tensors: operators, flow of data, dtypes,
    what requires a gradient. No constant, size or name is in it: equal for every batch and rank."""
    lines: list[str] = []
    for body in (module for module in gm.modules() if isinstance(module, fx.GraphModule)):
        index: dict[fx.Node, int] = {}
        for node in body.graph.nodes:
            tensors = list(graph.tensors_of(graph.fake_value(node)))
            if not tensors and node.op != "output":
                continue
            index[node] = len(index)
            operands = [index[source] for source in node.all_input_nodes if source in index]
            types = [(str(t.dtype), t.dim(), t.requires_grad) for t in tensors]
            lines.append(f"{_operator(node)} {operands} {types}")
    return _digest(lines)


def program_of(gm: fx.GraphModule) -> str:
    """A digest of the structure and of the shapes of parameters and buffers: what a cost table is
    for. Equal for every batch; ranks that hold other shards may have programs of their own."""
    held = [node for node in graph.placeholders(gm.graph) if graph.is_module_state(node)]
    shapes = [
        str(tuple(t.shape)) for node in held for t in graph.tensors_of(graph.fake_value(node))
    ]
    return _digest([structure_of(gm), *shapes])


def _operator(node: fx.Node) -> str:
    match node.op:
        case "call_function":
            return printing.function_name(node.target)
        case "call_method":
            return f"Tensor.{node.target}"
        case _:
            return node.op


def _store(group: str) -> dist.Store | None:
    """Where the ranks of `group` meet, None if they do not."""
    if not dist.is_initialized() or group not in groups.group_names():
        return None
    if groups.size_of(group) == 1 or dist.get_backend(groups.resolve(group)) == "fake":
        return None
    return c10d._get_default_store()


def _shortened(starts: Sequence[str]) -> list[str]:
    """The starts, those past MAX_BYTES as one entry that is equal where they are."""
    sizes = itertools.accumulate(len(json.dumps(start)) + 2 for start in starts)
    num_kept = sum(size <= MAX_BYTES for size in sizes)
    rest = starts[num_kept:]
    digest = [f"the first of {len(rest)} with digest {_digest(rest)}"] if rest else []
    return [*starts[:num_kept], *digest]


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _differences(one: tuple[str, Decided], other: tuple[str, Decided]) -> Iterator[str]:
    """In words, for two ranks by name: every option that differs, and the first start that does."""
    (name_a, a), (name_b, b) = one, other
    for option, value in a.options.items():
        if value != b.options[option]:
            yield f"{option} is {value} on {name_a} and {b.options[option]} on {name_b}"
    pairs = itertools.zip_longest(a.starts, b.starts, fillvalue="none")
    for position, (start_a, start_b) in enumerate(pairs, start=1):
        if start_a != start_b:
            yield (
                f"collective {position} of group {a.group!r} is {start_a} on {name_a} and "
                f"{start_b} on {name_b}"
            )
            return
