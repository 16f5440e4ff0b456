from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from overlap import collectives, cost, schedule, simulate
from overlap.collectives import Kind
from overlap.list_scheduler import ListScheduler, Rule, Shape
from overlap.schedule import Schedule
from overlap.simulate import Machine, Program, Storage, TaskKind
from tests import schedule_cases
from tests.random_programs import best_makespan, random_program
from tests.tracing import trace

CostFunction = Callable[[fx.Node], float]
MACHINE = Machine()
MACHINES = (MACHINE, Machine(is_stream=True, launch_us=0.05), Machine(contention=0.3))


@pytest.fixture(autouse=True)
def world():
    with schedule_cases.fake_world(8):
        yield


def collectives_cost(us: float) -> CostFunction:
    return lambda node: us if collectives.is_start(node) else cost.unit_us(node)


def program_of(gm: fx.GraphModule, us: CostFunction = cost.unit_us) -> Program:
    return simulate.extract(gm, cost.from_function(gm, us))


def scheduled(gm: fx.GraphModule, us: CostFunction = cost.unit_us) -> Schedule:
    return schedule.schedule(program_of(gm, us), MACHINE)


# ---- graphs with known optima -------------------------------------------------------------------


@pytest.mark.parametrize(("num_slices", "before", "after"), [(2, 40, 25), (4, 80, 49)])
def test_sliced_moe_layers_meet_their_optimum(num_slices: int, before: int, after: int):
    result = scheduled(schedule_cases.sliced_moe(num_slices, 4))
    assert (result.before.makespan_us, result.after.makespan_us) == (before, after)
    # nothing can run beside the last exchange
    assert result.after.exposed_us == 1


@pytest.mark.parametrize("is_last", [False, True])
def test_a_shared_expert_hides_both_exchanges(is_last: bool):
    result = scheduled(schedule_cases.shared_expert(is_last))
    assert (result.before.makespan_us, result.after.makespan_us) == (6, 4)
    assert result.after.exposed_us == 0


@pytest.mark.parametrize(("exchange_us", "before", "after"), [(1.0, 7, 6), (2.0, 9, 7)])
def test_weight_gradients_fill_the_exchange(exchange_us: float, before: int, after: int):
    result = scheduled(schedule_cases.ep_backward(), collectives_cost(exchange_us))
    assert (result.before.makespan_us, result.after.makespan_us) == (before, after)


@pytest.mark.parametrize(("gather_us", "after"), [(0.3, 12.3), (0.8, 12.8), (1.2, 15.4)])
def test_fsdp_gathers_are_prefetched(gather_us: float, after: float):
    result = scheduled(schedule_cases.fsdp_forward(), collectives_cost(gather_us))
    assert result.after.makespan_us == pytest.approx(after)


def in_program_order(exchange_us: float, machine: Machine, patience: float = 0.0) -> float:
    """Makespan of a list schedule of an FSDP step whose kernels keep their order."""
    program = program_of(schedule_cases.fsdp_step(), collectives_cost(exchange_us))
    rule = Rule("order of the program", range(len(program)), patience)
    order, planned_us = ListScheduler(program, machine, Shape(program), rule, None).run()
    assert simulate.makespan(program, order, machine) == pytest.approx(planned_us)
    return planned_us


def test_nothing_idles_for_gradients_that_only_the_result_reads():
    assert in_program_order(0.5, Machine(), patience=0.6) == pytest.approx(12.5)


def test_a_link_does_not_run_dry_while_the_next_collective_is_launched():
    assert in_program_order(1.5, Machine(launch_us=0.1)) == pytest.approx(17.0)


def fsdp_cost(node: fx.Node) -> float:
    if not collectives.is_start(node):
        return cost.unit_us(node)
    return 0.3 if collectives.kind_of(node) is Kind.ALL_GATHER else 1.0


@pytest.mark.parametrize("num_layers", [2, 3, 4])
@pytest.mark.parametrize("num_slices", [1, 2])
def test_two_groups_are_never_slower_than_one(num_layers: int, num_slices: int):
    one, two = (
        scheduled(schedule_cases.fsdp_moe(num_layers, groups, num_slices), fsdp_cost)
        for groups in (1, 2)
    )
    assert two.after.makespan_us <= one.after.makespan_us + 1e-6


