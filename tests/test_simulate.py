from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from overlap import collectives, cost, schedule, simulate
from overlap.collectives import Kind, Transport
from overlap.errors import PassError
from overlap.simulate import Event, Machine, Program, Storage, TaskKind, Timeline
from tests import schedule_cases
from tests.random_programs import random_program
from tests.tracing import all_to_all, c10d, trace, wait


def extract(gm: fx.GraphModule, **options: Any) -> Program:
    return simulate.extract(gm, cost.from_function(gm, cost.unit_us), **options)


def program(*tasks: tuple[str, TaskKind, float, tuple[str, ...]], **changes: Any) -> Program:
    """Tasks by name, kind, duration and what they depend on; a start named `a@g` is on group g,
    and a wait waits for its first dependency."""
    names = [name for name, *_ in tasks]
    groups = list(dict.fromkeys(n.partition("@")[2] for n, k, *_ in tasks if k is TaskKind.START))
    kinds = tuple(kind for _, kind, *_ in tasks)
    deps = tuple(tuple(names.index(d) for d in before) for *_, before in tasks)
    values: dict[str, Any] = {
        "names": tuple(names),
        "kinds": kinds,
        "durations": tuple(us for _, _, us, _ in tasks),
        "groups": tuple(
            groups.index(n.partition("@")[2]) if k is TaskKind.START else -1 for n, k, *_ in tasks
        ),
        "group_names": tuple(groups),
        "links": (0,) * len(groups),
        "starts": tuple(
            d[0] if k is TaskKind.WAIT else -1 for k, d in zip(kinds, deps, strict=True)
        ),
        "deps": deps,
        "storages": (),
    }
    return Program(**values | changes)


COMPUTE, START, WAIT, READ = TaskKind.COMPUTE, TaskKind.START, TaskKind.WAIT, TaskKind.HOST_READ


def play(program: Program, machine: Machine = Machine()) -> Timeline:  # noqa: B008
    return simulate.simulate(program, range(len(program)), machine)


