from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from overlap import collectives, cost, graph, report, simulate, testing
from overlap.config import Config
from overlap.errors import ConfigError
from overlap.graph import Tag
from overlap.testing import assert_overlap_golden, explain_difference, make_golden, parse_golden
from tests.tracing import all_to_all, find, trace, wait


@dataclasses.dataclass(frozen=True)
class Compiled:
    kind: str
    gm: fx.GraphModule
    timeline: simulate.Timeline | None


def unit_us(node: fx.Node) -> float:
    """An all-to-all takes as long as two matmuls; nothing else takes time."""
    return 2.0 * collectives.is_start(node) + cost.unit_us(node)


def compiled(gm: fx.GraphModule, kind: str = "forward") -> Compiled:
    program = simulate.extract(gm, cost.from_function(gm, unit_us))
    timeline = simulate.simulate(program, range(len(program)), simulate.Machine())
    return Compiled(kind, gm, timeline)


def layer(x: torch.Tensor, w: torch.Tensor):
    first = all_to_all(x)
    y = torch.mm(torch.mm(w, w), w)
    first = wait(first)
    second = all_to_all(first)
    z = torch.mm(w, first)
    return y, z, wait(second)


def tagged() -> fx.GraphModule:
    gm = trace(layer, torch.ones(4, 4), torch.ones(4, 4))
    for name, module in (
        ("all_to_all_single", "moe"),
        ("all_to_all_single_1", "moe"),
        ("mm", "mlp"),
    ):
        find(gm, name).meta["nn_module_stack"] = {"": (f"L['self'].layers[1].{module}", object)}
    graph.set_tag(find(gm, "all_to_all_single_1"), Tag(slice=1))
    return gm


def exposed() -> fx.GraphModule:
    """The same with the first wait too early."""
    gm = tagged()
    find(gm, "all_to_all_single").append(find(gm, "wait_tensor"))
    return gm


def test_a_golden_prints_and_parses():
    golden = make_golden([compiled(tagged()), compiled(exposed(), "backward")])
    assert_expected_inline(
        str(golden),
        """\
overlap golden 1

== forward
     x_1: f32[4,4] = input
     w_1: f32[4,4] = input
,    all_to_all_single: f32[4,4] = all_to_all(x_1, [2, 2], [2, 2]) group=ep
|    mm: f32[4,4] = aten.mm(w_1, w_1)
|    mm_1: f32[4,4] = aten.mm(mm, w_1)
'    wait_tensor: f32[4,4] = wait(all_to_all_single)
,    all_to_all_single_1: f32[4,4] = all_to_all(wait_tensor, [2, 2], [2, 2]) group=ep  # slice=1
|    mm_2: f32[4,4] = aten.mm(w_1, wait_tensor)
'    wait_tensor_1: f32[4,4] = wait(all_to_all_single_1)
     return (mm_1, mm_2, wait_tensor_1)

== backward
     x_1: f32[4,4] = input
     w_1: f32[4,4] = input
,    all_to_all_single: f32[4,4] = all_to_all(x_1, [2, 2], [2, 2]) group=ep
'    wait_tensor: f32[4,4] = wait(all_to_all_single)
     mm: f32[4,4] = aten.mm(w_1, w_1)
     mm_1: f32[4,4] = aten.mm(mm, w_1)
,    all_to_all_single_1: f32[4,4] = all_to_all(wait_tensor, [2, 2], [2, 2]) group=ep  # slice=1
|    mm_2: f32[4,4] = aten.mm(w_1, wait_tensor)
'    wait_tensor_1: f32[4,4] = wait(all_to_all_single_1)
     return (mm_1, mm_2, wait_tensor_1)

== collectives
forward | layers.1.moe | all_to_all | - | 1 | 67 % | mm of layers.1.mlp, mm_1
forward | layers.1.moe | all_to_all | 1 | 1 | 33 % | mm_2
backward | layers.1.moe | all_to_all | - | 1 | 0 % | -
backward | layers.1.moe | all_to_all | 1 | 1 | 33 % | mm_2
""",
    )
    assert parse_golden(str(golden)) == golden


def test_a_graph_without_collectives_is_a_golden():
    golden = make_golden([compiled(trace(torch.relu, torch.ones(2)))])
    assert parse_golden(str(golden)) == golden
    assert parse_golden(str(make_golden([]))) == make_golden([])


