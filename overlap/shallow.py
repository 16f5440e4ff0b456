"""Equal layers of a model: found, and left out while the model is traced.

A run is a part of an `nn.ModuleList` whose modules are equal but for the values of their tensors.
What a deeper model does is proven in two steps. Here: the model calls its layers one after the
other, each with the result of the one before and what all of them get, and does nothing else that
depends on how many there are. `overlap.repeat` proves on the traced graphs that one layer does what
the next one does.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from overlap.errors import PassError

KEPT = 3
"""Layers of a run that are traced: the first and the last may differ from those between."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Equal layers in a row.

    path: of the list that they are in; layers: all modules of that list.
    first, length: the run's place in it.
    """

    path: str
    layers: nn.ModuleList
    first: int
    length: int

    @property
    def modules(self) -> list[nn.Module]:
        return list(self.layers)[self.first : self.first + self.length]


def longest_run(model: nn.Module) -> Run | None:
    """The most equal layers in a row, None if fewer than `KEPT` + 1 are."""
    lists = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    runs = [run for path, layers in lists for run in _runs(path, layers)]
    best = max(runs, key=lambda run: run.length, default=None)
    return best if best and best.length > KEPT and _owns_its_tensors(model, best) else None


def _runs(path: str, layers: nn.ModuleList) -> list[Run]:
    found: list[Run] = []
    first = 0
    for i in range(1, len(layers) + 1):
        if i == len(layers) or not is_equal(layers[first], layers[i]):
            found.append(Run(path, layers, first, i - first))
            first = i
    return found


def is_equal(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules are the same program on tensors of the same types."""
    if type(one) is not type(other) or not _is_equal_state(vars(one), vars(other)):
        return False
    children, others = list(one.named_children()), list(other.named_children())
    return [name for name, _ in children] == [name for name, _ in others] and all(
        is_equal(child, its) for (_, child), (_, its) in zip(children, others, strict=True)
    )


def _is_equal_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    keys = [key for key in one if key != "_modules"]
    return keys == [key for key in other if key != "_modules"] and all(
        _is_equal_value(one[key], other[key]) for key in keys
    )


def _is_equal_value(one: Any, other: Any) -> bool:
    match one, other:
        case Tensor(), Tensor():
            return _type(one) == _type(other)
        case dict(), dict():
            return list(one) == list(other) and all(_is_equal_value(one[k], other[k]) for k in one)
        case _:
            try:
                return type(one) is type(other) and bool(one == other)
            except Exception:  # a value that does not compare is not known to be equal
                return False


def _type(tensor: Tensor) -> Any:
    return (
        type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(),
        tensor.requires_grad,
    )  # fmt: skip


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Its parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def _owns_its_tensors(model: nn.Module, run: Run) -> bool:
    """Whether each tensor of the run's layers is one layer's alone."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            owners[id(tensor)] = owners.get(id(tensor), 0) + (tensor is not None)
    tensors = [tensor for module in run.modules for tensor in tensors_of(module)]
    return all(owners[id(tensor)] == 1 for tensor in tensors)


@contextlib.contextmanager
def shortened(run: Run) -> Generator[None]:
    """Leave all but `KEPT` layers of the run out of the model, for as long as the `with` lasts."""
    layers = dict(run.layers._modules)
    kept = list(layers.values())
    del kept[run.first + KEPT : run.first + run.length]
    run.layers._modules = {str(i): layer for i, layer in enumerate(kept)}
    try:
        yield
    finally:
        run.layers._modules = layers


def check_uniform(model: Callable[..., Any], run: Run, inputs: Sequence[Any]) -> None:
    """Run what is around the layers, with and without those that are to be left out, and compare.

    Raises PassError unless every layer gets the result of the one before it, in the same place, and
    else the same values, and everything outside of the layers is the same for both depths.
    """
    whole = _trace_around(model, run, inputs)
    with shortened(run):
        short = dataclasses.replace(run, length=KEPT)
        part = _trace_around(model, short, inputs)
    left_out = run.length - KEPT
    expected = part[:2] + [part[1]] * left_out + part[2:]
    if whole != expected:
        raise PassError(f"the layers of {run.path} are not called alike one after the other")


def _trace_around(model: Callable[..., Any], run: Run, inputs: Sequence[Any]) -> list[list[str]]:
    """What happens before the first layer, before each of the others, and behind the last."""
    recorder = _Recorder()
    for module in run.modules:
        module.forward = recorder.call  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with torch.no_grad(), _fake_mode(inputs), recorder:
            model(*inputs)
    except PassError:
        raise
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        raise PassError(f"what is around {run.path} does not run by itself: {text}") from error
    finally:
        for module in run.modules:
            del module.forward
    return recorder.parts


def _fake_mode(inputs: Sequence[Any]) -> AbstractContextManager[Any]:
    """The mode that fake inputs need for tensors that are made on the way."""
    modes = (value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    return next(modes, contextlib.nullcontext())


class _Recorder(TorchDispatchMode):
    """Notes operators and calls of layers. A layer returns a tensor like its first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[list[str]] = [[]]
        self.result: Tensor | None = None
        self.shared: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.parts[-1].append(f"{func} {self._shown((args, kwargs))}")
        return func(*args, **(kwargs or {}))

    def call(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if not leaves or not isinstance(leaves[0], Tensor):
            raise PassError("the first argument of a layer is not a tensor")
        if self.result is not None and leaves[0] is not self.result:
            raise PassError("a layer does not get the result of the one before it")
        if self.result is None:
            self.shared = leaves
        same = [
            a is b or _is_equal_constant(a, b) for a, b in zip(leaves, self.shared, strict=True)
        ]
        if not all(same[1:]):
            raise PassError("the layers get different arguments")
        self.result = leaves[0].clone()
        self.parts.append([f"layer {tree}"])
        return self.result

    def _shown(self, value: Any) -> str:
        def show(leaf: Any) -> Any:
            return tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf

        return repr(pytree.tree_map(show, value))


def _is_equal_constant(one: Any, other: Any) -> bool:
    return not isinstance(one, Tensor) and type(one) is type(other) and bool(one == other)