@pytest.mark.parametrize(("cap", "best_us"), [(1, 30.0), (2, 20.0), (3, 20.0)])
def test_gathers_under_a_memory_cap_meet_the_optimum(cap: int, best_us: float):
    """The optima are those of an exhaustive search over all schedules."""
    weight_bytes = 4 * schedule_cases.WIDTH**2
    us = collectives_cost(1.5)
    program = weights_only(program_of(schedule_cases.gathers(), us), weight_bytes)
    result = schedule.schedule(program, MACHINE, cap * weight_bytes)
    assert result.after.peak_bytes <= cap * weight_bytes
    assert result.after.makespan_us == best_us


def weights_only(program: Program, weight_bytes: int) -> Program:
    """Count gathered weights alone: the products are outputs, which no order changes."""
    gathered = tuple(s for s in program.storages if not s.is_output)
    assert {s.num_bytes for s in gathered} == {weight_bytes}
    return dataclasses.replace(program, storages=gathered)


def host_read_costs(num_slices: int) -> CostFunction:
    """A step of 4 of compute and 4 of exchange in equal slices; reads 0.2, counts 0.1."""

    def us(node: fx.Node) -> float:
        if collectives.is_host_read(node):
            return 0.2
        if collectives.is_start(node):
            is_count = collectives.operand_of(node).dtype is torch.int64
            return 0.1 if is_count else 2 / num_slices
        return 2 * cost.unit_us(node) / num_slices

    return us


def host_read_schedule(num_slices: int, machine: Machine) -> tuple[Program, Schedule]:
    program = program_of(schedule_cases.host_reads(num_slices), host_read_costs(num_slices))
    return program, schedule.schedule(program, machine)


@pytest.mark.parametrize("is_stream", [False, True])
def test_host_reads_come_before_the_wait_for_the_rows_of_another_slice(is_stream: bool):
    program, result = host_read_schedule(2, Machine(is_stream=is_stream))
    order = [program.names[task] for task in result.order]
    row_starts = ("all_to_all_single_1", "all_to_all_single_4")
    waits = [n for n, s in zip(program.names, program.starts, strict=True) if s >= 0]
    row_waits = [w for w in waits if start_name(program, w) in row_starts]
    reads = [
        n for n, k in zip(program.names, program.kinds, strict=True) if k is TaskKind.HOST_READ
    ]
    assert len(reads) == 4
    assert max(map(order.index, reads)) < min(map(order.index, row_waits))
    assert result.after.makespan_us < result.before.makespan_us - 2


def start_name(program: Program, wait: str) -> str:
    return program.names[program.starts[program.names.index(wait)]]


def test_launch_time_and_host_reads_decide_how_many_slices_gain():
    """Free launches favour 4 slices; at 0.05 a node, 2 are best, and the figures say so."""
    without, with_launch = (
        {n: host_read_schedule(n, machine)[1].after.makespan_us for n in (1, 2, 4)}
        for machine in (Machine(is_stream=True), Machine(is_stream=True, launch_us=0.05))
    )
    assert without[4] < without[2] < without[1]
    assert with_launch[2] < with_launch[4] < with_launch[1]


# ---- properties ---------------------------------------------------------------------------------

programs = st.builds(
    random_program, st.integers(0, 1_000_000), st.integers(1, 25), num_groups=st.integers(1, 3)
)


@settings(deadline=None, max_examples=60)
@given(programs, st.sampled_from((*MACHINES, Machine(launch_us=0.1))), st.sampled_from((0.0, 0.6)))
def test_a_list_schedule_takes_as_long_as_planned(
    program: Program, machine: Machine, patience: float
):
    rule = Rule("order of the program", range(len(program)), patience)
    order, planned_us = ListScheduler(program, machine, Shape(program), rule, None).run()
    assert simulate.makespan(program, order, machine) == pytest.approx(planned_us)


