"""The rules of each phase. A phase keeps the rules of the phases before it; the pipeline checks
them after every pass, and a broken rule is a bug in `overlap`.

code  from        rule
V001  FORWARD     the graph is well-formed: a node comes after its arguments, the output is last
V002  NORMALIZED  an in-flight result is read only by its wait
V003  NORMALIZED  every start has exactly one wait, and every wait a start or an input
V004  NORMALIZED  a buffer in flight is not written before its wait
V005  SCHEDULED   a buffer in flight is not freed before its wait
V006  FORWARD     inputs and outputs keep their number, order and types
V007  FORWARD     a slice reads only its own slice and un-sliced values; slices meet in a join
V008  FORWARD     the group of a collective is a name
V009  SCHEDULED   the starts of a group keep the schedule's order
V010  LEGAL       collectives that are in flight together have a storage each
V011  FORWARD     a pass that reorders keeps effects in order: mutation, random numbers, modes
V012  FORWARD     every node that stands for tensors has a recorded fake value
V013  FORWARD     recorded fake values equal recomputed ones (the deep check)

The deep check runs every operator again on fake tensors; `OVERLAP_VERIFY=deep` turns it on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from overlap import collectives, graph, printing
from overlap.errors import ConfigError, VerifyError
from overlap.graph import Phase

CONTEXT_LINES = 2
_aten = torch.ops.aten
JOINS = (
    _aten.cat,
    _aten.stack,
    _aten.add,
    _aten.add_,
    _aten.sum,
    operator.add,
    torch.sym_sum,
)
ACCUMULATIONS = (_aten.addmm, _aten.addmm_)  # of one slice's product to a sum of others'
_FREES = (_aten.resize_, _aten.set_, torch.ops.inductor.resize_storage_bytes_)
_SIZES = (_aten.sym_size, _aten.sym_stride, _aten.sym_numel, _aten.sym_storage_offset)
_ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
_EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
_MODES = "grad and autocast modes"
_MODE_SWITCHES = (torch._C._set_grad_enabled, _ENTER_AUTOCAST, _EXIT_AUTOCAST)


@dataclasses.dataclass(frozen=True)
class Broken:
    """A rule that a graph breaks: its code, the node it is about (None: the graph), and how."""

    code: str
    node: fx.Node | None
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@dataclasses.dataclass(frozen=True)
class Access:
    """Who touches one piece of state: the writers in order, and after how many of them each reader
    comes."""

    state: str
    writers: tuple[str, ...]
    readers: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Type:
    """What is known of a value: the name of an input, a dtype (or "int" and the like; "" if nothing
    is known), and sizes, None where symbolic."""

    name: str = ""
    dtype: str = ""
    sizes: tuple[int | None, ...] = ()

    @classmethod
    def of(cls, value: Any, name: str = "") -> Type:
        if not isinstance(value, torch.Tensor):
            shown = printing.format_type(value)
            return cls(name, shown.partition("(")[0])
        sizes = tuple(size if isinstance(size, int) else None for size in value.shape)
        return cls(name, printing.format_type(value).partition("[")[0], sizes)

    def agrees(self, other: Type) -> bool:
        """Whether both can be the type of one value; what is unknown agrees with everything."""
        if self.name != other.name:
            return False
        if "" in (self.dtype, other.dtype):
            return True
        pairs = zip(self.sizes, other.sizes, strict=False)
        known = all(mine == its or None in (mine, its) for mine, its in pairs)
        return self.dtype == other.dtype and len(self.sizes) == len(other.sizes) and known

    def __str__(self) -> str:
        sizes = ",".join("?" if size is None else str(size) for size in self.sizes)
        shown = f"{self.dtype}[{sizes}]" if self.sizes else self.dtype or "unknown"
        return f"{self.name}: {shown}" if self.name else shown


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a graph was before a pass, as far as the pass has to keep it.

    starts: per group, the names of the starts in order.
    effects: None if the pass may change the graph's effects.
    lines: every node as a line, for the deep check to pass over what did not change.
    """

    phase: Phase
    inputs: tuple[Type, ...]
    outputs: tuple[Type, ...]
    starts: tuple[tuple[str, tuple[str, ...]], ...]
    effects: tuple[Access, ...] | None
    lines: frozenset[str] = frozenset()


