from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from overlap import graph, pipeline, printing
from overlap.config import Config
from overlap.errors import ConfigError, PassError, VerifyError
from overlap.graph import Phase, Tag
from overlap.pipeline import Context, Effect
from tests.tracing import all_to_all, find, trace, wait


@dataclasses.dataclass(frozen=True)
class Mark:
    """Tags every matmul with a slice."""

    slice: int = 0
    regions: tuple[str, ...] = ()
    name: str = "mark"
    effect: Effect = Effect.ANNOTATE
    requires: Phase = Phase.FORWARD
    ensures: Phase = Phase.FORWARD

    def run(self, gm: fx.GraphModule, ctx: Context) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.matmul.default):
            graph.set_tag(node, Tag(slice=self.slice))


@dataclasses.dataclass(frozen=True)
class Sink:
    """Moves every wait to the end, before the node that reads it or, if `blindly`, behind it."""

    blindly: bool = False
    name: str = "sink"
    effect: Effect = Effect.REORDER
    requires: Phase = Phase.NORMALIZED
    ensures: Phase = Phase.SCHEDULED

    def run(self, gm: fx.GraphModule, ctx: Context) -> None:
        node = find(gm, "wait_tensor")
        reader = next(iter(node.users))
        (reader.append if self.blindly else reader.prepend)(node)


@dataclasses.dataclass(frozen=True)
class Normalize:
    """Does nothing, but says that the graph is normalized; or drops a wait."""

    drop_wait: bool = False
    name: str = "normalize"
    effect: Effect = Effect.REWRITE
    requires: Phase = Phase.FORWARD
    ensures: Phase = Phase.NORMALIZED

    def run(self, gm: fx.GraphModule, ctx: Context) -> None:
        if self.drop_wait:
            node = find(gm, "wait_tensor")
            node.replace_all_uses_with(node.all_input_nodes[0])
            gm.graph.erase_node(node)


@dataclasses.dataclass(frozen=True)
class Fail:
    """Fails as it is told to."""

    how: str = "graph"
    effect: Effect = Effect.ANNOTATE
    name: str = "fail"
    requires: Phase = Phase.FORWARD
    ensures: Phase = Phase.FORWARD

    def run(self, gm: fx.GraphModule, ctx: Context) -> None:
        matmul = find(gm, "matmul")
        match self.how:
            case "graph":
                raise PassError("layers.0 cannot be cut along dim 0")
            case "bug":
                raise KeyError("missing")
            case "refuse":
                ctx.remark("refused", "it mixes rows", matmul, advice="choose axis='expert'")
            case "edit":
                matmul.args = (matmul.args[0], matmul.args[0])
            case "dead":
                with gm.graph.inserting_before(matmul):
                    gm.graph.call_function(torch.ops.aten.relu.default, (matmul.args[0],))
                    gm.graph.node_copy(find(gm, "all_to_all_single"))
            case _:
                ctx.fact(Config)


KNOWN = {"mark": Mark, "sink": Sink, "normalize": Normalize, "fail": Fail}


def exchange(x: torch.Tensor, w: torch.Tensor):
    landed = wait(all_to_all(x))
    return x @ w, torch.relu(landed)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def gm() -> fx.GraphModule:
    return trace(exchange, torch.ones(4, 4), torch.ones(4, 4))


@pytest.fixture
def ctx() -> Context:
    return Context(Config(), group_size=lambda group: 2)


def message(error: pytest.ExceptionInfo[BaseException]) -> str:
    """The error's text, with the reproducer's hash left out."""
    folders = [path.name for path in Path().glob("overlap-repro-*")]
    return (
        str(error.value).replace(folders[0], "overlap-repro-...") if folders else str(error.value)
    )


