"""Equal layers, traced once: the graphs of a deep model from those of a shallow one.

    traced      head | L1 | L2 | L3 | tail            backward  tail' | L3' | L2' | L1' | head'
    unrolled    head | L1 | L2 | L2 | ... | L3 | tail

A program that runs equal layers one after the other traces to a sequence that repeats. Where two
layers in a row are found to be equal node for node, each reading from the layer before it what the
other one reads from its own, from its own parameters and from nothing else but values that all
layers share, the next equal layer would trace to the same again: the graph of a deeper model is the
same sequence with more repetitions. The sequence need not begin where a layer begins.

Everything is proven on the graphs; a graph that does not repeat, or in which a value of one layer
is read by more than its neighbour, is a PassError.

Symbols of sizes that the data decides are those of the layer that was copied.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

from overlap import graph
from overlap.errors import PassError

_CANDIDATES = 32


@dataclasses.dataclass(eq=False)
class Stretch:
    """Where a sequence repeats: the items from `start` on, `length` of them, `period` to a layer.

    step: 1 where a later layer comes later in the sequence, -1 where it comes earlier.
    new: the items that the unrolled sequence has in its place.
    entries: what the first layer reads where others read of the one before; by offset, below 0.
    """

    start: int
    length: int
    period: int
    step: int = 1
    new: list[fx.Node] = dataclasses.field(default_factory=list[fx.Node])
    entries: dict[fx.Node, int] = dataclasses.field(default_factory=dict[fx.Node, int])

    @property
    def cut(self) -> int:
        """The copies of the second period come before this item."""
        return self.start + 2 * self.period

    @property
    def end(self) -> int:
        return self.start + self.length

    def offset(self, offset: int, shift: int, extra: int) -> int:
        """Where the item at `offset` is for a layer that is `shift` layers deeper, of a program
        with `extra` more layers."""
        return offset + self.period * (shift if self.step > 0 else extra - shift)


_Place = tuple[Stretch, int]
_PairCheck = Callable[[fx.Node, fx.Node, int], bool]


@dataclasses.dataclass(frozen=True)
class More:
    """What a deeper program has more.

    layers: how many more equal layers.
    num_inputs: how many inputs each of them is given, its parameters and buffers.
    path, first: of the list of modules that they are in, and where in it they begin.
    """

    layers: int
    num_inputs: int
    path: str
    first: int = 0


def unroll(
    forward: fx.GraphModule, backward: fx.GraphModule, num_forward_outputs: int, more: More
) -> int:
    """Make both graphs, as autograd and the partitioner leave them, those of a program with more
    layers, in place; returns how many results of its own the forward has then. Raises PassError,
    with the graphs untouched, if they do not repeat.

    forward: takes parameters and inputs; returns its own results, then what is saved.
    backward: takes what is saved and the tangents; returns a gradient for every input of `forward`.
    """
    ahead = _Sequences(forward)
    ahead.find_calls(are_inputs_known=False)
    num_inputs = sum(stretch.period for stretch in ahead.input_stretches)
    if num_inputs != more.num_inputs:
        raise PassError(f"a layer has {more.num_inputs} inputs, and {num_inputs} repeat")
    ahead.find_results((num_forward_outputs,))
    behind = _Sequences(backward)
    behind.find_saved(ahead)
    behind.find_calls(are_inputs_known=True)
    behind.pair_results(ahead)
    first = _Unroller(ahead, more)
    graphs = first.run(), _Unroller(behind, more, first).run()
    for gm, unrolled in zip((forward, backward), graphs, strict=True):
        gm.graph = unrolled
    own = (s.period for s in ahead.result_stretches if s.start < num_forward_outputs)
    return num_forward_outputs + more.layers * sum(own)


class _Sequences:
    """The inputs, calls and results of one graph, and where each of them repeats.

    places: which item of which stretch a node is; nodes that all layers share have none.
    shifts: per call outside of every stretch, whether it belongs behind the last layer.
    twins: of a backward graph, the forward node that an input is the value of, and the one that a
        call computes again.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        nodes = list(gm.graph.nodes)
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.output = nodes[-1]
        self.order = {node: i for i, node in enumerate(nodes)}
        self.body = nodes[len(self.inputs) : -1]
        self.results: list[Any] = list(self.output.args[0])  # pyright: ignore
        self.input_stretches: list[Stretch] = []
        self.result_stretches: list[Stretch] = []
        self.places: dict[fx.Node, _Place] = {}
        self.body_stretches: list[Stretch] = []
        self.shifts: dict[int, bool] = {}
        self.twins: dict[fx.Node, fx.Node] = {}
        if any(node.op == "placeholder" for node in self.body):
            raise PassError("the inputs of the graph do not come first")

    # calls

    def find_calls(self, are_inputs_known: bool) -> None:
        """Where the calls repeat, part by part: what autograd recomputes comes in the order of the
        forward, and before what it computes. Inputs that are not known to repeat are paired by who
        reads them."""
        found = _repetitions([_signature(node) for node in self.body])
        if not are_inputs_known:
            longest = max(found, key=lambda stretch: stretch.length)
            self._pair_inputs(self._narrowed(longest, 1, self._may_pair))
        for stretch in found:
            self._add_calls(stretch)
        if not self.body_stretches:
            raise PassError("the layers of the graph do not repeat: they read different values")
        self.shifts = self._shifts_outside()

    def _add_calls(self, found: Stretch) -> None:
        for step in (1, -1):
            try:
                stretch = self._narrowed(found, step, self._is_pair)
            except PassError:
                continue
            if self._is_of_layers(stretch):
                self.body_stretches.append(stretch)
                self._place(self.body, [stretch])
            return

    def _is_of_layers(self, stretch: Stretch) -> bool:
        """Whether a stretch reads something of each layer; others only look alike."""
        calls = self.body[stretch.start : stretch.start + stretch.period]
        return any(source in self.places for node in calls for source in _operands(node))

    def _narrowed(self, found: Stretch, step: int, is_pair: _PairCheck) -> Stretch:
        """The part of a stretch in which every node reads what its image one period on reads,
        one layer on."""
        while True:
            narrowed = self._narrowed_once(found, step, is_pair)
            if narrowed.length == found.length:
                return narrowed
            found = narrowed

    def _narrowed_once(self, found: Stretch, step: int, is_pair: _PairCheck) -> Stretch:
        position = {node: i for i, node in enumerate(self.body)}
        start, end, period = found.start, found.end, found.period
        entries: dict[fx.Node, int] = {}

        def is_own(node: fx.Node) -> bool:
            return node in position and start <= position[node] < end

        def agrees(a: fx.Node, b: fx.Node) -> bool:
            if is_own(b) and is_own(a):
                return position[b] - position[a] == period
            if is_own(b):
                offset = position[b] - start - period
                is_like = offset < 0 and type_of(a) == type_of(b) and a not in self.places
                return is_like and entries.setdefault(a, offset) == offset
            return not is_own(a) and a not in entries and is_pair(a, b, step)

        def reads_alike(at: int) -> bool:
            one, other = self._read(self.body[at]), self._read(self.body[at + period])
            return len(one) == len(other) and all(map(agrees, one, other))

        pairs = range(start, end - period)
        for at in pairs:
            reads_alike(at)  # to know the entries
        first, length = _longest_run([reads_alike(at) for at in pairs])
        if length < period:
            raise PassError("the layers of the graph do not repeat: they read different values")
        entries = {node: offset - first for node, offset in entries.items() if offset < first}
        return Stretch(start + first, length + period, period, step, entries=entries)

    def _read(self, node: fx.Node) -> list[fx.Node]:
        """The operands in order, and the terms of a sum, which torch sorts by the names of their
        symbols, in the order of the graph."""
        operands = _operands(node)
        is_sum = graph.is_call(node, torch.sym_sum)
        return sorted(operands, key=self.order.__getitem__) if is_sum else operands

    def _may_pair(self, a: fx.Node, b: fx.Node, _: int) -> bool:
        return a is b or (a.op == b.op == "placeholder" and type_of(a) == type_of(b))

    def _is_pair(self, a: fx.Node, b: fx.Node, step: int) -> bool:
        if a is b:
            return a not in self.places
        if a not in self.places or b not in self.places:
            return False
        (one, at), (other, its) = self.places[a], self.places[b]
        return one is other and its - at == step * one.step * one.period

    def _shifts_outside(self) -> dict[int, bool]:
        """Per call outside of every stretch, whether it belongs behind the last layer rather than
        before the first. What is between two stretches may read of either side."""
        result: dict[int, bool] = {}
        borders = [(0, 0, None), *((s.start, s.end, s) for s in self.body_stretches)]
        borders.append((len(self.body), len(self.body), None))
        for (_, begin, before), (end, _, behind) in itertools.pairwise(borders):
            sides = [
                s for s in (behind and behind.step < 0, before and before.step > 0) if s is not None
            ]
            for at in range(begin, end):
                fits = [bool(s) for s in sides if self._is_near(self.body[at], is_late=bool(s))]
                if not fits:
                    raise PassError(f"{self.body[at]} reads values of several layers")
                result[at] = fits[0]
        for stretch in self.body_stretches:
            self._check_reach(stretch)
        return result

    def _is_near(self, node: fx.Node, is_late: bool) -> bool:
        """Whether what is outside of the layers reads of the layer beside it only."""
        places = [self.places[source] for source in _operands(node) if source in self.places]
        return all(
            at >= s.period if is_late == (s.step > 0) else at < s.length - s.period
            for s, at in places
        )

    def _check_reach(self, stretch: Stretch) -> None:
        """A value is read in its own layer and the next one: what reads further back collects
        something of every layer, and would have to collect more."""
        for node in self.body[stretch.cut : stretch.end]:
            for source in _operands(node):
                place = self.places.get(source)
                if place and place[0] is stretch and place[1] < stretch.period:
                    raise PassError(f"{node} reads {source}, which is of an earlier layer")

    # inputs and results

    def _pair_inputs(self, stretch: Stretch) -> None:
        index = {node: i for i, node in enumerate(self.inputs)}
        partner: dict[int, int] = {}
        for at in range(stretch.start, stretch.end - stretch.period):
            pairs = zip(
                self._read(self.body[at]), self._read(self.body[at + stretch.period]), strict=True
            )
            for a, b in pairs:
                if a is b or a not in index:
                    continue
                if partner.setdefault(index[a], index[b]) != index[b]:
                    raise PassError(f"{a} is read like two inputs of the next layer")
        self.input_stretches = _runs(partner)
        self._place(self.inputs, self.input_stretches)
        for i, j in partner.items():
            if not self._is_pair(self.inputs[i], self.inputs[j], 1):
                raise PassError(f"inputs {self.inputs[i]} and {self.inputs[j]} do not repeat")

    def find_saved(self, ahead: _Sequences) -> None:
        """Pair the inputs of a backward graph as the nodes of the forward graph that they are."""
        by_name = {node.name: node for node in ahead.gm.graph.nodes}
        self.twins = {n: by_name[n.name] for n in self.inputs if n.name in by_name}
        self.twins |= {
            node: by_name[node.name]
            for node in self.body
            if node.name in by_name
            and graph.fake_value(node) is graph.fake_value(by_name[node.name])
        }
        places = [
            ahead.places.get(self.twins[node]) if node in self.twins else None
            for node in self.inputs
        ]
        partner = _partners(places)
        self.input_stretches = _runs(partner)
        self._place(self.inputs, self.input_stretches)
        for i, (node, place) in enumerate(zip(self.inputs, places, strict=True)):
            if place is None or node in self.places:
                continue
            next_place = self.places.get(self.inputs[partner[i]]) if i in partner else None
            if place[1] >= 0 or next_place is None or next_place[1] >= next_place[0].period:
                raise PassError(f"the saved value {node} does not repeat")
            stretch, offset = next_place
            self.places[node] = stretch, offset - stretch.period

    def find_results(self, borders: Sequence[int]) -> None:
        """Where the results repeat, each part of them between two borders for itself."""
        for begin, end in zip((0, *borders), (*borders, len(self.results)), strict=True):
            part = self.results[begin:end]
            places = [self.places.get(r) if isinstance(r, fx.Node) else None for r in part]
            for run in _runs(_partners(places)):
                self.result_stretches.append(dataclasses.replace(run, start=begin + run.start))
        self._check_results()

    def pair_results(self, ahead: _Sequences) -> None:
        """Gradients repeat as the inputs do that they belong to."""
        if len(self.results) != len(ahead.inputs):
            raise PassError("the backward graph does not return a gradient for every input")
        for run in ahead.input_stretches:
            self.result_stretches.append(dataclasses.replace(run, new=[]))
            for i in range(run.start, run.end - run.period):
                a, b = self.results[i], self.results[i + run.period]
                is_copied = run.start <= i < run.cut - run.period
                if not self._is_gradient_pair(a, b, is_copied):
                    raise PassError(f"gradients {a} and {b} do not repeat")
        self._check_results()

    def _is_gradient_pair(self, a: Any, b: Any, is_copied: bool) -> bool:
        """Where the layers of inputs begin earlier or end later than those of calls, a gradient
        that no copy is made of may be one of a call outside."""
        if a is None or b is None:
            return a is b
        if a in self.places and b in self.places:
            return self._is_pair(a, b, 1)
        return a is not b and not (is_copied and b not in self.places)

    def _check_results(self) -> None:
        inside = {i for run in self.result_stretches for i in range(run.start, run.end)}
        for i, result in enumerate(self.results):
            if i in inside or not isinstance(result, fx.Node):
                continue
            if self.places.get(result, (None, -1))[1] >= 0:
                raise PassError(f"the result {result} does not repeat")

    def _place(self, items: Sequence[fx.Node], stretches: Sequence[Stretch]) -> None:
        for stretch in stretches:
            for offset in range(stretch.length):
                self.places[items[stretch.start + offset]] = stretch, offset
            for node, offset in stretch.entries.items():
                self.places[node] = stretch, offset