def signature(gm: fx.GraphModule, keep_effects: bool = False) -> Signature:
    """What `gm` is now, for `verify` to compare with after a pass."""
    nodes = list(gm.graph.nodes)
    return Signature(
        phase=graph.phase_of(gm),
        inputs=tuple(Type.of(graph.fake_value(n), n.name) for n in nodes if n.op == "placeholder"),
        outputs=tuple(Type.of(value) for value in _results(graph.output_node(gm.graph))),
        starts=_starts(nodes),
        effects=_effects(nodes) if keep_effects else None,
        lines=frozenset(printing.lines(gm)) if _is_deep() else frozenset(),
    )


def _results(output: fx.Node) -> list[Any]:
    """The fake values that the graph returns, constants as they are."""
    results = output.args[0]
    flat = results if isinstance(results, list | tuple) else [results]
    return [graph.fake_value(item) if isinstance(item, fx.Node) else item for item in flat]


def _starts(nodes: list[fx.Node]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    by_group: dict[str, list[str]] = {}
    for node in filter(collectives.is_start, nodes):
        by_group.setdefault(collectives.group_of(node), []).append(node.name)
    return tuple((group, tuple(names)) for group, names in by_group.items())


def _effects(nodes: list[fx.Node]) -> tuple[Access, ...]:
    """Every piece of state that the graph writes, with its writers and readers."""
    roots = storage_roots(nodes)
    written = {node: _states_written(node, roots) for node in nodes}
    writers: dict[str, list[str]] = {}
    for node, states in written.items():
        for state in states:
            writers.setdefault(state, []).append(node.name)
    if not writers:
        return ()
    count = dict.fromkeys(writers, 0)
    readers: dict[str, list[tuple[str, int]]] = {state: [] for state in writers}
    for node in nodes:
        for state in _states_read(node, roots):
            if state in writers and state not in written[node]:
                readers[state].append((node.name, count[state]))
        for state in written[node]:
            count[state] += 1
    return tuple(Access(s, tuple(names), tuple(readers[s])) for s, names in writers.items())


def _states_written(node: fx.Node, roots: dict[fx.Node, frozenset[fx.Node]]) -> list[str]:
    states = _storages(written_by(node), roots)
    if graph.is_call(node, *_MODE_SWITCHES):
        states.append(_MODES)
    if graph.draws_random_numbers(node):
        states.append("random numbers")
    return states


def _states_read(node: fx.Node, roots: dict[fx.Node, frozenset[fx.Node]]) -> list[str]:
    modes = [_MODES] if node.op == "call_function" else []
    return _storages(node.all_input_nodes, roots) + modes


def _storages(args: list[fx.Node], roots: dict[fx.Node, frozenset[fx.Node]]) -> list[str]:
    names = sorted({root.name for arg in args for root in roots[arg]})
    return [f"the storage of {name}" for name in names]


def verify(
    gm: fx.GraphModule, phase: Phase, before: Signature | None = None, after: str = ""
) -> None:
    """Raise VerifyError with every rule of `phase` that `gm` breaks, each under its line.

    `before` is the graph's signature before the last change, None if there is none to keep; `after`
    names that change in the message.
    """
    broken = broken_rules(gm, phase, before)
    if not broken:
        return
    codes = {rule.code for rule in broken}
    rules = "1 rule" if len(codes) == 1 else f"{len(codes)} rules"
    place = f" after {after}" if after else ""
    more = "" if len(broken) == 1 else f"; and {len(broken) - 1} more below"
    raise VerifyError(f"{rules} broken{place}: {broken[0]}{more}\n{_excerpt(gm, broken)}")


def broken_rules(gm: fx.GraphModule, phase: Phase, before: Signature | None = None) -> list[Broken]:
    """Every way in which `gm` breaks a rule of `phase`, rule by rule."""
    subject = Subject(gm, before)
    deep = _is_deep()
    broken: list[Broken] = []
    for rule in RULES:
        if rule.phase <= phase and (deep or not rule.is_deep):
            broken += [Broken(rule.code, node, text) for node, text in rule.check(subject)]
        if broken and rule.code == "V001":
            break  # the other rules presume a graph that can be walked
    return broken


def _is_deep() -> bool:
    value = os.environ.get("OVERLAP_VERIFY", "")
    if value not in ("", "deep"):
        raise ConfigError(f"OVERLAP_VERIFY expects 'deep' or nothing, found {value!r}")
    return value == "deep"


def _excerpt(gm: fx.GraphModule, broken: list[Broken]) -> str:
    """The lines around each broken rule, with the rule under its line."""
    lines = printing.dump_lines(gm)
    position = {node: i for i, node in enumerate(gm.graph.nodes)}
    about: dict[int, list[Broken]] = {}
    for rule in broken:
        about.setdefault(position[rule.node] if rule.node else len(lines) - 1, []).append(rule)
    near = {j for i in about for j in range(i - CONTEXT_LINES, i + CONTEXT_LINES + 1)}
    text: list[str] = []
    for i, line in enumerate(lines):
        if i not in near:
            text += ["..."] if text[-1:] != ["..."] else []
            continue
        text.append(line)
        margin = " " * (len(line) - len(line[printing.MIN_LANES :].lstrip()))
        text += [f"{margin}^ {rule}" for rule in about.get(i, [])]
    return "\n".join(text)


# Storage: what a node's tensors live in, and who writes it.


@functools.cache
def _aliasing(target: torch._ops.OpOverload) -> tuple[tuple[tuple[int, str, bool], ...], bool]:
    """The operator's arguments that it aliases or writes, as (position, name, is written), and
    whether all of its results are views of them."""
    schema: Any = target._schema
    args = tuple(
        (i, arg.name, arg.alias_info.is_write)
        for i, arg in enumerate(schema.arguments)
        if arg.alias_info is not None
    )
    is_view = bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)
    return args, is_view