def test_a_graph_without_a_schedule_is_its_text():
    golden = make_golden([Compiled("forward", tagged(), timeline=None)])
    assert golden.collectives == ()
    assert parse_golden(str(golden)) == golden


def explained(old: list[Compiled], new: list[Compiled]) -> str:
    return "\n".join(explain_difference(make_golden(old), make_golden(new)))


def test_no_difference_is_no_word():
    assert explained([compiled(tagged())], [compiled(tagged())]) == ""


def test_a_lost_overlap_in_words():
    assert_expected_inline(
        explained([compiled(tagged())], [compiled(exposed())]),
        """\
all_to_all 1 of layers.1.moe (forward) is now exposed; it was 67 % hidden behind mm of layers.1.mlp, mm_1
the text of graph 'forward' changed: -2 +2 lines""",
    )


def test_a_won_overlap_in_words():
    assert_expected_inline(
        explained([compiled(exposed())], [compiled(tagged())]),
        """\
all_to_all 1 of layers.1.moe (forward) is now 67 % hidden behind mm of layers.1.mlp, mm_1; it was exposed
the text of graph 'forward' changed: -2 +2 lines""",
    )


def test_a_part_of_an_overlap_in_words():
    gm = tagged()
    find(gm, "wait_tensor").append(find(gm, "mm_1"))
    assert_expected_inline(
        explained([compiled(tagged())], [compiled(gm)]),
        """\
all_to_all 1 of layers.1.moe (forward) is now 33 % hidden behind mm of layers.1.mlp; it was 67 % hidden behind mm of layers.1.mlp, mm_1
the text of graph 'forward' changed: -1 +1 lines""",
    )


def test_a_renamed_node_is_a_change_of_text_alone():
    gm = tagged()
    find(gm, "wait_tensor_1").name = "landed"
    assert_expected_inline(
        explained([compiled(tagged())], [compiled(gm)]),
        """the text of graph 'forward' changed: -2 +2 lines""",
    )


def test_graphs_and_collectives_that_come_and_go():
    plain = compiled(trace(torch.relu, torch.ones(2)))
    old = [plain, compiled(tagged(), "backward")]
    new = [compiled(tagged()), compiled(tagged(), "step")]
    assert_expected_inline(
        explained(old, new),
        """\
all_to_all 1 of layers.1.moe (backward) is gone; it was 67 % hidden behind mm of layers.1.mlp, mm_1
all_to_all 1 of layers.1.moe (backward, slice 1) is gone; it was 33 % hidden behind mm_2
all_to_all 1 of layers.1.moe (forward) is new; it is 67 % hidden behind mm of layers.1.mlp, mm_1
all_to_all 1 of layers.1.moe (forward, slice 1) is new; it is 33 % hidden behind mm_2
all_to_all 1 of layers.1.moe (step) is new; it is 67 % hidden behind mm of layers.1.mlp, mm_1
all_to_all 1 of layers.1.moe (step, slice 1) is new; it is 33 % hidden behind mm_2
the text of graph 'forward' changed: -3 +10 lines
graph 'backward' is gone
graph 'step' is new""",
    )


def test_text_that_is_no_golden():
    with pytest.raises(ConfigError) as error:
        parse_golden("something else\n")
    expected = "expected a golden that starts with 'overlap golden 1', found 'something else'"
    assert str(error.value) == expected
    with pytest.raises(ConfigError) as error:
        parse_golden("overlap golden 1\n\n== collectives\nforward | moe\n")
    assert str(error.value) == "expected a collective of a golden, found 'forward | moe'"


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """A compiler that returns its model; the list holds the config of each call."""
    seen: list[Config] = []

    def compile_graphs(model: Any, inputs: Any, config: Config) -> list[Compiled]:
        seen.append(config)
        return [compiled(model)]

    monkeypatch.setattr(report, "compile_graphs", compile_graphs)
    return seen