def test_passes_move_the_graph_through_its_phases(gm: fx.GraphModule, ctx: Context):
    ctx.keep_dumps = True
    pipeline.run(gm, [Mark(slice=1), Normalize(), Sink()], ctx)
    assert graph.phase_of(gm) is Phase.SCHEDULED
    assert [run.pass_text for run in ctx.runs] == ["mark{slice=1}", "normalize", "sink"]
    assert all(run.run_us > 0 and run.verify_us > 0 for run in ctx.runs)
    assert ctx.runs[-1].dump == printing.dump(gm)
    assert_expected_inline(
        printing.dump(gm),
        """\
     x_1: f32[4,4] = input
     w_1: f32[4,4] = input
,    all_to_all_single: f32[4,4] = all_to_all(x_1, [2, 2], [2, 2]) group=ep
|    matmul: f32[4,4] = aten.matmul(x_1, w_1)  # slice=1
'    wait_tensor: f32[4,4] = wait(all_to_all_single)
     relu: f32[4,4] = aten.relu(wait_tensor)
     return (matmul, relu)""",
    )


def test_the_code_follows_the_graph(gm: fx.GraphModule, ctx: Context):
    pipeline.run(gm, [Normalize(), Sink()], ctx)
    assert gm.code.index("matmul") < gm.code.index("wait_tensor =")


def test_annotating_a_later_phase_keeps_it(gm: fx.GraphModule, ctx: Context):
    pipeline.run(gm, [Normalize(), Mark()], ctx)
    assert graph.phase_of(gm) is Phase.NORMALIZED


def test_dead_code_goes_but_collectives_stay(gm: fx.GraphModule, ctx: Context):
    pipeline.run(gm, [Fail("dead", Effect.REWRITE)], ctx)
    assert_expected_inline(
        printing.dump(gm),
        """\
     x_1: f32[4,4] = input
     w_1: f32[4,4] = input
,    all_to_all_single: f32[4,4] = all_to_all(x_1, [2, 2], [2, 2]) group=ep
'    wait_tensor: f32[4,4] = wait(all_to_all_single)
,    all_to_all_single_1: f32[4,4] = all_to_all(x_1, [2, 2], [2, 2]) group=ep
|    matmul: f32[4,4] = aten.matmul(x_1, w_1)
|    relu: f32[4,4] = aten.relu(wait_tensor)
|    return (matmul, relu)""",
    )


def test_too_early_a_phase(gm: fx.GraphModule, ctx: Context):
    with pytest.raises(PassError) as error:
        pipeline.run(gm, [Sink()], ctx)
    assert_expected_inline(
        message(error),
        """\
sink: the graph is in phase FORWARD; it has to be NORMALIZED
the graph before the pass is in overlap-repro-.../""",
    )


def test_too_late_a_phase(gm: fx.GraphModule, ctx: Context):
    with pytest.raises(PassError) as error:
        pipeline.run(gm, [Normalize(), Sink(), Normalize()], ctx)
    assert_expected_inline(
        message(error),
        """\
normalize: the graph is in phase SCHEDULED, past NORMALIZED; run the pass earlier
the graph before the pass is in overlap-repro-.../""",
    )


def test_a_pass_error_names_the_pass(gm: fx.GraphModule, ctx: Context):
    with pytest.raises(PassError) as error:
        pipeline.run(gm, [Mark(), Fail()], ctx)
    assert_expected_inline(
        message(error),
        """\
fail: layers.0 cannot be cut along dim 0
the graph before the pass is in overlap-repro-.../""",
    )
    assert ctx.running == ""


def test_a_crash_is_our_bug(gm: fx.GraphModule, ctx: Context):
    with pytest.raises(VerifyError) as error:
        pipeline.run(gm, [Fail("bug")], ctx)
    assert_expected_inline(
        message(error),
        """\
pass 'fail' stopped with KeyError: 'missing'
the graph before the pass is in overlap-repro-.../""",
    )
    assert isinstance(error.value.__cause__, KeyError)


