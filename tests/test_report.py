"""Reports: what is counted, that it prints, travels and turns into a page."""

from __future__ import annotations

import json
import math
import pickle
import re
from xml.etree import ElementTree

import pytest
import torch

from overlap import report, report_html, target
from overlap.config import Config
from overlap.errors import ConfigError
from overlap.report import MeasuredStep, Report, explain, measured_step
from overlap.report_html import Box, Lane, Track
from overlap.runtime import fake
from overlap.runtime.link import Record, Recording
from overlap.tables import Grid
from overlap.target import MeshSpec


@pytest.fixture(scope="module")
def compiled() -> Report:
    """A small block in two slices."""
    with fake.world(2):
        step = target.make_step("models.moe:train_step", "toy", MeshSpec.of_world(2))
        config = Config(slices=2, axis="batch")
        return explain(report.compile_only(step.loss_module(), step.example_inputs, config))


def record(kind: str, issue: float, start: float, end: float, wait: tuple[float, float]) -> Record:
    return Record(kind, "ep", 1000.0, issue, start, end, *wait)


def one_step() -> MeasuredStep:
    """From 10.0 s: on the link 1 to 3 s and 4 to 6 s; blocked 2 to 3.5 s and 5 to 6 s."""
    recording = Recording(
        [
            record("all_to_all", 10.5, 11.0, 13.0, (12.0, 13.5)),
            record("all_to_all", 13.7, 14.0, 16.0, (15.0, 16.0)),
            Record("barrier", "ep", 0.0, 16.5),  # nobody waits for it
        ]
    )
    return measured_step(recording, 10.0, forward=14.0, backward=18.0)


def test_exposed_is_on_the_link_and_blocked():
    step = one_step()
    assert step.comm_us == pytest.approx(4e6)
    assert step.exposed_us == pytest.approx(2e6)
    assert step.blocked_us == pytest.approx(2.5e6)
    assert step.hidden == pytest.approx(0.5)
    assert step.length_us == pytest.approx(8e6)
    assert len(step.transfers) == 2


def test_no_communication_is_not_hidden():
    step = measured_step(Recording(), 0.0, step=1.0)
    assert (step.comm_us, step.exposed_us, step.hidden) == (0, 0, 0)


def test_a_union_of_intervals():
    assert report.union([(3, 4), (0, 2), (1, 2.5), (5, 5)]) == [(0, 2.5), (3, 4)]


def test_what_was_decided(compiled: Report):
    assert compiled.slices == 2
    assert [graph.kind for graph in compiled.graphs] == ["forward", "backward"]
    assert [(r.module, r.num_collectives) for r in compiled.regions] == [("module.moe", 5)]
    assert compiled.peak_after_bytes > 0
    rows = report.collective_rows(compiled)
    assert [(row.graph, row.title, row.slices) for row in rows] == [
        ("forward", "all_to_all 1", "2"),
        ("forward", "all_to_all 2", "2"),
        ("forward", "all_to_all 3", "2"),
        ("backward", "all_to_all 1", "2"),
        ("backward", "all_to_all 2", "2"),
    ]
    exposed_us = sum(graph.after.exposed_us for graph in compiled.graphs)
    assert sum(one.exposed_us for one in compiled.collectives) == pytest.approx(exposed_us)


def test_it_prints_travels_and_is_data(compiled: Report):
    text = str(compiled)
    assert text.startswith("2 slices along the batch, numerics 'reassociate', hardware profile")
    assert "module.moe" in text and "peak memory" in text
    assert pickle.loads(pickle.dumps(compiled)) == compiled
    assert json.loads(json.dumps(compiled.to_json()))["slices"] == 2


def test_measured_beside_predicted(compiled: Report):
    records = [
        Record("all_to_all", "0", 8.0, i, i + 0.1, i + 0.2, i + 0.1, i + 0.3) for i in range(10)
    ]
    step = measured_step(Recording(records), 0.0, forward=5.0, backward=11.0)
    found = report.with_measured(compiled, step)
    assert [one.measured_us for one in found.collectives] == [pytest.approx(1e5)] * 10
    assert "blocked" in str(found)
    other = measured_step(Recording(records[:3]), 0.0, forward=5.0)
    assert report.with_measured(compiled, other).collectives == compiled.collectives


def test_what_is_not_compiled_is_unknown():
    with pytest.raises(ConfigError, match="nothing is known about this Linear"):
        explain(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="nothing is known about this function"):
        explain(lambda x: x)


def test_a_module_and_a_function_are_found():
    torch.compiler.reset()
    module = torch.nn.Linear(2, 2)
    step = torch.compile(module, backend="overlap")
    step(torch.ones(3, 2))
    found = explain(step)
    assert [remark.kind for remark in found.remarks] == ["note"]
    assert "no collective" in str(found)

    inner = torch.nn.Linear(2, 2)

    @torch.compile(backend="overlap")
    def loss(x: torch.Tensor) -> torch.Tensor:
        return inner(x).sum()

    loss(torch.ones(3, 2))
    assert explain(loss).graphs == ()


def test_graphs_are_compiled_without_running_them():
    with fake.world(2):
        step = target.make_step("models.moe:train_step", "toy", MeshSpec.of_world(2))
        graphs = report.compile_graphs(step.loss_module(), step.example_inputs, Config(slices=1))
    assert [(one.kind, len(one.collectives)) for one in graphs] == [("forward", 3), ("backward", 2)]


def track() -> Track:
    boxes = (Box(0, 10, "plain", "a & b <c>"), Box(10, 30, "wait", "waiting"))
    return Track("one <step>", "30 us", (Lane("compute", boxes),), (("forward", 10), ("end", 30)))


def test_a_picture_is_well_formed():
    picture = report_html.picture([track()])
    root = ElementTree.fromstring(picture)
    tips = [e.get("data-tip") for e in root.iter() if e.get("data-tip")]
    assert tips == ["a & b <c>", "waiting"]


def test_narrow_boxes_become_one():
    boxes = [Box(i * 0.01, i * 0.01 + 0.01, "plain", str(i)) for i in range(100)]
    boxes.append(Box(1.0, 1000.0, "plain", "long"))
    picture = report_html.picture([Track("t", "", (Lane("compute", tuple(boxes)),), (("", 1e3),))])
    assert picture.count("data-tip") == 2
    assert "and 99 short ones after it" in picture


def test_the_page_needs_nothing_else(compiled: Report):
    page = report_html.report_page(compiled, "a block", compiled)
    outside = re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(?!#)[^\"')]+", page)
    assert outside == []
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert page.count("<svg") == 1 and page.count("<details>") == 2


def test_measured_timelines(compiled: Report):
    track = report_html.measured_track("eager", one_step())
    compute, group = track.lanes
    assert group.name == "group ep"
    assert [(box.style, box.start_us / 1e6, box.end_us / 1e6) for box in compute.boxes] == [
        ("plain", 0, 2),
        ("wait", 2, 3.5),
        ("plain", 3.5, 4),
        ("plain", 4, 5),
        ("wait", 5, 6),
        ("plain", 6, 8),
    ]
    assert "hidden 50 %" in track.detail


def test_a_table_as_html_is_escaped():
    assert "<td>a&lt;b</td><td class=figure>1</td>" in report_html.table(
        Grid(("x", "y"), (("a<b", "1"),))
    )


def test_ticks_are_round():
    for length_us in (7.0, 1000.0, 123456.0):
        tick = report_html.tick(length_us)
        assert 4 <= length_us / tick <= 14
        assert f"{tick / 10 ** math.floor(math.log10(tick)):g}" in "125"
