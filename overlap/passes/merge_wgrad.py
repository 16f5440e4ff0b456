"""merge_wgrad: the partial weight gradients of the slices become one sum inside the products.

    before              w0 = mm(t(g0), x0);  w1 = mm(t(g1), x1);  dw = add(w0, w1)

    in fp32 and better  w0 = mm(t(g0), x0);  dw = addmm(w0, t(g1), x1)
    in less             dw = mm(t(cat([g0, g1])), cat([x0, x1]))

Why it is correct: a sum over rows of all slices is the sum of the slices' sums; the row order of a
contraction changes rounding only. Casts and views between product and sum are the same for every
slice and linear, so they move behind the one sum.

Why two forms: a product that adds to its own result reads and writes the gradient once per slice,
needs no copy of the rows and lets go of each slice's inputs; but it rounds once per slice to its
result's type, so in low precision the rows are joined first, and the inputs of every slice stay
alive until the last one is there.

With exact numerics the rows are joined in every type, so that each use of a weight has the one
product, or the one sum over rows, of the program as written; uses add up in its order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from overlap import exactness, graph
from overlap.graph import Phase
from overlap.passes.normalize import is_sum_root, pieces_of, sum_leaves
from overlap.pipeline import Context, Effect, remove_dead_code

aten = torch.ops.aten
_LINEAR = (aten.t, aten.transpose, aten.permute, aten._to_copy, aten.view, aten.unsqueeze)


@dataclasses.dataclass(frozen=True)
class Inexact:
    """A fact about a joint graph: nodes that still add up what several slices computed."""

    nodes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class MergeWgrad:
    """With `exact_slices` above 0, of so many slices: no bit changes, and where one still would,
    the context is told so (`Inexact`)."""

    exact_slices: int = 0
    name: str = "merge_wgrad"
    effect: Effect = Effect.REWRITE
    requires: Phase = Phase.NORMALIZED
    ensures: Phase = Phase.NORMALIZED

    def run(self, gm: fx.GraphModule, ctx: Context) -> None:
        if self.exact_slices:
            for root in filter(is_sum_root, list(gm.graph.nodes)):
                _merge_uses(root, self.exact_slices)
            remove_dead_code(gm)
            if found := tuple(node.name for node in exactness.mixing(gm.graph)):
                ctx.provide(Inexact(found))
            return
        order = {node: i for i, node in enumerate(gm.graph.nodes)}
        sums = [_plan(node, order) for node in gm.graph.nodes if is_sum_root(node)]
        joined: dict[Any, fx.Node] = {}
        for merge in filter(None, sums):
            _apply(merge, joined)


@dataclasses.dataclass(frozen=True)
class _Merge:
    """One weight gradient: the sum, its products, and what stands between a product and the sum."""

    root: fx.Node
    products: tuple[fx.Node, ...]
    between: tuple[fx.Node, ...]
    rest: tuple[fx.Node, ...]


def _plan(root: fx.Node, order: dict[fx.Node, int]) -> _Merge | None:
    """Terms that are products of two slices or more; other terms stay additions."""
    if not graph.is_backward(root):
        return None
    leaves = sum_leaves(root)
    # A term that is added twice has one user, too.
    chains = [(leaf, _chain(leaf) if leaves.count(leaf) == 1 else None) for leaf in leaves]
    groups: dict[Any, list[tuple[fx.Node, list[fx.Node]]]] = {}
    for leaf, chain in chains:
        if chain is not None:
            groups.setdefault(_signature(chain), []).append((leaf, chain))
    mergeable = [group for group in groups.values() if len(group) > 1]
    if len(mergeable) != 1:
        return None
    (group,) = mergeable
    merged = [leaf for leaf, _ in group]
    rest = tuple(leaf for leaf, _ in chains if leaf not in merged)
    products = sorted((chain[-1] for _, chain in group), key=order.__getitem__)
    slices = {graph.tag_of(product).slice for product in products}
    if not _accumulates(products) and len(slices) == 1:
        return None  # the terms of one slice are sums over columns: a join would copy weights
    return _Merge(root, tuple(products), tuple(reversed(group[0][1][:-1])), rest)


def _chain(leaf: fx.Node) -> list[fx.Node] | None:
    """From a term down to its product, through linear operators that nobody else reads."""
    chain = [leaf]
    while True:
        node = chain[-1]
        if len(node.users) != 1:
            return None
        if node.target is aten.mm.default:
            return chain
        if not graph.is_call(node, *_LINEAR):
            return None
        source = node.args[0]
        assert isinstance(source, fx.Node)
        chain.append(source)


def _signature(chain: Sequence[fx.Node]) -> Any:
    """Equal for terms whose products may share one: same operators, same shapes, same dtypes."""
    product = graph.fake_value(chain[-1])
    operators = tuple((node.target, repr(node.args[1:]), repr(node.kwargs)) for node in chain[:-1])
    return operators, tuple(map(str, product.shape)), product.dtype


def _apply(merge: _Merge, joined: dict[Any, fx.Node]) -> None:
    """`joined` holds the rows that earlier merges joined: gate and up projection share theirs."""
    root = merge.root
    if _accumulates(merge.products):
        value = _accumulated(merge.products)
    else:
        value = _product_of_joined(merge, joined)
    with root.graph.inserting_before(root):
        for node in merge.between:
            value = _call(root, node.target, (value, *node.args[1:]), node.kwargs)
        for term in merge.rest:
            value = _call(root, aten.add.Tensor, (value, term))
    root.replace_all_uses_with(value)


def _accumulates(products: Sequence[fx.Node]) -> bool:
    return graph.fake_value(products[0]).dtype in (torch.float32, torch.float64)


def _accumulated(products: Sequence[fx.Node]) -> fx.Node:
    """Each product adds to the one before, in the order in which they are in the graph."""
    value = products[0]
    for product in products[1:]:
        with product.graph.inserting_before(product):
            tag = graph.tag_of(product)
            is_of_slice = graph.tag_of(value) == tag
            value = _call(product, aten.addmm.default, (value, *product.args))
            if is_of_slice:
                graph.set_tag(value, tag)
    return value


def _product_of_joined(merge: _Merge, joined: dict[Any, fx.Node]) -> fx.Node:
    """One product over the rows of all slices, in the order of the slices."""
    products = sorted(merge.products, key=lambda node: graph.tag_of(node).slice or 0)
    root = merge.root
    with root.graph.inserting_before(root):
        left = _joined([graph.args_of(p)[0] for p in products], 1, root, joined)
        right = _joined([graph.args_of(p)[1] for p in products], 0, root, joined)
        return _call(root, aten.mm.default, (left, right))


def _joined(
    pieces: Sequence[fx.Node], dim: int, like: fx.Node, joined: dict[Any, fx.Node]
) -> fx.Node:
    """The pieces side by side. Transposed ones are joined before the transpose, so that the copy
    runs along memory."""
    if all(_is_transpose(piece) for piece in pieces):
        bases = [graph.args_of(piece)[0] for piece in pieces]
        inner = _joined(bases, 1 - dim, like, joined)
        return _call(like, aten.t.default, (inner,))
    key = (tuple(pieces), dim)
    if key not in joined:
        whole = pieces_of(pieces, dim)
        joined[key] = whole if whole else _call(like, aten.cat.default, (list(pieces), dim))
    return joined[key]


# --- exact ----------------------------------------------------------------------------------------


def _merge_uses(root: fx.Node, slices: int) -> None:
    """The terms of each use, one per slice and next to each other, become the one term that the
    program as written has; terms are added in the order in which they were."""
    leaves = sum_leaves(root)
    if not graph.is_backward(root) or len(set(leaves)) < len(leaves):
        return
    if not _adds_one_by_one(root, len(leaves)):
        return
    terms: list[fx.Node | list[list[fx.Node]]] = []
    while leaves:
        use = [_exact_chain(leaf) for leaf in leaves[:slices]]
        chains = [chain for chain in use if chain is not None]
        if len(chains) == slices and _is_one_use(chains):
            terms.append(chains)
            leaves = leaves[slices:]
        else:
            terms.append(leaves.pop(0))
    if not any(isinstance(term, list) for term in terms):
        return
    with root.graph.inserting_before(root):
        values = [_joined_use(t, root) if isinstance(t, list) else t for t in terms]
        value = values[0]
        for term in values[1:]:
            value = _call(root, aten.add.Tensor, (value, term))
    root.replace_all_uses_with(value)


def _adds_one_by_one(root: fx.Node, num_leaves: int) -> bool:
    """Whether a sum adds one term to those before, and never two sums."""
    node = root
    for expected in range(num_leaves, 1, -1):
        if len(sum_leaves(node)) != expected:
            return False
        node = graph.args_of(node)[0]
    return True


def _exact_chain(leaf: fx.Node) -> list[fx.Node] | None:
    """From a term down to its product, or to its sum over rows."""
    chain = [leaf]
    while True:
        node = chain[-1]
        if len(node.users) != 1:
            return None
        if node.target in (aten.mm.default, aten.sum.dim_IntList):
            return chain if all(map(_is_in_order, node.all_input_nodes)) else None
        if not graph.is_call(node, *_LINEAR):
            return None
        source = node.args[0]
        assert isinstance(source, fx.Node)
        chain.append(source)


def _is_in_order(node: fx.Node) -> bool:
    """Whether a join lies in memory as the whole does: row by row, or as a transpose of that."""
    if graph.fake_value(node).dim() == 2 and _is_transpose(node):
        return _is_in_order(graph.args_of(node)[0])
    return exactness.is_contiguous(node)


def _is_one_use(chains: Sequence[Sequence[fx.Node]]) -> bool:
    last = [chain[-1] for chain in chains]
    is_sum = [node.target is aten.sum.dim_IntList for node in last]
    indices = [graph.tag_of(node).slice for node in last]
    if len({_signature(chain) for chain in chains}) > 1 or None in indices:
        return False
    if sorted(i for i in indices if i is not None) != list(range(len(chains))):
        return False
    if not any(is_sum):
        return True
    how = {repr(node.args[1:]) + repr(node.kwargs) for node in last}
    dims: Sequence[int] = graph.args_of(last[0])[1]
    return all(is_sum) and len(how) == 1 and 0 in dims


def _joined_use(chains: Sequence[Sequence[fx.Node]], root: fx.Node) -> fx.Node:
    chains = sorted(chains, key=lambda chain: graph.tag_of(chain[-1]).slice or 0)
    last = [chain[-1] for chain in chains]
    joined: dict[Any, fx.Node] = {}
    if last[0].target is aten.mm.default:
        left = _joined([graph.args_of(p)[0] for p in last], 1, root, joined)
        right = _joined([graph.args_of(p)[1] for p in last], 0, root, joined)
        value = _call(root, aten.mm.default, (left, right))
    else:
        rows = _joined([graph.args_of(p)[0] for p in last], 0, root, joined)
        value = _call(root, aten.sum.dim_IntList, (rows, *last[0].args[1:]), last[0].kwargs)
    for node in reversed(chains[0][:-1]):
        value = _call(root, node.target, (value, *node.args[1:]), node.kwargs)
    return value


def _is_transpose(node: fx.Node) -> bool:
    if node.target is aten.permute.default:
        return list(graph.args_of(node)[1]) == [1, 0]
    if node.target is aten.transpose.int:
        return sorted(d % 2 for d in graph.args_of(node)[1:3]) == [0, 1]
    return node.target is aten.t.default


def _call(like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
    """A new call like `like`, of no slice."""
    node = graph.call_like(like, target, args, kwargs)
    graph.set_tag(node, graph.Tag())
    return node
