"""Replace the runs of a graph by calls of compiled kernels.

    before   a2a = all_to_all(x);  y = mul(b, c);  z = relu(y);  w = wait(a2a)
    after    a2a = all_to_all(x);  operands = list_of(b, c);  run = run_5f0c12ab(operands);
             z = run[0];  w = wait(a2a)

Why it is correct: a run reads values that are complete and writes into none, and no other node
moves over one that keeps its place (`cut`). Whatever the compiler does inside a run, the order
outside stands. A list of operands of its own lets a run free each of them at its last use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from overlap import collectives, graph
from overlap.inner.cut import Cut, Run, cut
from overlap.inner.sizes import expression
from overlap.inner.subject import Binding, RunError, Subject


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What a run was compiled to; runs of one structure share it.

    function: takes the values of the run's symbols and its tensors, in one list, which it empties.
    bindings: where the symbols' values are read among the run's inputs.
    is_tensor: for each input of the run, whether it is a tensor.
    source: what the compiler generated.
    structure, digest: digests of the run and of the source.
    """

    function: Callable[[list[Any]], Sequence[Any]]
    bindings: tuple[Binding, ...]
    is_tensor: tuple[bool, ...]
    source: str
    structure: str
    digest: str

    def call(self, operands: list[Any]) -> Sequence[Any]:
        """The outputs of the run for its inputs, in a list, which it empties."""
        sizes = [binding.read(operands) for binding in self.bindings]
        if not all(self.is_tensor):
            pairs = zip(operands, self.is_tensor, strict=True)
            operands[:] = [operand for operand, is_tensor in pairs if is_tensor]
        operands[:0] = sizes
        return self.function(operands)


@dataclasses.dataclass(frozen=True)
class Failure:
    """A run that stays eager, from its first node to its last, and why."""

    first: fx.Node
    last: fx.Node
    reason: str


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A graph whose runs are compiled.

    kind: "forward", "backward", "inference", "step" or "scale".
    gm: what runs: fixed and eager nodes, and a call for every run.
    kernels: of each run, in the order of the calls.
    failures: the runs that stayed eager, in order.
    num_nodes: operators in the compiled runs. num_eager: operators on tensors that are in none.
    """

    kind: str
    gm: fx.GraphModule
    kernels: tuple[Kernels, ...]
    failures: tuple[Failure, ...]
    num_nodes: int
    num_eager: int

    @property
    def num_distinct(self) -> int:
        return len({id(kernels) for kernels in self.kernels})

    @property
    def structure(self) -> str:
        """Equal on ranks whose runs compute the same in the same order. A rank whose batch is 0 or
        1 may have others: Dynamo makes those sizes constants."""
        return digest_of([kernels.structure for kernels in self.kernels])

    @property
    def digest(self) -> str:
        """Equal on ranks that call the same kernels in the same order."""
        return digest_of([kernels.digest for kernels in self.kernels])


Inner = Callable[[str, fx.GraphModule], Compiled]
"""Makes of a graph, given its kind, what runs."""


def eager(kind: str, gm: fx.GraphModule) -> Compiled:
    """The graph as it is: its operators are called one by one."""
    return Compiled(kind, gm, (), (), 0, sum(map(_computes, gm.graph.nodes)))


@dataclasses.dataclass
class Compiler:
    """Compiles the graphs of one program, runs of one structure once.

    compile_run: makes the kernels of a run or raises RunError.
    """

    compile_run: Callable[[Subject], Kernels]
    known: dict[str, Kernels | RunError] = dataclasses.field(
        default_factory=dict[str, Kernels | RunError]
    )

    def compile(self, kind: str, gm: fx.GraphModule) -> Compiled:
        """`gm` with its runs compiled, as a new module; `gm` is left as it is."""
        plan = cut(gm)
        subjects = [Subject.of(run, numbers) for run, numbers in _known_numbers(plan)]
        found = {subject.run: self._kernels(subject) for subject in subjects}
        made = {run: one for run, one in found.items() if isinstance(one, Kernels)}
        failures = tuple(
            Failure(run.nodes[0], run.nodes[-1], str(one))
            for run, one in found.items()
            if isinstance(one, RunError)
        )
        num_nodes = sum(map(_computes, (node for run in made for node in run.nodes)))
        num_operators = sum(map(_computes, gm.graph.nodes))
        return Compiled(
            kind,
            _spliced(gm, plan, made),
            tuple(made.values()),
            failures,
            num_nodes,
            num_operators - num_nodes,
        )

    def _kernels(self, subject: Subject) -> Kernels | RunError:
        key = subject.key()
        if key not in self.known:
            try:
                self.known[key] = self.compile_run(subject)
            except RunError as error:
                self.known[key] = error
        return self.known[key]


def _known_numbers(plan: Cut) -> Iterator[tuple[Run, dict[Any, fx.Node]]]:
    """Each run, with the numbers on the host that are known before it, by what they are."""
    first = {run.nodes[0]: run for run in plan.runs}
    numbers: dict[Any, fx.Node] = {}
    for node in plan.order:
        value = graph.fake_value(node)
        if node in first:
            yield first[node], dict(numbers)
        elif isinstance(value, torch.SymInt):
            numbers.setdefault(expression(value), node)


def _computes(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    is_communication = collectives.is_start(node) or collectives.is_wait(node)
    return not is_communication and bool(list(graph.tensors_of(graph.fake_value(node))))


def digest_of(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def list_of(*operands: Any) -> list[Any]:
    """The operands of a run, which the caller lets go of."""
    return list(operands)


def kernels_of(node: fx.Node) -> Kernels | None:
    """The kernels that a node of a spliced graph calls, None if it calls none."""
    owner = getattr(node.target, "__wrapped__", None)
    return owner if isinstance(owner, Kernels) else None


def _spliced(gm: fx.GraphModule, plan: Cut, made: Mapping[Run, Kernels]) -> fx.GraphModule:
    first = {run.nodes[0]: run for run in made}
    inside = {node for run in made for node in run.nodes}
    result = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in plan.order:
        if node in first:
            _call(first[node], made[first[node]], result, copies)
        elif node not in inside:
            copies[node] = result.node_copy(node, copies.__getitem__)
    return fx.GraphModule(gm, result)


def _call(run: Run, kernels: Kernels, result: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
    operands = result.call_function(list_of, tuple(copies[node] for node in run.inputs))
    called = result.call_function(_function(kernels), (operands,))
    for i, node in enumerate(run.outputs):
        copies[node] = result.call_function(operator.getitem, (called, i))
        copies[node].name = node.name
        graph.copy_facts(node, copies[node])
        graph.set_fake_value(copies[node], graph.fake_value(node))


def _function(kernels: Kernels) -> Any:
    """The call as a plain function, whose name is what the generated Python shows."""

    def call(operands: list[Any]) -> Sequence[Any]:
        return kernels.call(operands)

    call.__name__ = call.__qualname__ = f"run_{kernels.structure[:8]}"
    call.__wrapped__ = kernels  # pyright: ignore[reportFunctionMemberAccess]
    return call
