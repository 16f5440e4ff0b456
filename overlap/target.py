"""Targets: how the command line names a training step.

    overlap simulate models.deepseek_v3:train_step --config debug --mesh dp=8,ep=8

A target is a function of a module, `f(config: str | None, mesh: MeshSpec) -> Step`. It builds the
model of one rank; there is a process group of the mesh's size when it is called, on one machine a
fake one.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn, optim

from overlap.errors import ConfigError, unknown_name
from overlap.runtime import groups

_T = TypeVar("_T")


@dataclass(frozen=True)
class MeshSpec:
    """How the ranks of a job are laid out: sizes of named axes, the last one varying fastest.

    Raises ConfigError for a size below 1 and for a name that comes twice.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names) or any(size < 1 for _, size in self.axes):
            raise ConfigError(f"a mesh has axes of different names, sizes >= 1; found {self}")

    @classmethod
    def of_world(cls, num_ranks: int) -> MeshSpec:
        """All ranks on one axis, `dp`."""
        return cls((("dp", num_ranks),))

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """The mesh that is written as `dp=8,ep=8`. Raises ConfigError for anything else."""
        pairs = [part.partition("=") for part in text.split(",")]
        if not all(name.strip().isidentifier() and size.isdecimal() for name, _, size in pairs):
            raise ConfigError(f"a mesh is written as dp=8,ep=8; found {text!r}")
        return cls(tuple((name.strip(), int(size)) for name, _, size in pairs))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @property
    def num_ranks(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Ranks along an axis; 1 if the mesh has none of that name."""
        return dict(self.axes).get(axis, 1)

    def with_axis(self, axis: str, divides: int) -> MeshSpec:
        """This mesh with an axis of that name: unless it has one, split off the last axis, as
        large as both the ranks there and `divides` allow."""
        if axis in dict(self.axes):
            return self
        *outer, (name, size) = self.axes
        inner = math.gcd(size, divides)
        return MeshSpec((*outer, (name, size // inner), (axis, inner)))

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """This rank's group along `axis`, None if that is this rank alone. All ranks call it.

        Raises ConfigError if the job has another number of ranks than the mesh.
        """
        if self.size(axis) == 1:
            return None
        names = [name for name, _ in self.axes]
        return groups.along([size for _, size in self.axes], names.index(axis))


@dataclass(frozen=True)
class Step:
    """What a target builds: one rank's part of a training step.

    module: the model.
    loss_fn: None if the module returns the loss of `example_inputs`. Else the last of them are the
        labels: the loss is `loss_fn(module(*example_inputs[:-1]), example_inputs[-1])`.
    example_inputs: one batch of this rank.
    optimizer: updates the module's parameters; None where the step is only looked at.
    """

    module: nn.Module
    loss_fn: Callable[[Any, Tensor], Tensor] | None
    example_inputs: tuple[Tensor, ...]
    optimizer: optim.Optimizer | None = None

    def loss_module(self) -> nn.Module:
        """A module that takes `example_inputs` and returns the loss."""
        return self.module if self.loss_fn is None else _WithLoss(self.module, self.loss_fn)


class _WithLoss(nn.Module):
    def __init__(self, module: nn.Module, loss_fn: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.loss_fn(self.module(*inputs[:-1]), inputs[-1])


def load(name: str) -> Any:
    """What `module:function` names; modules of the working directory are found too.

    Raises ConfigError with the nearest name if there is no such module or function.
    """
    module_name, separator, attribute = name.partition(":")
    if not separator or not attribute:
        raise ConfigError(f"a target is written as module:function, found {name!r}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    module = _import(module_name)
    if not hasattr(module, attribute):
        own = inspect.getmembers(module, inspect.isfunction)
        functions = [n for n, f in own if f.__module__ == module.__name__ and n[0] != "_"]
        raise unknown_name("function", attribute, functions, place=f"in module {module_name!r}")
    return getattr(module, attribute)


def _import(name: str) -> Any:
    parent, _, _ = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not (name == missing or name.startswith(f"{missing}.")):
            raise ConfigError(f"module {name!r} cannot be imported: {error}") from error
    except Exception as error:
        raise ConfigError(f"module {name!r} cannot be imported: {error}") from error
    path = _import(parent).__path__ if parent else [str(Path.cwd())]
    prefix = f"{parent}." if parent else ""
    raise unknown_name(
        "module", name, [prefix + found.name for found in pkgutil.iter_modules(path)]
    )


def make_step(name: str, config: str | None, mesh: MeshSpec) -> Step:
    """The step that target `name` builds. Raises ConfigError if it builds none."""
    function = load(name)
    try:
        inspect.signature(function).bind(config, mesh)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"target {name!r} cannot be called with (config, mesh): {error}; a target is "
            "f(config: str | None, mesh: MeshSpec) -> Step"
        ) from error
    step = function(config, mesh)
    if not isinstance(step, Step):
        raise ConfigError(
            f"target {name!r} returns a {type(step).__name__}; it has to return an "
            "overlap.target.Step(module, loss_fn, example_inputs, optimizer=None)"
        )
    return step


def choose(config: str | None, configs: Mapping[str, Callable[[], _T]], default: str) -> _T:
    """For targets: the config of that name, the default for None.

    Raises ConfigError, with the nearest name, for an unknown one."""
    name = default if config is None else config
    if name not in configs:
        raise unknown_name("config", name, configs)
    return configs[name]()