def times(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {e.name: (round(e.start_us, 6), round(e.end_us, 6)) for e in timeline.events}


# ---- the machine --------------------------------------------------------------------------------

OVERLAPPED = program(
    ("a@g", START, 3.0, ()),
    ("mm", COMPUTE, 2.0, ()),
    ("w", WAIT, 0.0, ("a@g",)),
    ("mm1", COMPUTE, 1.0, ("w",)),
)


def test_compute_hides_a_collective_and_a_wait_blocks():
    timeline = play(OVERLAPPED)
    assert times(timeline) == {"a@g": (0, 3), "mm": (0, 2), "w": (2, 3), "mm1": (3, 4)}
    assert (timeline.makespan_us, timeline.comm_us, timeline.compute_us) == (4.0, 3.0, 3.0)
    assert (timeline.exposed_us, timeline.hidden_us) == (1.0, 2.0)
    assert timeline.hidden == pytest.approx(2 / 3)
    assert timeline.exposed == (("a@g", 1.0),)


def test_the_host_launches_before_it_computes():
    timeline = play(OVERLAPPED, Machine(launch_us=0.1))
    assert times(timeline)["mm"] == (0.1, 2.2)
    assert timeline.makespan_us == pytest.approx(4.2)


def test_on_a_stream_the_host_runs_ahead():
    timeline = play(OVERLAPPED, Machine(launch_us=0.1, is_stream=True))
    assert times(timeline)["mm"] == (0.2, 2.2)
    assert timeline.makespan_us == pytest.approx(0.1 + 3 + 1)


def test_issuing_a_collective_takes_the_host_its_own_time():
    """The start 0.5, the wait 0.25, which the transfer covers."""
    issued = dataclasses.replace(OVERLAPPED, issue_us=(0.5, 0.0, 0.25, 0.0))
    timeline = play(issued)
    assert times(timeline) == {
        "a@g": (0.5, 3.5),
        "mm": (0.5, 2.5),
        "w": (2.5, 3.5),
        "mm1": (3.5, 4.5),
    }
    assert schedule.lower_bound_us(issued, Machine()) <= timeline.makespan_us


def test_on_a_stream_a_start_waits_for_the_compute_before_it():
    late = program(("mm", COMPUTE, 2.0, ()), ("a@g", START, 1.0, ()), ("w", WAIT, 0.0, ("a@g",)))
    timeline = play(late, Machine(is_stream=True))
    assert times(timeline)["a@g"] == (2.0, 3.0)


def test_a_host_read_drains_the_stream_and_stalls_issue():
    read = program(("mm", COMPUTE, 2.0, ()), ("r", READ, 0.5, ()), ("mm1", COMPUTE, 1.0, ()))
    timeline = play(read, Machine(launch_us=0.1, is_stream=True))
    assert times(timeline) == {"mm": (0.1, 2.1), "r": (2.1, 2.6), "mm1": (2.7, 3.7)}


def starts(groups: tuple[str, str], **changes: Any) -> Program:
    a, b = (f"{name}@{group}" for name, group in zip("ab", groups, strict=True))
    return program(
        (a, START, 1.0, ()),
        (b, START, 2.0, ()),
        ("wa", WAIT, 0.0, (a,)),
        ("wb", WAIT, 0.0, (b,)),
        **changes,
    )


def test_one_group_is_a_fifo():
    assert times(play(starts(("g", "g"))))["b@g"] == (1.0, 3.0)


def test_groups_of_one_link_share_its_rate():
    timeline = play(starts(("g", "h")))
    assert (times(timeline)["a@g"], times(timeline)["b@h"]) == ((0.0, 2.0), (0.0, 3.0))


def test_groups_of_two_links_do_not():
    timeline = play(starts(("g", "h"), links=(0, 1)))
    assert (times(timeline)["a@g"], times(timeline)["b@h"]) == ((0.0, 1.0), (0.0, 2.0))


def test_communication_slows_compute_beside_it():
    timeline = play(OVERLAPPED, Machine(contention=0.25))
    assert times(timeline)["mm"] == (0.0, 2.5)
    alone_after = program(("a@g", START, 1.0, ()), ("mm", COMPUTE, 2.0, ()))
    # one unit of time beside it does 0.8 of the work
    assert times(play(alone_after, Machine(contention=0.25)))["mm"] == (0.0, 2.2)


def test_a_collective_nobody_waits_for_counts():
    assert play(program(("a@g", START, 2.0, ()))).makespan_us == 2.0


def test_an_order_against_a_dependency_is_refused():
    message = "simulate: w depends on a@g, which comes after it in this order"
    with pytest.raises(PassError, match=message):
        simulate.simulate(OVERLAPPED, (2, 0, 1, 3), Machine())
    with pytest.raises(PassError, match="an order of 4 nodes expected, found 3 nodes, 1 missing"):
        simulate.simulate(OVERLAPPED, (0, 1, 2), Machine())


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.booleans(), st.sampled_from((0.0, 0.1)), st.sampled_from((0, 1)))
def test_figures_of_random_programs_are_consistent(seed, is_stream, launch_us, contention):
    random = random_program(seed, 14, num_groups=2)
    timeline = play(random, Machine(is_stream, launch_us, float(contention)))
    assert 0 <= timeline.exposed_us <= timeline.comm_us + 1e-6
    assert timeline.comm_us <= random.total_us(TaskKind.START) + 1e-6
    assert timeline.exposed_us + timeline.compute_us <= timeline.makespan_us + 1e-6
    bound_us = schedule.lower_bound_us(random, Machine(is_stream, launch_us, float(contention)))
    assert timeline.makespan_us >= bound_us - 1e-6


def test_the_trace_has_a_thread_per_lane():
    trace = simulate.chrome_trace(play(OVERLAPPED))
    assert json.loads(json.dumps(trace)) == trace
    threads = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    slices = {e["name"]: (e["tid"], e["ts"], e["dur"]) for e in trace["traceEvents"][3:]}
    assert threads == ["host", "compute", "g"]
    assert slices["a@g"] == (2, 0.0, 3.0)
    assert slices["mm1"] == (1, 3.0, 1.0)


def test_events_are_plain_values():
    assert play(OVERLAPPED).events[0] == Event("mm", "compute", 0.0, 2.0)


# ---- what a graph becomes -----------------------------------------------------------------------


def deps_of(program: Program, name: str) -> set[str]:
    return {program.names[dep] for dep in program.deps[program.names.index(name)]}


def test_kinds_of_tasks():
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return wait(all_to_all(x.t().mm(w))).relu()

    found = extract(trace(fn, torch.zeros(8, 8), torch.zeros(8, 8)))
    kinds = {n: k for n, k in zip(found.names, found.kinds, strict=True) if k}
    assert kinds == {"mm": COMPUTE, "all_to_all_single": START, "wait_tensor": WAIT}
    assert found.group_names == ("ep",)


def test_a_write_keeps_its_place_among_reads_of_its_storage():
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin()
        before = y.cos()
        y.view(-1).add_(1)
        return before, y.tan(), x.neg()

    found = extract(trace(fn, torch.zeros(4, 4)))
    assert deps_of(found, "add_") == {"view", "cos"}
    assert deps_of(found, "tan") == {"sin", "add_"}
    assert deps_of(found, "neg") == {"x_1"}


