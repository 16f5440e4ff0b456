"""Ranks that decided differently are told so; ranks with other batches meet, and nobody waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from models import MoEBlock, MoEConfig
from overlap.errors import DivergenceError, RankError
from overlap.runtime import agree, fake
from overlap.runtime.agree import Decided
from tests.dist import run_ranks

STARTS = ["all_to_all_single (all_to_all slice 0 in moe)", "all_reduce (all_reduce)"]
TWO = Decided("ep", {"slices": 2}, STARTS)


def refusal(first: Decided, second: Decided, ranks: tuple[int, int] = (3, 1)) -> str:
    """What the second rank is told; "" if nothing."""
    store = dist.HashStore()
    agree.compare_in(store, ranks[0], "0/program/forward", first)
    try:
        agree.compare_in(store, ranks[1], "0/program/forward", second)
    except DivergenceError as error:
        return str(error)
    return ""


def test_equal_decisions_are_accepted_again_and_again() -> None:
    assert refusal(TWO, TWO) == ""
    assert refusal(TWO, TWO, ranks=(1, 1)) == ""


def test_the_error_names_ranks_and_options_and_the_first_start_that_differs() -> None:
    four = Decided("ep", {"slices": 4}, [STARTS[0], "all_to_all_single_1 (all_to_all)", *STARTS])
    assert refusal(TWO, four) == (
        "rank 3 and rank 1 decided differently: slices is 2 on rank 3 and 4 on rank 1, and "
        "collective 2 of group 'ep' is all_reduce (all_reduce) on rank 3 and all_to_all_single_1 "
        "(all_to_all) on rank 1; give all ranks the same options, hardware profile, cost table and "
        "exactness certificate, and if they have them, report it"
    )


def test_a_collective_that_one_rank_lacks_is_named() -> None:
    fewer = dataclasses.replace(TWO, starts=STARTS[:1])
    text = refusal(TWO, fewer)
    assert "collective 2 of group 'ep' is all_reduce (all_reduce) on rank 3 and none on rank 1" in (
        text
    )


def test_a_rank_that_recompiles_otherwise_is_told_about_itself() -> None:
    text = refusal(TWO, dataclasses.replace(TWO, starts=STARTS[::-1]), ranks=(1, 1))
    assert text.startswith("rank 1 and rank 1 (recompiled) decided differently: collective 1 of")


@pytest.mark.parametrize("differing", [0, 4_999])
def test_a_long_list_is_cut_and_still_compared(differing: int) -> None:
    store = dist.HashStore()
    starts = [f"all_to_all_single_{i} (all_to_all slice 0)" for i in range(5_000)]
    agree.compare_in(store, 0, "key", dataclasses.replace(TWO, starts=starts))
    assert len(store.get("overlap/ep/key")) < 1 << 16
    agree.compare_in(store, 1, "key", dataclasses.replace(TWO, starts=starts))
    starts[differing] = "all_reduce (all_reduce)"
    with pytest.raises(DivergenceError, match=r"all_reduce \(|the first of \d+ with digest"):
        agree.compare_in(store, 1, "key", dataclasses.replace(TWO, starts=starts))


def test_other_programs_and_other_groups_do_not_meet() -> None:
    store = dist.HashStore()
    other = dataclasses.replace(TWO, starts=[])
    agree.compare_in(store, 0, "0/program/forward", TWO)
    agree.compare_in(store, 1, "0/program/backward", other)
    agree.compare_in(store, 1, "0/program/forward", dataclasses.replace(other, group="dp"))


def test_nothing_is_compared_where_no_rank_could_differ() -> None:
    agree.compare("key", TWO)
    with fake.world(2):
        agree.compare("key", dataclasses.replace(TWO, group=dist.group.WORLD.group_name))
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    num_keys = store.num_keys()
    agree.compare("key", dataclasses.replace(TWO, group=dist.group.WORLD.group_name))
    agree.compare("key", TWO)
    assert store.num_keys() == num_keys
    dist.destroy_process_group()


# --- which programs are one -----------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(6, 6), act

    def forward(self, x_BSD: Tensor) -> Tensor:
        y_TD = self.linear(x_BSD.flatten(0, 1))
        return checkpoint(self.act, y_TD, use_reentrant=False).view(x_BSD.shape) + x_BSD


def structure(module: nn.Module, batch: int, dynamic: bool = False) -> str:
    found: list[str] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(agree.structure_of(gm))
        return gm.forward

    torch._dynamo.reset()
    x_BSD = torch.randn(batch, 3, 6, dtype=next(module.parameters()).dtype)
    torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic)(x_BSD)
    return found[0]


def test_a_program_is_the_same_for_every_batch() -> None:
    assert len({structure(Net(), batch) for batch in (1, 2, 8)}) == 1
    assert structure(Net(), 5, dynamic=True) == structure(Net(), 1)


def test_the_program_of_a_cost_table_has_the_shapes_of_its_parameters() -> None:
    found: list[str] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(agree.program_of(gm))
        return gm.forward

    for width, batch in ((6, 4), (6, 8), (7, 4)):
        torch._dynamo.reset()
        torch.compile(nn.Linear(width, 6), backend=backend)(torch.randn(batch, width))
    assert found[0] == found[1] != found[2]


def test_another_operator_or_another_gradient_is_another_program() -> None:
    frozen = Net()
    frozen.linear.weight.requires_grad_(False)
    programs = {structure(net, 8) for net in (Net(), Net(torch.tanh), frozen, Net().double())}
    assert len(programs) == 4


# --- ranks ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
    """The options and the batches of each rank."""

    options: tuple[dict[str, Any], dict[str, Any]]
    rows: tuple[tuple[int, ...], tuple[int, ...]] = ((4,), (4,))


def train(rank: int, num_ranks: int, job: Job) -> list[str]:
    """One step for each batch; the keys under which this rank compared what it decided."""
    keys: list[str] = []
    compare_in = agree.compare_in

    def note(store: dist.Store, rank: int, key: str, decided: Decided) -> None:
        keys.append(key)
        compare_in(store, rank, key, decided)

    agree.compare_in = note
    config = MoEConfig(hidden_dim=8, num_experts=4, top_k=2)
    block = MoEBlock(16, config, dist.group.WORLD)
    step = torch.compile(block, backend="overlap", fullgraph=True, options=job.options[rank])
    for rows in job.rows[rank]:
        step(torch.randn(rows, 4, 16)).sum().backward()
    return keys


OPTIONS = {"slices": 2, "axis": "batch"}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (
            {"slices": 4, "axis": "batch"},
            "slices is (2|4) on rank . and (2|4) on rank ., and collective 2 of group",
        ),
        ({"preset": "none"}, "slices is (1|2) on rank . and (1|2) on rank ., and collective 1 of"),
    ],
    ids=["slices", "preset"],
)
def test_ranks_with_other_options_stop_instead_of_hanging(
    other: dict[str, Any], difference: str
) -> None:
    message = f"DivergenceError: rank . and rank . decided differently: {difference}"
    with pytest.raises(RankError, match=message):
        run_ranks(train, 2, Job((OPTIONS, other)), timeout_s=200)


@pytest.mark.dist
def test_ranks_with_other_batches_meet_and_agree() -> None:
    """Rank 1 compiles again twice, alone: for one row, which no slice but one has, and for six."""
    job = Job((OPTIONS, OPTIONS), rows=((4, 4, 4), (3, 1, 6)))
    first, second = run_ranks(train, 2, job, timeout_s=200)
    assert [key.rpartition("/")[2] for key in first] == ["forward", "backward"]
    assert second == 3 * first
