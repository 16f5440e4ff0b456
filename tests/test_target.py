"""Targets: meshes, names, and what is said about wrong ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from overlap import target
from overlap.errors import ConfigError
from overlap.runtime import fake
from overlap.target import MeshSpec, Step


def test_a_mesh_parses_and_prints():
    mesh = MeshSpec.parse("dp=8, ep=4")
    assert mesh == MeshSpec((("dp", 8), ("ep", 4)))
    assert (str(mesh), mesh.num_ranks, mesh.size("ep"), mesh.size("tp")) == ("dp=8,ep=4", 32, 4, 1)


@pytest.mark.parametrize("text", ["", "dp", "dp=", "dp=x", "dp=0", "dp=2,dp=2", "8", "dp=-1"])
def test_a_wrong_mesh(text: str):
    with pytest.raises(ConfigError, match="mesh"):
        MeshSpec.parse(text)


def test_an_axis_is_split_off():
    assert str(MeshSpec.of_world(64).with_axis("ep", divides=8)) == "dp=8,ep=8"
    assert str(MeshSpec.of_world(6).with_axis("ep", divides=4)) == "dp=3,ep=2"
    assert str(MeshSpec.parse("ep=4,dp=2").with_axis("ep", divides=8)) == "ep=4,dp=2"


def test_groups_along_an_axis():
    mesh = MeshSpec.parse("dp=2,ep=3")
    with fake.world(6, rank=4):
        groups = [mesh.group(axis) for axis in ("dp", "ep")]
        assert [dist.get_process_group_ranks(group) for group in groups] == [[1, 4], [3, 4, 5]]
        assert mesh.group("tp") is None
        assert MeshSpec.of_world(6).group("dp") is dist.group.WORLD
        with pytest.raises(ConfigError, match="a mesh of 8 ranks does not fit 6 ranks"):
            MeshSpec.of_world(8).group("dp")


def test_a_loss_function_takes_the_last_input():
    module = torch.nn.Linear(2, 3)
    x, labels = torch.randn(4, 2), torch.tensor([0, 1, 2, 0])
    step = Step(module, F.cross_entropy, (x, labels))
    assert step.loss_module()(x, labels) == F.cross_entropy(module(x), labels)
    assert Step(module, None, (x,)).loss_module() is module


def refuse(name: str) -> str:
    with pytest.raises(ConfigError) as refused:
        target.make_step(name, None, MeshSpec.of_world(1))
    return str(refused.value)


def test_unknown_names_give_the_nearest():
    assert "did you mean 'models.deepseek_v3'?" in refuse("models.deepseek_v2:train_step")
    assert "did you mean 'train_step'?" in refuse("models.moe:trainstep")
    assert "did you mean 'models'?" in refuse("model:train_step")
    assert "written as module:function" in refuse("models.moe")


def not_a_step(config: str | None, mesh: MeshSpec) -> int:
    return 0


def test_a_target_returns_a_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(target, "load", lambda name: not_a_step)
    assert "returns a int; it has to return an overlap.target.Step" in refuse("mine:step")


def test_an_unknown_config_gives_the_nearest():
    with pytest.raises(ConfigError, match="no config 'toyy'; did you mean 'toy'"):
        target.make_step("models.llama:train_step", "toyy", MeshSpec.of_world(1))


@pytest.mark.parametrize("model", ["deepseek_v3", "moe", "llama"])
def test_the_models_are_targets(model: str):
    step = target.make_step(f"models.{model}:train_step", "toy", MeshSpec.of_world(1))
    loss = step.loss_module()(*step.example_inputs)
    assert loss.shape == ()
    loss.backward()
    assert step.optimizer is not None
    step.optimizer.step()
