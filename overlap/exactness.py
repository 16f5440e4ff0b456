"""What keeps a node from giving each row the very bits that it has in the program as written.

    obstacle        of a node that runs once per slice: why not, None where nothing is in the way
    summed          the operands whose gradients become sums over slices
    differentiable  the values that carry a gradient
    mixing          of a graph after autograd: nodes that still add up what several slices computed

Three things do: a sum over rows of several slices, a kernel that rounds a row otherwise where
others are beside it, and random numbers. Moving data, arithmetic that IEEE rounds correctly, and
integers are exact; any other kernel needs the certificate (`overlap.certificate`), forward and
backward. What is not known is an obstacle.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

import sympy
import torch
from torch import fx

from overlap import graph
from overlap import placement as pl
from overlap.certificate import COMMAND, Certificate
from overlap.placement import Decision, Op, Refusal, Split

aten = torch.ops.aten

_MOVES = (
    aten.alias, aten.detach, aten.clone, aten.contiguous, aten.lift_fresh_copy, aten.to,
    aten._to_copy, aten.type_as, aten.view, aten.reshape, aten._unsafe_view, aten.unflatten,
    aten.flatten, aten.view_as, aten.reshape_as, aten.view_as_real, aten.view_as_complex,
    aten.transpose, aten.t, aten.permute, aten.swapaxes, aten.swapdims, aten.movedim, aten.moveaxis,
    aten.mT, aten.numpy_T, aten.unsqueeze, aten.squeeze, aten.select, aten.slice, aten.narrow,
    aten.tril, aten.triu, aten.pad, aten.constant_pad_nd, aten.unbind, aten.split,
    aten.split_with_sizes, aten.chunk, aten.tensor_split, aten.unsafe_split, aten.unsafe_chunk,
    aten.unsafe_split_with_sizes, aten.cat, aten.concat, aten.stack, aten.flip, aten.roll,
    aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like, aten.fill, aten.zero,
    aten.new_zeros, aten.new_ones, aten.new_empty, aten.new_full, aten.zeros, aten.ones,
    aten.empty, aten.full, aten.arange, aten.topk, aten.sort, aten.argsort, aten.argmax,
    aten.argmin, aten.one_hot, aten.dropout, torch.ops._c10d_functional.all_to_all_single,
    torch.ops._c10d_functional.wait_tensor,
)  # fmt: skip
"""Every element is some element of an operand; in the backward, none is added to another. Dropout
is one of them where it draws nothing."""
_PERMUTATIONS = (
    aten.index, aten.index_select, aten.index_put, aten.index_copy, aten.scatter,
)  # fmt: skip
"""Moves where the rows are proven to be permuted, as those of an island are."""
_ARITHMETIC = (
    aten.abs, aten.neg, aten.relu, aten.square, aten.sign, aten.floor, aten.ceil, aten.round,
    aten.trunc, aten.isnan, aten.isinf, aten.isfinite, aten.logical_not, aten.bitwise_not,
    aten.relu6, aten.hardtanh, aten.maximum, aten.minimum, aten.ne, aten.eq, aten.lt, aten.le,
    aten.gt, aten.ge, aten.logical_and, aten.logical_or, aten.logical_xor, aten.clamp,
    aten.clamp_min, aten.clamp_max, aten.masked_fill, aten.add, aten.sub, aten.mul, aten.div,
    aten.rsub, aten.where, aten.expand, aten.broadcast_to, aten.expand_as, aten.pow, aten.sqrt,
    aten.positive,
)  # fmt: skip
"""Element by element, each result correctly rounded; where an operand is broadcast, its gradient is
a sum."""
_ROWS = {
    aten.softmax: "softmax", aten._softmax: "softmax", aten.log_softmax: "log_softmax",
    aten._log_softmax: "log_softmax", aten.logsumexp: "logsumexp", aten.rms_norm: "rms_norm",
    aten.layer_norm: "layer_norm", aten.sum: "sum", aten.mean: "mean", aten.cumsum: "cumsum",
    aten.cross_entropy_loss: "cross_entropy",
}  # fmt: skip
_PRODUCTS = (aten.linear, aten.matmul, aten.mm, aten.addmm)
_SEPARABLE = (*_PRODUCTS, aten.rms_norm, aten.mul, aten.add)
"""Their gradients of whole operands are nodes of their own in the backward, which can be computed
on joined rows (`overlap.passes.merge_wgrad`)."""
_POWERS = (1, 2, 3)
_ALIGNED_BYTES = 16
"""Products of MKL depend on where their rows begin, modulo this."""


def differentiable(graph_: fx.Graph) -> set[fx.Node]:
    """The values of a forward graph through which a gradient flows."""
    found: set[fx.Node] = set()
    is_enabled = True
    for node in graph_.nodes:
        if node.target is torch._C._set_grad_enabled:
            is_enabled = bool(node.args[0])
        if node.op == "placeholder":
            carries = graph.requires_gradient(node)
        else:
            carries = (
                is_enabled
                and not graph.is_call(node, aten.detach)
                and not found.isdisjoint(node.all_input_nodes)
                and any(_is_real(t) for t in graph.tensors_of(graph.fake_value(node)))
            )
        if carries:
            found.add(node)
    return found


def summed(op: Op, decision: Decision, graded: Container[fx.Node]) -> tuple[fx.Node, ...]:
    """The whole operands whose gradient is a sum over slices: each slice reads all of them."""
    if decision.once or decision.first_slice or decision.drop:
        return ()
    if not pl.is_sliced(decision.placement):
        return ()
    return tuple(
        node
        for node in op.operands
        if node in graded and node not in decision.narrow and not pl.is_sliced(op.place(node))
    )


def obstacle(
    op: Op, decision: Decision, certificate: Certificate, graded: Container[fx.Node]
) -> Refusal | None:
    """Why a slice of consecutive rows gives rows other bits, or a weight another gradient."""
    if decision.once or decision.first_slice or decision.drop:
        return None
    if not pl.is_sliced(decision.placement):
        return None
    try:
        _check_rows(op, decision, graded)
        _check_sums(op, decision)
        check_kernel(op, decision, certificate, graded)
    except Refusal as refusal:
        return refusal
    return None


def _check_rows(op: Op, decision: Decision, graded: Container[fx.Node]) -> None:
    match decision.placement:
        case Split(_, pl.Received()):
            raise op.refuse(
                "brings an expert the rows of one slice after those of another, and its weight "
                "gradients are sums in that order (numerics='exact')",
                "use axis='expert', which leaves every expert's rows together",
            )
        case Split(_, pl.Picked()) if op.node in graded:
            raise op.refuse("picks rows slice by slice (numerics='exact')")
        case _:
            return


def _check_sums(op: Op, decision: Decision) -> None:
    if decision.reassociates:
        raise op.refuse("adds up the rows of each slice first (numerics='exact')")
    if not decision.summed:
        return
    names = ", ".join(node.name for node in decision.summed)
    is_in_order = isinstance(decision.placement, Split) and decision.placement.dim == 0
    if op.packet not in _SEPARABLE or not is_in_order:
        raise op.refuse(
            f"leaves a gradient of {names} per slice, which cannot be had from joined rows "
            "(numerics='exact')"
        )
    if op.packet in _PRODUCTS and not _is_rows_times_matrix(op):
        raise op.refuse(f"multiplies by {names} in another form than rows times a matrix")


def check_kernel(
    op: Op, decision: Decision, certificate: Certificate, graded: Container[fx.Node]
) -> None:
    """Raise Refusal where a row may get other bits beside other rows."""
    node = op.node
    if graph.draws_random_numbers(node):
        raise op.refuse(
            "draws random numbers for the rows of a slice, other ones than as written "
            "(numerics='exact')"
        )
    values = [graph.fake_value(n) for n in (node, *op.operands)]
    if not any(_is_real(t) for value in values for t in graph.tensors_of(value)):
        return
    packet = op.packet
    if not isinstance(node.target, torch._ops.OpOverload):
        return  # sizes, and items of a tuple
    if packet in _MOVES or _is_permutation(op, decision) or packet is aten.embedding:
        return
    if packet in _ARITHMETIC:
        _check_arithmetic(op, decision, certificate, graded)
    elif not _is_leading(decision, op):
        raise op.refuse("works on rows that do not lie one after the other (numerics='exact')")
    elif packet in _PRODUCTS and _is_rows_times_matrix(op):
        _check_product(op, certificate, graded)
    elif packet is aten.scaled_dot_product_attention:
        _check_attention(op, certificate)
    elif packet in _ROWS:
        _check_row(op, _ROWS[packet], certificate)
    elif not _is_certified_function(op, decision, certificate):
        raise _not_certified(op, _function(op), certificate)


def _is_leading(decision: Decision, op: Op) -> bool:
    """Whether a slice's rows are one piece of memory of the whole's."""
    match decision.placement:
        case Split(dim):
            return all(size == 1 for size in op.shape[:dim])
        case _:
            return False


def _is_permutation(op: Op, decision: Decision) -> bool:
    in_order = (pl.Received, pl.Sorted, pl.Length)
    match decision.placement:
        case Split(0, rows):
            return op.packet in _PERMUTATIONS and isinstance(rows, in_order)
        case _:
            return False


def _check_arithmetic(
    op: Op, decision: Decision, certificate: Certificate, graded: Container[fx.Node]
) -> None:
    if op.get("alpha", 1) != 1:
        raise op.refuse("multiplies and adds in one, which is not rounded alike by every path")
    if op.packet is aten.pow and op["exponent"] not in _POWERS:
        raise op.refuse(f"is not rounded alike by every path, for the power {op['exponent']}")
    for operand in op.operands:
        if operand in graded and operand not in decision.summed:
            _check_broadcast(op, operand, certificate)


def _check_broadcast(op: Op, operand: fx.Node, certificate: Certificate) -> None:
    """The gradient of a sliced operand that is broadcast is a sum along the dims that it lacks."""
    shape, own = op.shape, pl.shape_of(operand)
    own = (sympy.Integer(1),) * (len(shape) - len(own)) + tuple(own)
    lacks = [dim for dim, size in enumerate(own) if not pl.same(size, shape[dim])]
    if not lacks:
        return
    dtype = graph.fake_value(operand).dtype
    length = shape[-1]
    if lacks != [len(shape) - 1] or not length.is_Integer:
        raise op.refuse(f"broadcasts {operand.name} along dims {lacks}, whose sum is not certified")
    if not certificate.has_rows(dtype, "sum", int(length)):
        raise _not_certified(op, f"sum of {length} elements", certificate)


def _rows_of(op: Op) -> tuple[fx.Node, fx.Node]:
    """The two factors of a product: rows and matrix."""
    first = next(name for name in ("input", "mat1", "self") if name in op.arguments)
    if op.packet is aten.addmm:
        first = "mat1"
    second = next(name for name in ("weight", "mat2", "other") if name in op.arguments)
    return op[first], op[second]


def _is_rows_times_matrix(op: Op) -> bool:
    rows, matrix = _rows_of(op)
    return (
        isinstance(op.place(rows), Split)
        and not pl.is_sliced(op.place(matrix))
        and len(pl.shape_of(matrix)) == 2
        and len(pl.shape_of(rows)) >= 2
        and is_contiguous(rows)
    )


def _check_product(op: Op, certificate: Certificate, graded: Container[fx.Node]) -> None:
    for inner, columns in _products_of(op, graded):
        if certificate.least_rows(op.dtype, inner, columns) is None:
            raise _not_certified(op, f"product of {inner} by {columns}", certificate)


def _products_of(op: Op, graded: Container[fx.Node]) -> list[tuple[int, int]]:
    """(K, N) of the product, and of the gradient of its rows."""
    rows, _ = _rows_of(op)
    inner, columns = pl.shape_of(rows)[-1], op.shape[-1]
    if not (inner.is_Integer and columns.is_Integer):
        raise op.refuse("multiplies by a matrix of unknown size")
    forward, backward = (int(inner), int(columns)), (int(columns), int(inner))
    return [forward, backward] if rows in graded else [forward]


def least_rows(op: Op, certificate: Certificate, graded: Container[fx.Node]) -> int:
    """How many rows a slice must have, if any, for a node that `obstacle` let pass."""
    if op.packet not in _PRODUCTS:
        return 1
    found = (certificate.least_rows(op.dtype, *sizes) for sizes in _products_of(op, graded))
    return max(least or 1 for least in found)


def _check_attention(op: Op, certificate: Certificate) -> None:
    channels, values = pl.shape_of(op["query"])[-1], op.shape[-1]
    is_known = channels.is_Integer and values.is_Integer
    if not is_known or op["attn_mask"] is not None or op["enable_gqa"]:
        raise op.refuse("is certified for causal and full attention only")
    if not certificate.has_attention(op.dtype, int(channels), int(values)):
        raise _not_certified(op, f"attention of {channels} and {values} channels", certificate)


def _check_row(op: Op, function: str, certificate: Certificate) -> None:
    source = op[next(name for name in ("input", "self") if name in op.arguments)]
    shape = pl.shape_of(source)
    length = shape[-1]
    if not _is_along_last(op, len(shape)) or not length.is_Integer or not is_contiguous(source):
        raise op.refuse("reads something else than the last dim of contiguous rows")
    if op.packet is aten.cross_entropy_loss:
        is_plain = op["weight"] is None and op["label_smoothing"] == 0
        if len(shape) != 2 or not is_plain:
            raise op.refuse("is certified for rows of logits without weights or smoothing only")
    if not certificate.has_rows(graph.fake_value(source).dtype, function, int(length)):
        raise _not_certified(op, f"{function} of {length} elements", certificate)


def _is_along_last(op: Op, num_dims: int) -> bool:
    if "normalized_shape" in op.arguments:
        return len(op["normalized_shape"]) == 1
    if op.packet is aten.cross_entropy_loss:
        return True
    dims = op.get("dim")
    listed = [dims] if isinstance(dims, int) else list(dims or ())
    return [dim % num_dims for dim in listed] == [num_dims - 1]


def _function(op: Op) -> str:
    name = op.name.removeprefix("aten.")
    return "gelu_tanh" if op.get("approximate") == "tanh" else name


def _is_certified_function(op: Op, decision: Decision, certificate: Certificate) -> bool:
    """A function of one value; rows that are a multiple of a vector begin and end with one."""
    if len(op.operands) != 1 or not isinstance(decision.placement, Split):
        return False
    multiple = certificate.multiple_of(op.dtype, _function(op))
    if multiple is None or multiple == 1:
        return multiple == 1
    per_row = pl.product(op.shape[1:])
    is_whole_vectors = pl.quotient(per_row, sympy.Integer(multiple)) is not None
    return decision.placement.dim == 0 and is_whole_vectors and is_contiguous(op.operands[0])


def _not_certified(op: Op, what: str, certificate: Certificate) -> Refusal:
    dtype = str(graph.fake_value(op.operands[0]).dtype).removeprefix("torch.")
    advice = (
        f"make the certificate with {COMMAND}"
        if certificate.is_empty
        else "rows a multiple of 64 wide, or MKL_CBWR=AVX512,STRICT in the environment and then "
        f"{COMMAND}, may help; axis='expert' needs less"
    )
    return op.refuse(
        f"may round a row otherwise in a slice: {what} in {dtype} is not certified "
        "(numerics='exact')",
        advice,
    )


def is_aligned(op: Op) -> bool:
    """Whether rows of a product begin where they do in the program as written, as far as products
    depend on it: all of them are a multiple of 16 bytes."""
    if op.packet not in (*_PRODUCTS, aten._grouped_mm, aten.bmm, aten.einsum):
        return True
    tensors = [graph.fake_value(n) for n in (op.node, *op.operands)]
    floats = [t for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()]
    widths = [(pl.expression(t.shape[-1]), t.element_size()) for t in floats if t.dim()]
    return all(w.is_Integer and int(w) * size % _ALIGNED_BYTES == 0 for w, size in widths)


def is_contiguous(node: fx.Node) -> bool:
    """Whether a value lies in memory row by row, without a guard."""
    value = graph.fake_value(node)
    if not isinstance(value, torch.Tensor):
        return True
    expected = sympy.Integer(1)
    for size, stride in reversed(list(zip(value.shape, value.stride(), strict=True))):
        extent = pl.expression(size)
        if extent != 1 and not pl.same(pl.expression(stride), expected):
            return False
        expected = expected * extent
    return True


def num_uses(node: fx.Node) -> int:
    """How often a value is read; an operand that is read twice by one node counts twice."""
    reads: list[fx.Node] = []
    for user in node.users:
        fx.map_arg((user.args, user.kwargs), reads.append)
    return reads.count(node)


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


# --- after autograd -------------------------------------------------------------------------------


def mixing(graph_: fx.Graph) -> Iterator[fx.Node]:
    """Nodes that compute one number from numbers of several slices, which joins do not; results
    that hold one slice's alone; and values that lie in memory otherwise than un-sliced, or than
    what was certified, since kernels may round by that."""
    belongs: dict[fx.Node, frozenset[int]] = {}
    for node in graph_.nodes:
        tag = graph.tag_of(node).slice
        found = frozenset[int]().union(*(belongs[n] for n in node.all_input_nodes))
        if len(found) > 1 and graph.is_call(node, aten.cat):
            if not all(map(is_contiguous, filter(holds_reals, node.all_input_nodes))):
                yield node
            found = frozenset()
        elif not found and tag is not None:
            found = frozenset((tag,))
        if node.op == "output":
            yield from (n for n in node.all_input_nodes if belongs[n])
        if not holds_reals(node):
            found = frozenset()
        if len(found) > 1 or (found and not _has_certified_layout(node)):
            yield node
        belongs[node] = found if len(found) == 1 else frozenset()


_MOVING_BACKWARDS = (aten.select_backward, aten.slice_backward)


def _has_certified_layout(node: fx.Node) -> bool:
    """Kernels of a backward are certified for rows that lie one after the other."""
    name = pl.operator_name(node)
    if "backward" not in name or "attention" in name or graph.is_call(node, *_MOVING_BACKWARDS):
        return True
    return all(map(is_contiguous, filter(holds_reals, node.all_input_nodes)))


def holds_reals(node: fx.Node) -> bool:
    return any(map(_is_real, graph.tensors_of(graph.fake_value(node))))


def parameter_name(node: fx.Node) -> str:
    """What users call a whole value: the parameter that it is, or is made of alone."""
    while node.op != "placeholder" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return graph.state_path(node) or node.name


def names_of(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """Of every parameter once, in order."""
    return tuple(dict.fromkeys(map(parameter_name, nodes)))