class _Unroller:
    """Writes the graph with `extra` more layers.

    shared: new nodes of those that are outside of every stretch.
    """

    def __init__(self, old: _Sequences, more: More, ahead: _Unroller | None = None) -> None:
        self.old, self.extra, self.ahead = old, more.layers, ahead or self
        self.modules = graph.Renumbering(more.path, more.first)
        self.graph = fx.Graph()
        self.shared: dict[fx.Node, fx.Node] = {}
        self.values = _Values(old.gm)

    def run(self) -> fx.Graph:
        old = self.old
        for i, shift, is_copy in _unrolled(len(old.inputs), old.input_stretches, self.extra):
            self._emit(old.inputs[i], shift, is_copy)
        for i, shift, is_copy in _unrolled(len(old.body), old.body_stretches, self.extra):
            shift = self.extra * old.shifts[i] if i in old.shifts else shift
            self._emit(old.body[i], shift, is_copy)
        results: list[Any] = []
        for i, shift, _ in _unrolled(len(old.results), old.result_stretches, self.extra):
            result = old.results[i]
            if isinstance(result, fx.Node):  # what the first layer reads is one value
                result = self.shared.get(result) or self.at(result, shift)
            results.append(result)
        output = self.graph.output(tuple(results))
        graph.copy_facts(old.output, output)
        return self.graph

    def _emit(self, node: fx.Node, shift: int, is_copy: bool) -> None:
        def operand(source: fx.Node) -> fx.Node:
            return self.at(source, shift)

        place = self.old.places.get(node)
        is_repeated = place is not None and place[1] >= 0
        twin = self.old.twins.get(node)
        # An input outside of every stretch is one that all layers or only the first one reads.
        is_of_layer = is_repeated or node.op != "placeholder"
        source = self.ahead.at(twin, shift if is_of_layer else 0) if twin else None
        new = self.graph.create_node(
            node.op,
            node.target,
            fx.map_arg(node.args, operand),
            fx.map_arg(node.kwargs, operand),
            source.name if source else node.name,
            node.type,
        )
        if node.op == "placeholder":
            new.target = new.name
        graph.copy_facts(node, new)
        self.modules.apply(new, shift)
        if source:
            graph.copy_type(node, new, graph.fake_value(source))
        elif graph.fake_value(node) is not None:
            graph.copy_type(node, new, self.values.value(node, new, is_copy))
        if place and is_repeated:
            place[0].new.append(new)
        else:
            self.shared[node] = new

    def at(self, node: fx.Node, shift: int) -> fx.Node:
        place = self.old.places.get(node)
        if place is None:
            return self.shared[node]
        stretch, offset = place
        offset = stretch.offset(offset, shift, self.extra)
        return stretch.new[offset] if offset >= 0 else self.shared[node]


