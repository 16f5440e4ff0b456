"""Cost tables: what a file holds, what is refused, and what nodes cost by one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from overlap import compilation, cost, cost_table, hardware, pricing
from overlap.compilation import Compilation
from overlap.config import Config
from overlap.cost import Costs, Sizes, Sources
from overlap.cost_table import Call, CostTable, Place, Step
from overlap.errors import ConfigError
from overlap.simulate import Machine
from tests import schedule_cases
from tests.schedule_cases import all_to_all, trace

CPU = hardware.load("cpu")
PLACE = Place("2.13.0", "a processor", 1, "", 2, "gloo", "")
MM = "aten.mm(f32[16,8], f32[8,8])"
TABLE = CostTable(
    place=PLACE,
    dims={0: 8},
    axis="batch",
    skews=(1.0, 1.25, 1.5),
    contention=0.25,
    programs={
        "abc": {1: Step(200.0, 210.0), 2: Step(150.0, 161.0, (150.0, 160.0, 170.0, 190.0, 230.0))}
    },
    calls={
        MM: Call(40.0, 35.0, 3, flops=2 * 16 * 8 * 8, num_bytes=4 * (128 + 64 + 128)),
        "all_to_all/8(f32[16,8])": Call(500.0, 450.0, 2, num_bytes=448.0, issue_us=20.0),
        "wait()": Call(2.0, 1.0, 2, issue_us=2.0),
    },
)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with schedule_cases.fake_world(8):
        yield


# --- the file -------------------------------------------------------------------------------------


def test_a_file_is_read_back_and_is_known_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    TABLE.save(path)
    found = cost_table.load(str(path))
    assert found == TABLE
    assert found.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    reordered = dataclasses.replace(TABLE, calls=dict(reversed(list(TABLE.calls.items()))))
    assert reordered.digest == TABLE.digest
    slower = dataclasses.replace(TABLE, contention=0.5)
    assert slower.digest != TABLE.digest


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Place)])
def test_a_table_of_another_place_is_refused_by_field(field: str) -> None:
    here = dataclasses.asdict(PLACE)
    TABLE.check("t.json", here, "abc", "batch")
    here[field] = 7
    with pytest.raises(ConfigError) as refused:
        TABLE.check("t.json", here, "abc", "batch")
    assert str(refused.value) == (
        f"cost table 't.json' is from another place: {field} is {getattr(PLACE, field)!r} in the "
        "table and 7 here; measure again with: overlap hardware --measure TARGET -o FILE"
    )


def test_a_table_of_another_graph_is_refused() -> None:
    message = "is for another graph: program is 'abc' in the table and 'abd' here; measure again"
    with pytest.raises(ConfigError, match=re.escape(message)):
        TABLE.check("t.json", {}, "abd", "batch")


def test_a_table_of_other_slices_is_refused() -> None:
    message = "axis is 'batch' in the table and 'token' here; measure again with: overlap hardware"
    with pytest.raises(ConfigError, match=re.escape(message)):
        TABLE.check("t.json", {}, "abc", "token")


_STEP: dict[str, Any] = {"predicted_us": 1.0, "measured_us": 2.0}


def _broken(**changes: Any) -> str:
    return json.dumps(json.loads(TABLE.text) | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read: Expecting"),
        ("[]", "has format None, expected 1"),
        (_broken(format=2), "has format 2, expected 1"),
        (_broken(calls={MM: {"us": 3.0}}), "is damaged: TypeError"),
        (_broken(calls={MM: dataclasses.asdict(TABLE.calls[MM]) | {"us": "3"}}), "us is '3'"),
        (_broken(place={}), "is damaged: TypeError"),
        (_broken(skews=3), "is damaged: TypeError"),
        (_broken(programs={"abc": {1: _STEP | {"skewed_us": [1.0]}}}), "skewed_us has 1 figures"),
        (_broken(dims=[]), "is damaged: AttributeError"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        cost_table.load(str(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        cost_table.load(str(tmp_path / "none.json"))


# --- skew -----------------------------------------------------------------------------------------


def test_skew_is_relative_to_what_the_calls_were_measured_at() -> None:
    assert TABLE.skew(2.5) == 2.0
    assert TABLE.skew("p50") == 1.0
    assert TABLE.skew("p100") == pytest.approx(1.5 / 1.25)
    with pytest.raises(ConfigError, match="saw no routed exchange; give a number"):
        dataclasses.replace(TABLE, skews=()).skew("p90")


def test_the_number_of_slices_is_chosen_at_the_skew() -> None:
    """Two slices are best for even routing, one where the busiest rank has twice the rows."""
    steps = {
        1: Step(200.0, 0, (200, 210, 220, 240, 280)),
        2: Step(150.0, 0, (150, 200, 250, 350, 550)),
    }
    table = dataclasses.replace(TABLE, programs={"abc": steps}, skews=(1.0, 1.0, 2.0))

    def slices(skew: float | str | None) -> int:
        config = Config(costs="t.json", skew=skew)
        record = Compilation(config, None, (), program="abc", profile=CPU, table=table)
        gm = trace(torch.relu, torch.zeros(1))
        return compilation.decide(gm, record, lambda group: 8).slices

    assert [slices(skew) for skew in (None, 1.0, "p50", "p100", 3.0)] == [2, 2, 2, 1, 1]


# --- prices ---------------------------------------------------------------------------------------


def price(gm: fx.GraphModule, table: CostTable | None = TABLE) -> Costs:
    return pricing.estimate(gm, CPU, lambda group: 8, table=table)


def call(gm: fx.GraphModule, name: str) -> str:
    (node,) = (node for node in gm.graph.nodes if node.name == name)
    return pricing.call_of(node, lambda group: 8, Sizes())


def test_without_a_table_prices_are_the_formulas() -> None:
    gm = trace(torch.mm, torch.zeros(16, 8), torch.zeros(8, 8))
    assert price(gm, table=None) == cost.estimate(gm, CPU, lambda group: 8)


def test_a_call_of_the_table_costs_what_was_measured() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return all_to_all(x @ w)

    costs = price(trace(program, torch.zeros(16, 8), torch.zeros(8, 8)))
    assert costs.sources == Sources(measured=3)
    assert costs.nodes["mm"].compute_us == 40.0
    start = costs.nodes["all_to_all_single"]
    assert (start.collective_us, start.issue_us, start.compute_us) == (500.0, 20.0, 0.0)
    assert costs.nodes["wait_tensor"].issue_us == 2.0
    assert costs.launch_us == 0.0


def test_another_size_is_scaled_from_the_nearest_measured_one() -> None:
    gm = trace(torch.mm, torch.zeros(16_000, 8), torch.zeros(8, 8))
    work = cost.Work(2 * 16_000 * 8 * 8, 4 * (2 * 128_000 + 64)).us(CPU)
    known = cost.Work(2 * 16 * 8 * 8, 4 * (2 * 128 + 64)).us(CPU)
    costs = price(gm)
    assert costs.sources == Sources(scaled=1)
    expected = 40.0 * (CPU.launch_us + work) / (CPU.launch_us + known)
    assert costs.nodes["mm"].compute_us == pytest.approx(expected)


def test_an_operator_that_was_not_measured_is_counted() -> None:
    costs = price(trace(lambda x: torch.relu(x).double().sum(), torch.zeros(16, 8)))
    assert costs.sources is not None
    assert costs.sources.formulas == {"aten._to_copy": 1, "aten.relu": 1, "aten.sum": 1}
    assert str(costs.sources).endswith(
        "3 by formula: aten._to_copy (1), aten.relu (1), aten.sum (1)"
    )
    assert costs.nodes["relu"].compute_us > CPU.launch_us


def test_dtypes_do_not_scale_into_each_other() -> None:
    costs = price(trace(torch.mm, torch.zeros(16, 8).double(), torch.zeros(8, 8).double()))
    assert costs.sources == Sources(formulas={"aten.mm": 1})


def test_a_call_says_shapes_strides_and_constants() -> None:
    gm = trace(lambda x: x.t() + x.select(1, 2), torch.zeros(8, 8))
    assert call(gm, "add") == "aten.add.Tensor(f32[8,8]@1,8, f32[8]@8)"
    assert call(gm, "select") == "aten.select.int(f32[8,8], 1, 2)"
    assert call(gm, "x_1") == ""


def test_adding_in_place_is_the_same_call() -> None:
    x = torch.zeros(8, 8)
    gm = trace(lambda x: torch.mm(x, x).addmm_(x, x), x)
    other = trace(lambda x: torch.mm(x, x).addmm(x, x), x)
    assert call(gm, "addmm_") == call(other, "addmm")


def test_a_measured_machine_has_no_launch_of_its_own() -> None:
    assert Machine.measured(TABLE) == Machine(launch_us=0.0, contention=0.25)


def test_sources_add_up() -> None:
    one, other = Sources(1, 2, {"a": 1}), Sources(3, 4, {"a": 1, "b": 2})
    assert one + other == Sources(4, 6, {"a": 2, "b": 2})