def _argument_nodes(node: fx.Node, index: int, name: str) -> list[fx.Node]:
    value = node.args[index] if index < len(node.args) else node.kwargs.get(name)
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that `node` writes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    args, _ = _aliasing(node.target)
    return [a for i, name, written in args if written for a in _argument_nodes(node, i, name)]


def storage_roots(nodes: Iterable[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each node, the nodes whose storage its tensors may live in, itself if it allocates.

    Taken from the operators' schemas: fake values are copied between nodes too freely to tell. The
    results of a wait live where its operand does.
    """
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    attributes: dict[str, fx.Node] = {}
    for node in nodes:
        own = frozenset([node])
        if node.op == "get_attr":
            own = frozenset([attributes.setdefault(str(node.target), node)])
        shared = [roots[source] for source in _shared_with(node)]
        roots[node] = shared[0] if len(shared) == 1 else frozenset().union(*shared) or own
    return roots


def _shared_with(node: fx.Node) -> list[fx.Node]:
    """The arguments whose storage the results of `node` live in."""
    if collectives.is_wait(node):
        return [collectives.awaited(node)]
    if graph.is_call(node, operator.getitem):
        return _argument_nodes(node, 0, "")
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    args, is_view = _aliasing(node.target)
    return [a for i, name, _ in args for a in _argument_nodes(node, i, name)] if is_view else []


class Subject:
    """A graph under verification, with what several rules need, computed once."""

    def __init__(self, gm: fx.GraphModule, before: Signature | None) -> None:
        self.gm = gm
        self.before = before
        self.nodes: list[fx.Node] = list(gm.graph.nodes)

    @functools.cached_property
    def roots(self) -> dict[fx.Node, frozenset[fx.Node]]:
        return storage_roots(self.nodes)

    def buffers(self, start: fx.Node) -> frozenset[fx.Node]:
        """The storages that a start may read or write until its wait."""
        return self.roots[start].union(*(self.roots[arg] for arg in start.all_input_nodes))

    def in_flight(self) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
        """Each node with the starts that are in flight just before it, in order of their start."""
        flying: dict[fx.Node, None] = {}
        for node in self.nodes:
            if collectives.is_wait(node) and (start := collectives.start_of(node)):
                flying.pop(start, None)
            yield node, list(flying)
            if collectives.is_start(node):
                flying[node] = None


# The rules. Each yields the nodes (None: the graph as a whole) that break it, and how.

_Check = Callable[[Subject], Iterator[tuple[fx.Node | None, str]]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule: its code, the phase from which it holds, what it says, and how it is checked."""

    code: str
    phase: Phase
    statement: str
    check: _Check
    is_deep: bool = False


RULES: list[Rule] = []


def _rule(code: str, phase: Phase, statement: str, is_deep: bool = False):
    def register(check: _Check) -> _Check:
        RULES.append(Rule(code, phase, statement, check, is_deep))
        return check

    return register


@_rule("V001", Phase.FORWARD, "the graph is well-formed: a node comes after its arguments")
def _well_formed(subject: Subject) -> Iterator[tuple[fx.Node | None, str]]:
    seen: set[fx.Node] = set()
    is_ordered = True
    for node in subject.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                is_ordered = False
                yield node, f"{node} reads {source}, which does not come before it"
        seen.add(node)
    if not subject.nodes or subject.nodes[-1].op != "output":
        yield None, "the graph does not end with its output"
    elif is_ordered:
        try:
            subject.gm.graph.lint()
        except RuntimeError as error:
            yield None, f"fx refuses the graph: {str(error).splitlines()[0]}"


@_rule("V002", Phase.NORMALIZED, "an in-flight result is read only by its wait")
def _reads_only_landed(subject: Subject) -> Iterator[tuple[fx.Node | None, str]]:
    for node, flying in subject.in_flight():
        if collectives.is_wait(node):
            continue
        for start in node.all_input_nodes:
            if collectives.is_start(start) and not graph.is_call(node, *_SIZES):
                yield node, f"{node} reads {start}, which is still in flight"
        for start in flying:
            for arg in node.all_input_nodes if written_by(start) else ():
                if arg is not start and subject.roots[arg] & subject.roots[start]:
                    yield node, f"{node} reads {arg}, which {start} is still writing"


@_rule("V003", Phase.NORMALIZED, "every start has exactly one wait, and every wait a start")
def _one_wait(subject: Subject) -> Iterator[tuple[fx.Node | None, str]]:
    for node in subject.nodes:
        if collectives.is_start(node):
            waits = collectives.waits_of(node)
            if not waits:
                yield node, f"{node} is never waited for"
            for extra in waits[1:]:
                yield extra, f"{extra} waits for {node}, which {waits[0]} has waited for already"
        elif collectives.is_wait(node) and collectives.start_of(node) is None:
            source = collectives.awaited(node)
            if source.op != "placeholder":
                yield node, f"{node} waits for {source}, which starts nothing"


@_rule("V004", Phase.NORMALIZED, "a buffer in flight is not written before its wait")
def _not_written(subject: Subject) -> Iterator[tuple[fx.Node | None, str]]:
    for node, flying in subject.in_flight():
        if flying and not graph.is_call(node, *_FREES):
            yield from _touched(subject, node, flying, written_by(node), "writes")


@_rule("V005", Phase.SCHEDULED, "a buffer in flight is not freed before its wait")
def _not_freed(subject: Subject) -> Iterator[tuple[fx.Node | None, str]]:
    for node, flying in subject.in_flight():
        if flying and graph.is_call(node, *_FREES):
            yield from _touched(subject, node, flying, node.all_input_nodes[:1], "frees")


def _touched(
    subject: Subject, node: fx.Node, flying: list[fx.Node], args: list[fx.Node], verb: str
) -> Iterator[tuple[fx.Node | None, str]]:
    for arg in args:
        for start in flying:
            if subject.roots[arg] & subject.buffers(start):
                yield node, f"{node} {verb} {arg}, which {start} still uses in flight"


@_rule("V006", Phase.FORWARD, "inputs and outputs keep their number, order and types")
def _keeps_signature(subject: Subject) -> Iterator[tuple[fx.Node | None, str]]:
    before = subject.before
    if before is None:
        return
    now = signature(subject.gm)
    output = graph.output_node(subject.gm.graph)
    inputs = graph.placeholders(subject.gm.graph)
    if len(now.inputs) != len(before.inputs):
        yield output, f"the number of inputs is {len(now.inputs)}, it was {len(before.inputs)}"
    if len(now.outputs) != len(before.outputs):
        yield output, f"the number of outputs is {len(now.outputs)}, it was {len(before.outputs)}"
    for node, new, old in zip(inputs, now.inputs, before.inputs, strict=False):
        if not new.agrees(old):
            yield node, f"the input is {new}, it was {old}"
    for i, (new, old) in enumerate(zip(now.outputs, before.outputs, strict=False)):
        if not new.agrees(old):
            yield output, f"output {i} is {new}, it was {old}"


@_rule("V007", Phase.FORWARD, "a slice reads only its own slice and un-sliced values")
def _slices_apart(subject: Subject) -> Iterator[tuple[fx.Node | None, str]]:
    owner: dict[fx.Node, int | None] = {}
    is_derived = graph.phase_of(subject.gm) >= Phase.JOINT
    for node in subject.nodes:
        own = graph.tag_of(node).slice
        is_sum = own is None and graph.is_call(node, *ACCUMULATIONS)
        operands = list(graph.args_of(node))[1:3] if is_sum else node.all_input_nodes
        read = {s: arg for arg in operands if (s := owner[arg]) is not None}
        if is_derived and graph.is_call(node, *JOINS):
            own = None  # autograd adds gradients up under the tag of one of them
        owner[node] = None if graph.is_common_size(node) else own
        if node.op == "output" or (own is None and graph.is_call(node, *JOINS)):
            continue
        if graph.is_call(node, *graph.ASSERTIONS):
            continue  # a condition that slices share is checked once for each
        if own is None and len(read) > 1:
            # A whole value may be cut by the sizes of all slices.
            read = {s: arg for s, arg in read.items() if not graph.is_size(arg)}
        if own is None and len(read) > 1:
            places = " and ".join(f"{arg} of slice {other}" for other, arg in read.items())
            yield node, f"{node} reads {places}, and is no join"
            continue
        if is_sum:
            continue
        if own is None and read:
            # An untagged node belongs to the slice that it reads: tags get lost in the backward.
            own = owner[node] = next(iter(read))
        for other, arg in read.items():
            if other != own:
                yield node, f"{node} of slice {own} reads {arg} of slice {other}"


@_rule("V008", Phase.FORWARD, "the group of a collective is a name")
def _group_is_name(subject: Subject) -> Iterator[tuple[fx.Node | None, str]]:
    for node in filter(collectives.is_start, subject.nodes):
        group = collectives.group_of(node)
        if not group or group not in (*node.args, *node.kwargs.values()):
            yield node, f"the group of {node} is {group!r}, which no argument names"


@_rule("V009", Phase.SCHEDULED, "the starts of a group keep the schedule's order")
def _keeps_start_order(subject: Subject) -> Iterator[tuple[fx.Node | None, str]]:
    before = subject.before
    if before is None or before.phase < Phase.SCHEDULED:
        return
    now = dict(_starts(subject.nodes))
    for group, names in before.starts:
        found = now.get(group, ())
        if found != names:
            place = _first_difference(subject, found, names)
            yield place, f"group {group!r} starts {_list(found)}; the schedule says {_list(names)}"


def _first_difference(
    subject: Subject, now: tuple[str, ...], before: tuple[str, ...]
) -> fx.Node | None:
    """The first node of `now` that stood elsewhere before, None if only some are missing."""
    moved = [new for new, old in zip_longest(now, before) if new != old]
    return next((node for node in subject.nodes if node.name == moved[0]), None)


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"


@_rule("V010", Phase.LEGAL, "collectives that are in flight together have a storage each")
def _storage_each(subject: Subject) -> Iterator[tuple[fx.Node | None, str]]:
    for node, flying in subject.in_flight():
        for start in flying if collectives.is_start(node) else ():
            if subject.roots[node] & subject.roots[start]:
                yield node, f"{node} and {start} are in flight with one storage"


@_rule("V011", Phase.FORWARD, "a pass that reorders keeps effects in order")
def _keeps_effects(subject: Subject) -> Iterator[tuple[fx.Node | None, str]]:
    if subject.before is None or subject.before.effects is None:
        return
    node_of = {node.name: node for node in subject.nodes}
    now = {access.state: access for access in _effects(subject.nodes)}
    for old in subject.before.effects:
        new = now.get(old.state, Access(old.state, (), ()))
        if new.writers != old.writers:
            place = _first_difference(subject, new.writers, old.writers)
            order = f"{_list(new.writers)}; it was {_list(old.writers)}"
            yield place, f"the order of {old.state} is {order}"
            continue
        count = dict(new.readers)
        for name, writes in old.readers:
            if count.get(name, writes) != writes:
                yield node_of[name], f"{name} moved across a write of {old.state}"


@_rule("V012", Phase.FORWARD, "every node that stands for tensors has a recorded fake value")
def _has_fake_value(subject: Subject) -> Iterator[tuple[fx.Node | None, str]]:
    for node in subject.nodes:
        if _makes_tensor(node) and graph.fake_value(node) is None:
            yield node, f"{node} has no recorded fake value"


def _makes_tensor(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return bool(node.users)
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return any("Tensor" in str(result.type) for result in node.target._schema.returns)


@_rule("V013", Phase.FORWARD, "recorded fake values equal recomputed ones", is_deep=True)
def _fake_values_hold(subject: Subject) -> Iterator[tuple[fx.Node | None, str]]:
    is_autocast = False
    lines = dict(zip(subject.nodes, printing.lines(subject.gm), strict=True))
    known = subject.before.lines if subject.before else frozenset[str]()
    for node in subject.nodes:
        if graph.is_call(node, _ENTER_AUTOCAST, _EXIT_AUTOCAST):
            is_autocast = node.target is _ENTER_AUTOCAST
        if is_autocast or not _can_recompute(node):
            continue
        if all(lines[part] in known for part in (node, *node.all_input_nodes)):
            continue
        recorded, found = graph.fake_value(node), _recompute(node)
        mine = [Type.of(value) for value in graph.tensors_of(recorded)]
        its = [Type.of(value) for value in graph.tensors_of(found)]
        if len(mine) != len(its) or not all(map(Type.agrees, mine, its)):
            shown = ", ".join(map(str, mine)), ", ".join(map(str, its))
            yield node, f"{node} is recorded as {shown[0]}; its operator makes {shown[1]}"


def _can_recompute(node: fx.Node) -> bool:
    """Whether running the operator on fake values changes nothing: no write, everything known."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    known = all(graph.fake_value(arg) is not None for arg in node.all_input_nodes)
    results = list(graph.tensors_of(graph.fake_value(node)))
    return known and bool(results) and isinstance(results[0], FakeTensor)


def _recompute(node: fx.Node) -> Any:
    """What the operator makes of the recorded fake values, without a guard on their sizes."""
    fake: Any = next(graph.tensors_of(graph.fake_value(node)))
    mode = fake.fake_mode
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), graph.fake_value)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(torch.no_grad())
        if mode.shape_env is not None:
            stack.enter_context(mode.shape_env.suppress_guards())
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        return target(*args, **kwargs)