def _unrolled(
    length: int, stretches: Sequence[Stretch], extra: int
) -> Iterator[tuple[int, int, bool]]:
    """The items of an unrolled sequence: which one, for how many layers deeper, and whether it is a
    copy."""
    at = 0
    for stretch in sorted(stretches, key=lambda s: s.start):
        before, behind = (0, extra) if stretch.step > 0 else (extra, 0)
        yield from ((i, before, False) for i in range(at, stretch.cut))
        for copy in range(1, extra + 1):
            shift = before + stretch.step * copy
            yield from ((i, shift, True) for i in range(stretch.cut - stretch.period, stretch.cut))
        yield from ((i, behind, False) for i in range(stretch.cut, stretch.end))
        at = stretch.end
    behind = extra if not stretches or stretches[-1].step > 0 else 0
    yield from ((i, behind, False) for i in range(at, length))


class _Values:
    """Fake values of copies: tensors like the original's, in storages of their own."""

    def __init__(self, gm: fx.GraphModule) -> None:
        values = (t for node in gm.graph.nodes for t in graph.tensors_of(graph.fake_value(node)))
        self.mode = next(t.fake_mode for t in values if isinstance(t, FakeTensor))

    def value(self, node: fx.Node, new: fx.Node, is_copy: bool) -> Any:
        """The value of `node`, over again in a copy, and as a view of what `new` reads where it is
        one of what `node` reads."""
        value = graph.fake_value(node)
        storages = [graph.storage_of(tensor) for tensor in graph.tensors_of(value)]
        bases: dict[int, torch.Tensor] = {}
        for old, its in zip(node.all_input_nodes, new.all_input_nodes, strict=True):
            pairs = zip(
                graph.tensors_of(graph.fake_value(old)),
                graph.tensors_of(graph.fake_value(its)),
                strict=True,
            )
            bases |= {graph.storage_of(a): b for a, b in pairs}
        if not is_copy and all(graph.storage_of(bases[s]) == s for s in storages if s in bases):
            return value

        def copy(value: Any) -> Any:
            match value:
                case torch.Tensor():
                    return self._tensor(value, bases)
                case list() | tuple():
                    return type(value)(map(copy, value))
                case _:
                    return value

        return copy(value)

    def _tensor(self, tensor: torch.Tensor, bases: dict[int, torch.Tensor]) -> torch.Tensor:
        storage = graph.storage_of(tensor)
        base = bases.get(storage)
        if base is not None and graph.storage_of(base) == storage:
            return tensor  # of a value that all layers share
        size, stride = tensor.size(), tensor.stride()
        with in_kernel_invocation_manager(self.mode):  # the type is known: nothing to infer
            if base is not None:
                new = base.as_strided(size, stride, tensor.storage_offset())
            else:
                new = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
        bases[storage] = FakeTensor(self.mode, new, tensor.device)
        return bases[storage]