def test_a_broken_rule_names_the_pass(gm: fx.GraphModule, ctx: Context):
    with pytest.raises(VerifyError) as error:
        pipeline.run(gm, [Normalize(drop_wait=True)], ctx)
    assert_expected_inline(
        message(error),
        """\
2 rules broken after pass 'normalize': V002: relu reads all_to_all_single, which is still in flight; and 1 more below
     x_1: f32[4,4] = input
     w_1: f32[4,4] = input
,    all_to_all_single: f32[4,4] = all_to_all(x_1, [2, 2], [2, 2]) group=ep
     ^ V003: all_to_all_single is never waited for
|    matmul: f32[4,4] = aten.matmul(x_1, w_1)
|    relu: f32[4,4] = aten.relu(all_to_all_single)
     ^ V002: relu reads all_to_all_single, which is still in flight
|    return (matmul, relu)
the graph before the pass is in overlap-repro-.../""",
    )


def test_an_order_that_cannot_run(gm: fx.GraphModule, ctx: Context):
    with pytest.raises(VerifyError) as error:
        pipeline.run(gm, [Normalize(), Sink(blindly=True)], ctx)
    assert_expected_inline(
        message(error),
        """\
1 rule broken after pass 'sink': V001: relu reads wait_tensor, which does not come before it
...
,    all_to_all_single: f32[4,4] = all_to_all(x_1, [2, 2], [2, 2]) group=ep
|    matmul: f32[4,4] = aten.matmul(x_1, w_1)
|    relu: f32[4,4] = aten.relu(wait_tensor)
     ^ V001: relu reads wait_tensor, which does not come before it
'    wait_tensor: f32[4,4] = wait(all_to_all_single)
     return (matmul, relu)
the graph before the pass is in overlap-repro-.../""",
    )


@pytest.mark.parametrize("effect", [Effect.ANNOTATE, Effect.REORDER])
def test_a_pass_is_held_to_its_effect(gm: fx.GraphModule, ctx: Context, effect: Effect):
    with pytest.raises(VerifyError) as error:
        pipeline.run(gm, [Fail("edit", effect)], ctx)
    changed = """\
- matmul: f32[4,4] = aten.matmul(x_1, w_1)
+ matmul: f32[4,4] = aten.matmul(x_1, x_1)
the graph before the pass is in overlap-repro-.../"""
    expected = f"pass 'fail' is {effect.name}, which {effect.value}; it changed\n{changed}"
    assert message(error) == expected


def test_annotating_keeps_the_order(gm: fx.GraphModule, ctx: Context):
    with pytest.raises(VerifyError) as error:
        pipeline.run(gm, [Normalize(), Sink(effect=Effect.ANNOTATE)], ctx)
    assert_expected_inline(
        message(error),
        """\
pass 'sink' is ANNOTATE, which leaves every line and the order alone; it changed
+ matmul: f32[4,4] = aten.matmul(x_1, w_1)
- matmul: f32[4,4] = aten.matmul(x_1, w_1)
the graph before the pass is in overlap-repro-.../""",
    )


def test_a_reproducer_holds_all_it_takes(gm: fx.GraphModule, ctx: Context):
    before = printing.dump(gm)
    with pytest.raises(PassError):
        pipeline.run(gm, [Fail()], ctx)
    (folder,) = Path().glob("overlap-repro-*")
    assert (folder / "graph.txt").read_text() == before + "\n"
    assert (folder / "pipeline.txt").read_text() == "fail\n"
    assert json.loads((folder / "config.json").read_text()) == dataclasses.asdict(Config())
    assert "cannot be cut" in (folder / "error.txt").read_text()
    names: dict[str, object] = {}
    exec((folder / "graph.py").read_text(), names)
    assert callable(names["forward"])


def test_the_same_failure_has_one_reproducer(ctx: Context):
    for _ in range(2):
        with pytest.raises(PassError):
            pipeline.run(trace(exchange, torch.ones(4, 4), torch.ones(4, 4)), [Fail()], ctx)
    assert len(list(Path().glob("overlap-repro-*"))) == 1