@settings(deadline=None, max_examples=60)
@given(programs, st.sampled_from(MACHINES), st.sampled_from((None, 1.0, 1.2)))
def test_random_programs(program: Program, machine: Machine, ratio: float | None):
    """A valid order, within the cap, no slower than program order and no faster than possible."""
    peak_bytes, _ = simulate.peak_memory(program, range(len(program)))
    cap_bytes = None if ratio is None else int(peak_bytes * ratio)
    result = schedule.schedule(program, machine, cap_bytes)
    simulate.check_order(program, result.order)
    assert result.order[: program.num_inputs] == tuple(range(program.num_inputs))
    assert result.order[-1] == len(program) - 1
    assert cap_bytes is None or result.after.peak_bytes <= cap_bytes
    assert result.after.makespan_us <= result.before.makespan_us
    assert result.after.makespan_us >= schedule.lower_bound_us(program, machine) - 1e-6
    assert result.after.makespan_us == simulate.makespan(program, result.order, machine)


@settings(deadline=None, max_examples=30)
@given(programs, st.sampled_from(MACHINES))
def test_long_programs_do_not_stall_on_rounding(program: Program, machine: Machine):
    """Late in a long step a float no longer resolves the last bit of a short collective."""
    scaled = dataclasses.replace(program, durations=tuple(1e9 / 7 * us for us in program.durations))
    result = schedule.schedule(scaled, machine)
    assert result.after.makespan_us <= result.before.makespan_us


@settings(deadline=None, max_examples=40)
@given(programs)
def test_a_cap_that_only_another_order_meets_is_kept(program: Program):
    lean = schedule.lean_order(program)
    simulate.check_order(program, lean)
    cap_bytes = simulate.peak_memory(program, lean)[0]
    result = schedule.schedule(program, MACHINE, cap_bytes)
    assert result.after.peak_bytes <= cap_bytes or result.reasons


def test_small_programs_are_near_their_optimum():
    """Against every order of small random programs: most are met, on average within 2 %."""
    ratios: list[float] = []
    for seed in range(60):
        program = random_program(seed, 6 + seed % 3, num_groups=1 + seed % 2)
        machine = MACHINES[seed % 3]
        peak_bytes, _ = simulate.peak_memory(program, range(len(program)))
        for cap_bytes in (None, peak_bytes):
            best_us = best_makespan(program, machine, cap_bytes, limit=1000)
            if best_us is not None:
                result = schedule.schedule(program, machine, cap_bytes)
                ratios.append(result.after.makespan_us / best_us)
    assert len(ratios) > 40
    assert min(ratios) > 1 - 1e-6
    assert sum(ratios) / len(ratios) < 1.02
    assert sum(ratio < 1.001 for ratio in ratios) > 0.75 * len(ratios)


# ---- what it says -------------------------------------------------------------------------------


def test_a_graph_without_collectives_is_left_alone():
    gm = trace(lambda x: (x @ x, x.sin() @ x), torch.zeros(8, 8))
    result = scheduled(gm)
    assert result.order == tuple(range(len(gm.graph.nodes)))
    assert result.reasons == ("nothing moved: the graph has no collective",)


def test_a_chain_is_as_good_as_it_gets():
    result = scheduled(schedule_cases.sliced_moe(1, 1))
    assert result.method == schedule.PROGRAM_ORDER
    assert result.reasons == ("nothing moved: program order meets the lower bound",)


def test_a_cap_below_any_order_says_what_is_missing():
    program = Program(
        names=("a", "b", "output"),
        kinds=(TaskKind.COMPUTE, TaskKind.COMPUTE, TaskKind.FREE),
        durations=(1.0, 1.0, 0.0),
        groups=(-1, -1, -1),
        group_names=(),
        links=(),
        starts=(-1, -1, -1),
        deps=((), (0,), (1,)),
        storages=(Storage(8, 0, (1,), False), Storage(8, 1, (), True)),
    )
    result = schedule.schedule(program, MACHINE, 12)
    assert result.order == (0, 1, 2)
    assert result.reasons == (
        "no order found within the memory cap of 12 bytes; the lowest peak known is 16, at b: "
        "raise memory_budget",
    )


def test_two_processes_find_one_order():
    script = """
from tests import schedule_cases
from overlap import cost, schedule, simulate
with schedule_cases.fake_world(8):
    gm = schedule_cases.fsdp_moe(3, 2)
    program = simulate.extract(gm, cost.from_function(gm, cost.unit_us))
    peak = simulate.peak_memory(program, range(len(program)))[0]
    print(schedule.schedule(program, simulate.Machine(), int(1.2 * peak)).order)
"""
    root = Path(__file__).parent.parent
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=root,
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    outputs = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert outputs[0] == outputs[1] != ""