def test_a_buffer_in_flight_is_not_written_before_the_wait():
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        z = wait(all_to_all(y))
        y.zero_()
        return z

    found = extract(trace(fn, torch.zeros(4, 4)))
    assert deps_of(found, "zero_") == {"sin", "all_to_all_single", "wait_tensor"}


def test_an_in_place_collective_is_read_behind_its_wait():
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sin()
        z = wait(c10d.all_reduce_(y, "sum", "dp"))
        return z, y.view(-1).cos()

    found = extract(trace(fn, torch.zeros(4, 4)))
    assert deps_of(found, "wait_tensor") == {"all_reduce_"}
    assert "wait_tensor" in deps_of(found, "cos")


def test_random_numbers_are_drawn_in_order():
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.rand_like(x), torch.randn_like(x), x.sin()]

    found = extract(trace(fn, torch.zeros(4)))
    assert "rand_like" in deps_of(found, "randn_like")
    assert deps_of(found, "sin") == {"x_1"}


def test_attention_without_dropout_draws_nothing():
    def fn(q: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
        attend = torch.nn.functional.scaled_dot_product_attention
        return [attend(q, q, q), attend(k, k, k)]

    x = torch.zeros(2, 2, 8, 8)
    gm = schedule_cases.trace(fn, x, x)
    second = [n.name for n in gm.graph.nodes if "attention" in n.name][1]
    assert deps_of(extract(gm), second) == {"k_1"}


def test_point_to_point_keeps_its_order():
    @torch.library.custom_op("overlap_tests::send", mutates_args=())
    def send(x: torch.Tensor, group: str) -> torch.Tensor:
        return x.clone()

    send.register_fake(lambda x, group: torch.empty_like(x))
    packet = torch.ops.overlap_tests.send
    collectives.register_transport(Transport(packet, Kind.P2P, rows="x", group="group"))
    gm = trace(lambda x: [wait(s) for s in [send(x, "pp"), send(x, "pp")]], torch.zeros(4))
    found = extract(gm)
    assert deps_of(found, "send_1") == {"x_1", "send"}
    assert deps_of(found, "wait_tensor") == {"send", "send_1"}


# ---- memory -------------------------------------------------------------------------------------


def test_a_value_dies_after_its_last_reader():
    chain = program(
        ("a", COMPUTE, 1.0, ()),
        ("b", COMPUTE, 1.0, ("a",)),
        ("c", COMPUTE, 1.0, ("b",)),
        storages=(
            Storage(3, 0, (1,), False),
            Storage(4, 1, (2,), False),
            Storage(5, 2, (), True),
        ),
    )
    assert simulate.memory_profile(chain, (0, 1, 2)) == [3, 7, 9]
    assert simulate.peak_memory(chain, (0, 1, 2)) == (9, 2)


def test_a_collective_holds_its_operand_until_its_wait():
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        z = all_to_all(y)
        u = x.cos()
        return wait(z) + u

    gm = trace(fn, torch.zeros(4, 4))
    found = extract(gm)
    sizes = simulate.memory_profile(found, range(len(found)))
    alive = {name: size // 64 for name, size in zip(found.names, sizes, strict=True)}
    assert alive == {
        "x_1": 0,
        "sin": 1,
        "all_to_all_single": 2,
        "cos": 3,
        "wait_tensor": 3,
        "add": 3,
        "output": 1,
    }


def test_a_view_keeps_its_base_alive():
    gm = trace(lambda x: x.sin().view(-1).cos(), torch.zeros(4, 4))
    found = extract(gm)
    assert [s.num_bytes for s in found.storages] == [64, 64]
    assert found.storages[0].uses == (2, 3)


def test_only_inputs_that_are_freed_count():
    gm = trace(lambda x, y: (x + y).sin(), torch.zeros(4), torch.zeros(4))
    assert [s.definer for s in extract(gm).storages] == [2, 3]
    freed = extract(gm, freed_inputs=["x_1"]).storages
    assert [(s.definer, s.uses) for s in freed] == [(0, (2,)), (2, (3,)), (3, ())]


def test_a_backward_graph_frees_what_was_saved_but_not_the_parameters():
    backward = fx.Graph()
    inputs = [backward.placeholder(name) for name in ("primals_1", "mm", "tangents_1")]
    for node in inputs:
        node.meta["val"] = torch.empty(4, device="meta")
    backward.output(())
    gm = fx.GraphModule({}, backward)
    assert [s.definer for s in extract(gm).storages] == [1, 2]