# --- sequences that repeat ------------------------------------------------------------------------


def _operands(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, in order, one as often as it is read."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _signature(node: fx.Node) -> Any:
    """What a node does, whatever it does it to."""
    args = node.args[:1] if graph.is_call(node, *graph.ASSERTIONS) else node.args
    tag = graph.tag_of(node)
    return node.op, node.target, _shown(args), _shown(node.kwargs), type_of(node), tag


def _shown(value: Any) -> str:
    return repr(fx.map_arg(value, lambda _: _HOLE))


class _Hole:
    def __repr__(self) -> str:
        return "*"


_HOLE: Any = _Hole()


def type_of(node: fx.Node) -> str:
    """Dtype, sizes and device of the tensors that a node stands for; symbolic sizes are alike."""
    return _type(graph.fake_value(node))


def _type(value: Any) -> str:
    match value:
        case torch.Tensor():
            sizes = ",".join(str(s) if isinstance(s, int) else "?" for s in value.shape)
            return f"{value.dtype}[{sizes}]{value.device}"
        case list() | tuple():
            return f"({', '.join(map(_type, value))})"
        case _:
            return type(value).__name__


def _repetitions(items: Sequence[Any], start: int = 0) -> list[Stretch]:
    """The parts of `items` in which everything comes again one period later, in order: the longest
    one, then those before and behind it."""
    best = _longest_repetition(items)
    if not best:
        return []
    before = _repetitions(items[: best.start], start)
    behind = _repetitions(items[best.end :], start + best.end)
    return [*before, dataclasses.replace(best, start=start + best.start, new=[]), *behind]


def _longest_repetition(items: Sequence[Any]) -> Stretch | None:
    last: dict[Any, int] = {}
    distances: Counter[int] = Counter()
    for i, item in enumerate(items):
        if item in last:
            distances[i - last[item]] += 1
        last[item] = i
    best: Stretch | None = None
    for period, _ in distances.most_common(_CANDIDATES):
        is_same = [a == b for a, b in zip(items, items[period:], strict=False)]
        start, length = _longest_run(is_same)
        if length >= period and length + period > (best.length if best else 0):
            best = Stretch(start, length + period, period)
    return best


def _longest_run(flags: Sequence[bool]) -> tuple[int, int]:
    """Start and length of the longest run of True."""
    best, start = (0, 0), 0
    for i, flag in enumerate([*flags, False]):
        if not flag:
            if i - start > best[1]:
                best = start, i - start
            start = i + 1
    return best


def _partners(places: Sequence[_Place | None]) -> dict[int, int]:
    """Per item, the one that is the same of the next layer."""
    index: dict[tuple[int, int], int] = {}
    for i, place in enumerate(places):
        if place:
            index.setdefault((id(place[0]), place[1]), i)
    partner: dict[int, int] = {}
    for i, place in enumerate(places):
        if place:
            stretch, offset = place
            j = index.get((id(stretch), offset + stretch.step * stretch.period))
            if j is not None:
                partner[i] = j
    return partner


def _runs(partner: Mapping[int, int]) -> list[Stretch]:
    """The stretches that pairs of items make up: runs of one distance that is a period at least."""
    runs: list[Stretch] = []
    items = sorted(partner)
    at = 0
    while at < len(items):
        first, period = items[at], partner[items[at]] - items[at]
        end = at
        while (
            end < len(items)
            and items[end] == first + end - at
            and partner[items[end]] - items[end] == period
        ):
            end += 1
        if 0 < period <= end - at:
            runs.append(Stretch(first, end - at + period, period))
        at = end
    return runs