def test_a_folder_that_cannot_be_written(
    gm: fx.GraphModule, ctx: Context, monkeypatch: pytest.MonkeyPatch
):
    def refuse(self: Path, **options: bool) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PassError) as error:
        pipeline.run(gm, [Fail()], ctx)
    assert_expected_inline(
        message(error),
        """\
fail: layers.0 cannot be cut along dim 0
the reproducer could not be written: read-only""",
    )


def test_a_limit_on_passes_spans_the_graphs_of_a_context(
    gm: fx.GraphModule, ctx: Context, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OVERLAP_PASSES", "2")
    pipeline.run(gm, [Mark()], ctx)
    pipeline.run(gm, [Normalize(), Sink(), Mark()], ctx)
    assert graph.phase_of(gm) is Phase.NORMALIZED
    assert [str(remark) for remark in ctx.remarks] == [
        "skipped: OVERLAP_PASSES=2 leaves out sink, mark"
    ]
    monkeypatch.setenv("OVERLAP_PASSES", "many")
    with pytest.raises(ConfigError, match="OVERLAP_PASSES expects a count of passes, found 'many'"):
        pipeline.run(gm, [Mark()], ctx)


def test_a_refusal_is_a_remark(gm: fx.GraphModule, ctx: Context):
    node = find(gm, "matmul")
    node.meta["stack_trace"] = '  File "/home/me/moe.py", line 88, in forward\n    x @ w'
    node.meta["nn_module_stack"] = {"": ("L['self'].layers[0].moe", torch.nn.Module)}
    pipeline.run(gm, [Fail("refuse")], ctx)
    assert_expected_inline(
        str(ctx.remarks[0]),
        """fail: refused: matmul in layers.0.moe (moe.py:88): it mixes rows; choose axis='expert'""",
    )


def test_a_refusal_is_an_error_if_strict(gm: fx.GraphModule):
    ctx = Context(Config(strict=True), group_size=lambda group: 2)
    with pytest.raises(PassError) as error:
        pipeline.run(gm, [Fail("refuse")], ctx)
    assert_expected_inline(
        message(error),
        """\
fail: matmul: it mixes rows; choose axis='expert' (an error because strict=True)
the graph before the pass is in overlap-repro-.../""",
    )


def test_facts_are_known_by_type(gm: fx.GraphModule, ctx: Context):
    ctx.provide(Phase.JOINT)
    assert ctx.fact(Phase) is Phase.JOINT
    with pytest.raises(PassError) as error:
        pipeline.run(gm, [Fail("fact")], ctx)
    assert_expected_inline(
        message(error),
        """\
fail: the context holds no Config; it holds Phase
the graph before the pass is in overlap-repro-.../""",
    )


def test_a_pipeline_prints_and_parses():
    passes = (Mark(slice=2, regions=("a,b", "{c}")), Normalize(), Sink(blindly=True))
    text = pipeline.print_pipeline(passes)
    assert_expected_inline(
        text, """mark{slice=2,regions=('a,b', '{c}')},normalize,sink{blindly=True}"""
    )
    assert pipeline.parse_pipeline(text, KNOWN) == passes
    assert pipeline.parse_pipeline(" mark { slice = 2 } , sink", KNOWN) == (Mark(slice=2), Sink())
    assert pipeline.parse_pipeline("", KNOWN) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "mrak",
            "no pass 'mrak'; did you mean 'mark'? the passes are: fail, mark, normalize, sink",
        ),
        (
            "sink{blind=True}",
            "no option 'blind' of pass 'sink'; did you mean 'blindly'? the options are: blindly",
        ),
        ("sink{True}", "pass 'sink' expects option=value,..., found 'True'"),
        ("mark{slice=two}", "pass 'mark' expects option=value,..., found 'slice=two'"),
        ("sink mark", "expected name{option=value,...}, found 'sink mark'"),
        ("sink{", "expected name{option=value,...}, found 'sink{'"),
    ],
)
def test_text_that_is_no_pipeline(text: str, expected: str):
    with pytest.raises(ConfigError) as error:
        pipeline.parse_pipeline(text, KNOWN)
    assert str(error.value).startswith(expected)