def test_the_golden_is_compared_and_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configs: list[Config]
):
    directory = tmp_path / "golden"

    def check(gm: fx.GraphModule, accept: str = "") -> str:
        with monkeypatch.context() as patch:
            patch.setenv("EXPECTTEST_ACCEPT", accept)
            try:
                assert_overlap_golden(gm, (), name="layer", directory=directory)
            except AssertionError as error:
                return str(error)
        return ""

    assert check(tagged()) == (
        "there is no golden layer.graph in golden/; EXPECTTEST_ACCEPT=1 pytest writes it"
    )
    assert check(tagged(), accept="1") == ""
    assert check(tagged()) == ""
    assert_expected_inline(
        check(exposed()),
        """\
the program is not the one in layer.graph:
  - all_to_all 1 of layers.1.moe (forward) is now exposed; it was 67 % hidden behind mm of layers.1.mlp, mm_1
  - the text of graph 'forward' changed: -2 +2 lines

      x_1: f32[4,4] = input
      w_1: f32[4,4] = input
 ,    all_to_all_single: f32[4,4] = all_to_all(x_1, [2, 2], [2, 2]) group=ep
-|    mm: f32[4,4] = aten.mm(w_1, w_1)
-|    mm_1: f32[4,4] = aten.mm(mm, w_1)
 '    wait_tensor: f32[4,4] = wait(all_to_all_single)
+     mm: f32[4,4] = aten.mm(w_1, w_1)
+     mm_1: f32[4,4] = aten.mm(mm, w_1)
 ,    all_to_all_single_1: f32[4,4] = all_to_all(wait_tensor, [2, 2], [2, 2]) group=ep  # slice=1
 |    mm_2: f32[4,4] = aten.mm(w_1, wait_tensor)
 '    wait_tensor_1: f32[4,4] = wait(all_to_all_single_1)
      return (mm_1, mm_2, wait_tensor_1)
 
 == collectives
-forward | layers.1.moe | all_to_all | - | 1 | 67 % | mm of layers.1.mlp, mm_1
+forward | layers.1.moe | all_to_all | - | 1 | 0 % | -
 forward | layers.1.moe | all_to_all | 1 | 1 | 33 % | mm_2

if this is what you want: EXPECTTEST_ACCEPT=1 pytest writes it anew""",
    )
    (directory / "layer.graph").write_text("overlap golden 0\n")
    assert_expected_inline(
        check(tagged()),
        """layer.graph cannot be read: expected a golden that starts with 'overlap golden 1', found 'overlap golden 0'; EXPECTTEST_ACCEPT=1 pytest writes it anew""",
    )


def test_figures_do_not_depend_on_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configs: list[Config]
):
    monkeypatch.setattr(testing, "check_golden", lambda golden, path, name: None)
    for config in (None, Config(hardware="cpu", slices=2)):
        assert_overlap_golden(tagged(), (), name="x", config=config, directory=tmp_path)
    assert configs == [Config(hardware=testing.HARDWARE), Config(hardware="cpu", slices=2)]


def test_the_golden_lies_beside_the_caller(configs: list[Config], monkeypatch: pytest.MonkeyPatch):
    seen: list[Path] = []
    monkeypatch.setattr(testing, "check_golden", lambda golden, path, name: seen.append(path))
    assert_overlap_golden(tagged(), (), name="layer")
    assert seen == [Path(__file__).parent / "golden"]


def test_a_name_that_is_no_file_name(configs: list[Config]):
    with pytest.raises(ConfigError) as error:
        assert_overlap_golden(tagged(), (), name="../x")
    expected = "expected letters, digits, '.', '_' or '-' in a name, found '../x'"
    assert str(error.value) == expected


GOLDEN_TEST = """\
from tests.test_testing import configs, tagged

def test_layer(overlap_golden, configs):
    overlap_golden(tagged(), ())
    overlap_golden(tagged(), (), name="other")
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env)


def test_the_fixture_names_and_marks_the_test(tmp_path: Path):
    (tmp_path / "test_model.py").write_text(GOLDEN_TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    pytest_command = ["pytest", "-q", "-p", "overlap.pytest_plugin", "-m", "overlap_golden"]
    command = [*pytest_command, "-p", "no:cacheprovider", str(tmp_path)]
    ran = run(*command, EXPECTTEST_ACCEPT="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert ran.returncode == 0, ran.stdout
    goldens = sorted(path.name for path in (tmp_path / "golden").iterdir())
    assert goldens == ["layer.graph", "other.graph"]


def test_the_plugin_does_not_import_torch():
    program = "import sys, overlap.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
