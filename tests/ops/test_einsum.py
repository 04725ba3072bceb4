from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from svexport.ops._einsum.kernels import few_rows, kernel_products
from svexport.ops._einsum.labels import parse, split
from svexport.ops._einsum.plan import MatMul, Mul, ReduceSum, Reshape, plan
from svexport.ops._einsum.program import bind, run
from svexport.ops.einsum import OP, Einsum, _gradients, _Products, einsum
from tests.support import OPSETS, op_model, run_op

SEED_EQUATIONS = {  # at the shapes of their networks: (equation, shapes, data transposes allowed)
    "channels": ("nctw,cd->ndtw", ((64, 64, 300, 25), (64, 128)), 1),
    "graph": ("nkctv,kvw->nctw", ((64, 3, 64, 300, 25), (3, 25, 25)), 1),
    "graph-per-channel": ("nkctv,kcvw->nctw", ((64, 3, 64, 300, 25), (3, 64, 25, 25)), 1),
    "attention": ("bhnm,bdhm->bdhn", ((2, 8, 512, 512), (2, 32, 8, 512)), 2),
}

quiet = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@st.composite
def problems(draw: Callable[..., Any], broadcast: bool = True, smallest: int = 0) -> tuple[str, list[tuple[int, ...]]]:
    """A valid equation and shapes: ellipsis, diagonals, traces, outer products, broadcasting, implicit outputs."""
    sizes = dict(zip("ijkBaZ", draw(st.permutations([smallest, 1, 2, 3, 4, 5])), strict=True))
    if draw(st.integers(0, 3)):  # mostly without empty dimensions, whose results are all alike
        sizes = {name: max(size, 1) for name, size in sizes.items()}
    hidden = draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2))  # under the ellipsis
    terms, shapes = [], []
    for _ in range(draw(st.integers(1, 4))):
        names = draw(st.lists(st.sampled_from("ijkBaZ"), max_size=4))
        ones = {name for name in names if broadcast and draw(st.integers(0, 7)) == 0}
        dims = [(name, (1 if name in ones else sizes[name],)) for name in names]
        if hidden and draw(st.booleans()):
            covered = hidden[draw(st.integers(0, len(hidden))) :]
            covered = [1 if broadcast and draw(st.integers(0, 5)) == 0 else size for size in covered]
            dims.insert(draw(st.integers(0, len(dims))), ("...", tuple(covered)))
        terms.append("".join(name for name, _ in dims))
        shapes.append(tuple(size for _, part in dims for size in part))
    equation = (", " if draw(st.booleans()) else ",").join(terms)
    if draw(st.booleans()):
        names = sorted(set("".join(terms)) - set(", ."))
        output = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
        if draw(st.booleans()):
            output.insert(draw(st.integers(0, len(output))), "...")
        equation += "->" + "".join(output)
    return equation, shapes


def make(shapes: Any, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [torch.randint(0, 2 if dtype == torch.bool else 5, shape, generator=generator).to(dtype) for shape in shapes]


def canonical(equation: str, shapes: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return parse(equation, tuple(map(len, shapes)))


def rebatched(shapes: tuple[tuple[int, ...], ...], batch: int | None) -> tuple[tuple[int | None, ...], ...]:
    """Shapes of one of the seed equations with another size of its first label."""
    old = shapes[0][0]
    return tuple((batch, *shape[1:]) if len(shape) > 2 and shape[0] == old else shape for shape in shapes)


def outcome(function: Callable[..., Tensor], *args: Any) -> Tensor | type[Exception]:
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001 - whatever it is, both have to raise it
        return type(error)


# ------------------------------------------------------------------ equal to torch.einsum


@settings(quiet, max_examples=2000)
@given(problems())
def test_equals_torch_in_values_and_gradients(problem: tuple[str, list[tuple[int, ...]]]) -> None:
    equation, shapes = problem
    ours, theirs = ([x.requires_grad_() for x in make(shapes)] for _ in range(2))
    actual, expected = einsum(equation, *ours), torch.einsum(equation, *theirs)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    weights = make([expected.shape], seed=1)[0]
    actual_grads = torch.autograd.grad(actual, ours, weights, materialize_grads=True)
    expected_grads = torch.autograd.grad(expected, theirs, weights, materialize_grads=True)
    torch.testing.assert_close(actual_grads, expected_grads, rtol=1e-10, atol=1e-10)


@settings(quiet, max_examples=1000)
@given(
    st.text(alphabet="iijjkB.,->  1", max_size=9)
    | st.from_regex(r"i?j?(\.\.\.)?k?,?j?k?(\.\.\.)?(->i?k?i?(\.\.\.)?)?", fullmatch=True),
    st.lists(st.lists(st.sampled_from([1, 2, 3]), max_size=3), min_size=1, max_size=2),
)
def test_accepts_and_refuses_what_torch_does(equation: str, shapes: list[list[int]]) -> None:
    operands = make(shapes)
    actual, expected = outcome(einsum, equation, *operands), outcome(torch.einsum, equation, *operands)
    torch.testing.assert_close(actual, expected) if isinstance(expected, Tensor) else None
    assert type(actual) is type(expected)
    assert isinstance(expected, Tensor) or actual is expected


X, Y = make([(2, 3), (3, 4)])


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (("ij,jk", X), r"one operand for each of the 2 .* got 1"),
        (("ij", X, Y), r"one operand for each of the 1 .* got 2"),
        (("i1", X), r"\[a-zA-Z\].* operand 0 of 'i1', got '1'"),
        (("é", X), r"got 'é'"),
        (("..j", X), r"operand 0 of '..j', got '.'"),
        (("...j...", X), r"at most one ellipsis"),
        (("ij->...i...", X), r"at most one ellipsis .* the output"),
        (("ij->i->j", X), r"for the output .* got '-'"),
        (("ij>j", X), r"got '>'"),
        (("ij->i,j", X), r"got ','"),
        (("i", X), r"operand 0 of 'i' to have 1 dimensions.* got 2"),
        (("ijk", X), r"to have 3 dimensions.* got 2"),
        (("ijk...", X), r"to have at least 3 dimensions.* got 2"),
        (("ij->k", X), r"'k' appears in no operand"),
        (("ij->ii", X), r"'i' appears 2 times there"),
        (("ii", X), r"operand 0 .*diagonal.* got 2 and 3"),
        (("ii", X[:1]), r"got 1 and 3"),
        (("ij,jk->ik", X, Y.T), r"got 3 in dimension 1 of operand 0 .* 4 in dimension 0 of operand 1"),
        (("...,...", X[0], Y[0]), r"got 3 in .* 4 in dimension 0 of operand 1"),
        (("ij",), r"at least one operand"),
        (("ij", []), r"at least one operand"),
        ((X,), r"at least one operand"),
        ((X, [0, 52]), r"range \[0, 52\), got 52"),
        ((X, [0, -1]), r"range \[0, 52\), got -1"),
        ((3, X), r"expected a string and tensors.* got int, Tensor"),
        ((None, X), r"got NoneType, Tensor"),
        (("ij", 3), r"got str, int"),
        (("ij", [X], X), r"got str, list, Tensor"),
        ((X, ["a"]), None),
        ((X, 0), None),
    ],
)
def test_errors_are_those_of_torch_and_say_what_to_do(args: tuple, match: str | None) -> None:
    expected = outcome(torch.einsum, *args)
    assert isinstance(expected, type)
    with pytest.raises(expected, match=match):
        einsum(*args)


@pytest.mark.parametrize(
    "args",
    [
        (X, [0, 1], Y, [1, 2], [0, 2]),
        (X, [0, 1], Y, [1, 2]),
        (X, [27, 1], Y, [1, 0]),  # implicit output: upper case first
        (X, [..., 0], [0, ...]),
        (X, (0, True), ()),
        ("ij,jk", [X, Y]),
        ("ij,jk", (X, Y)),
        (" i j , j k -> k i ", X, Y),
        ("bA", X),
        ("i->i ...", X[0]),
    ],
)
def test_call_forms(args: tuple) -> None:
    torch.testing.assert_close(einsum(*args), torch.einsum(*args))


@pytest.mark.parametrize(
    "dtype",
    [torch.int32, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float16, torch.bfloat16],
    ids=str,
)
@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij->i", [(2, 3)]),
        ("ij->i", [(2, 1)]),
        ("ij->ji", [(2, 3)]),
        ("ii->i", [(3, 3)]),
        ("ii", [(3, 3)]),
        ("i,i", [(3,), (3,)]),
        ("ij,jk->ik", [(2, 3), (3, 4)]),
        ("ij,jk->ik", [(2, 1), (1, 4)]),
        ("ij,ij->ij", [(2, 3), (2, 3)]),
        ("ijx,ij->ij", [(2, 3, 2), (2, 3)]),
        ("ijx,jk->ik", [(2, 3, 2), (3, 4)]),
        ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 2)]),
        ("nkctv,kvw->nctw", [(2, 3, 4, 5, 7), (3, 7, 7)]),
        ("nkctv,kcvw->nctw", [(2, 3, 4, 5, 7), (3, 4, 7, 7)]),
    ],
)
def test_data_types(equation: str, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    operands = make(shapes, dtype)
    actual, expected = outcome(einsum, equation, *operands), outcome(torch.einsum, equation, *operands)
    if isinstance(expected, type):
        assert actual is expected
        return
    assert isinstance(actual, Tensor)
    assert actual.dtype == expected.dtype
    if dtype.is_floating_point:  # the sum may be rounded on its way: to a few units in the last place of its terms
        exact = torch.einsum(equation, *[x.double() for x in operands])
        magnitude = torch.einsum(equation, *[x.double().abs() for x in operands])
        assert ((actual.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * magnitude).all()
    else:
        torch.testing.assert_close(actual, expected)


def test_mixed_data_types_promote_only_where_torch_promotes() -> None:
    x, y = X.float(), X
    assert einsum("ij,ij->ij", x, y).dtype == torch.float64
    with pytest.raises(RuntimeError, match="expected scalar type Float but found Double"):
        einsum("ij,ij->i", x, y)


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("name", SEED_EQUATIONS)
def test_seed_equations_at_their_sizes(name: str, batch: int) -> None:
    equation, shapes, _ = SEED_EQUATIONS[name]
    operands = make(rebatched(shapes, batch), torch.float32)
    expected = torch.einsum(equation, *[x.double() for x in operands]).float()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):  # one thread works in parts
            torch.set_num_threads(threads)
            torch.testing.assert_close(einsum(equation, *operands), expected, rtol=1e-5, atol=1e-4)
    finally:
        torch.set_num_threads(before)
    training = einsum(equation, *[x.requires_grad_() for x in operands])  # planned differently
    torch.testing.assert_close(training, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", SEED_EQUATIONS)
def test_operands_that_are_not_contiguous(name: str) -> None:
    equation, shapes, _ = SEED_EQUATIONS[name]
    small = [tuple(min(size, 5) for size in shape) for shape in shapes]
    operands = [x.mT[..., ::2, :] for x in make([(*s[:-2], s[-1], 2 * s[-2]) for s in small])]
    assert not any(x.is_contiguous() for x in operands)
    torch.testing.assert_close(einsum(equation, *operands), torch.einsum(equation, *operands))
    expanded = [torch.ones((), dtype=torch.float64).expand(shape) for shape in small]
    torch.testing.assert_close(einsum(equation, *expanded), torch.einsum(equation, *expanded))


GRADCHECKED = [
    ("nctw,cd->ndtw", [(2, 3, 2, 2), (3, 4)]),
    ("nkctv,kvw->nctw", [(2, 3, 2, 2, 3), (3, 3, 2)]),
    ("nkctv,kcvw->nctw", [(2, 2, 2, 2, 3), (2, 2, 3, 2)]),
    ("bhnm,bdhm->bdhn", [(2, 2, 3, 2), (2, 3, 2, 2)]),
    ("iji,jk,...k->...j", [(2, 3, 2), (3, 2), (2, 1, 2)]),
]


@pytest.mark.parametrize(("equation", "shapes"), GRADCHECKED)
def test_gradcheck(equation: str, shapes: list[tuple[int, ...]]) -> None:
    operands = [x.requires_grad_() for x in make(shapes)]
    assert torch.autograd.gradcheck(lambda *xs: einsum(equation, *xs), operands)
    assert torch.autograd.gradgradcheck(lambda *xs: einsum(equation, *xs), operands)
    labels, ranks = canonical(equation, shapes)
    assert torch.autograd.gradcheck(lambda *xs: OP(list(xs), labels, ranks), operands)


def test_autocast() -> None:
    for equation, shapes in (
        ("nkctv,kvw->nctw", [(2, 3, 4, 5, 7), (3, 7, 7)]),
        ("nkctv,kcvw->nctw", [(2, 3, 4, 5, 7), (3, 4, 7, 7)]),
    ):
        operands = make(shapes, torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual, expected = einsum(equation, *operands), torch.einsum(equation, *operands)
        assert actual.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.1)


def test_autocast_of_a_compiled_function() -> None:
    compiled = torch.compile(einsum, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for equation, shapes in (("nkctv,kvw->nctw", [(2, 3, 4, 5, 7), (3, 7, 7)]), ("i,j->ij", [(3,), (4,)])):
            operands = make(shapes, torch.float32)
            actual, expected = compiled(equation, *operands), torch.einsum(equation, *operands)
            assert actual.dtype == expected.dtype
            torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.1)
        assert compiled("ij,jk", X, Y).dtype == torch.float64


def test_vmap_and_forward_mode() -> None:
    x, y, tangent = make([(4, 2, 3, 5, 2, 3), (3, 3, 2), (2, 3, 5, 2, 3)])
    function = lambda x: einsum("nkctv,kvw->nctw", x, y)  # noqa: E731
    torch.testing.assert_close(torch.vmap(function)(x), torch.stack([function(item) for item in x]))
    _, actual = torch.func.jvp(function, (x[0],), (tangent,))
    torch.testing.assert_close(actual, function(tangent))  # linear in x


def test_module() -> None:
    module = Einsum("ij,jk->ik")
    torch.testing.assert_close(module(X, Y), X @ Y)
    assert not module.state_dict()
    assert "ij,jk->ik" in repr(module)


# ------------------------------------------------------------------ the plan


@pytest.mark.parametrize("batch", [None, 1, 64])
@pytest.mark.parametrize("name", SEED_EQUATIONS)
def test_few_data_transposes(name: str, batch: int | None) -> None:
    equation, shapes, allowed = SEED_EQUATIONS[name]
    chosen = plan(*canonical(equation, shapes), rebatched(shapes, batch))
    assert chosen.transposes <= allowed
    assert sum(isinstance(step, MatMul) for step in chosen.steps) == 1


@settings(quiet, max_examples=300)
@given(problems())
def test_products_are_never_expanded_to_be_summed(problem: tuple[str, list[tuple[int, ...]]]) -> None:
    equation, shapes = problem
    labels, ranks = canonical(equation, shapes)
    chosen = plan(labels, ranks, tuple(shapes))
    products = [i for i, step in enumerate(chosen.steps) if isinstance(step, MatMul | Mul)]
    assert len(products) == len(shapes) - 1
    if products:  # sums of single operands come first, the others are those of matrix products
        assert not any(isinstance(step, ReduceSum) for step in chosen.steps[products[0] :])


def test_a_sum_left_out_of_the_product_stays_small() -> None:
    # The sum over k may follow the product of matrices where that is no larger than an operand, but not in training.
    for w, training, summed in ((25, False, True), (25, True, False), (400, False, False)):
        shapes = ((8, 3, 64, 300, 25), (3, 25, w))
        steps = plan(*canonical("nkctv,kvw->nctw", shapes), shapes, training).steps
        assert [bool(step.summed) for step in steps if isinstance(step, MatMul)] == [summed]


@pytest.mark.parametrize(
    ("equation", "shapes", "expected"),
    [
        ("nkctv,kvw->nctw", ((64, 3, 64, 300, 25), (3, 25, 25)), True),
        ("nkctv,kcvw->nctw", ((64, 3, 64, 300, 25), (3, 64, 25, 25)), True),
        ("kvw,nkctv->nctw", ((3, 25, 25), (64, 3, 64, 300, 25)), True),
        ("...kctv,kvw->...ctw", ((64, 3, 64, 300, 25), (3, 25, 25)), True),
        ("nctw,kvw->nkctv", ((64, 64, 300, 25), (3, 25, 25)), True),  # its gradients
        ("nkctv,nctw->kvw", ((64, 3, 64, 300, 25), (64, 64, 300, 25)), True),
        ("nkctv,kvw->nctw", ((2, 3, 4, 5, 7), (3, 7, 7)), False),  # small
        ("nkctv,kcvw->nctw", ((2, 3, 256, 60, 25), (3, 256, 25, 25)), False),  # few rows for each matrix
        ("nkctv,kvw->nctw", ((64, 3, 64, 300, 100), (3, 100, 100)), False),  # products of large matrices
        ("nkctv,kvw->nctw", ((64, 40, 16, 30, 25), (40, 25, 25)), False),
        ("nkctv,kvw->nctw", ((64, 3, 64, 300, 2), (3, 2, 2)), False),
        ("nctv,vw->nctw", ((64, 64, 300, 25), (25, 25)), False),  # nothing is copied
        ("nkctv,kcvw->nctw", ((2, 1, 64, 300, 25), (1, 64, 25, 25)), True),
        ("nkctv,kcvw->nctw", ((1, 1, 64, 300, 25), (1, 64, 25, 25)), False),  # nothing is copied
        ("nkctv,kvw->nwct", ((64, 3, 64, 300, 25), (3, 25, 25)), False),
        ("nkctv,kvw->ncw", ((64, 3, 64, 300, 25), (3, 25, 25)), False),
        ("nkctv,kvwx->nctw", ((64, 3, 64, 300, 25), (3, 25, 25, 2)), False),
        ("nkctv,kvw->nctw", ((0, 3, 64, 300, 25), (3, 25, 25)), False),
        ("nctw,cd->ndtw", ((64, 64, 300, 25), (64, 128)), False),
        ("bhnm,bdhm->bdhn", ((2, 8, 512, 512), (2, 32, 8, 512)), False),
        ("nkctv,kvv->nctv", ((64, 3, 64, 300, 25), (3, 25, 25)), False),
        ("nkctv->nctv", ((64, 3, 64, 300, 25),), False),
        ("ij,jk,kl->il", ((9999, 25), (25, 25), (25, 25)), False),
    ],
)
def test_what_the_cuda_kernels_are_for(equation: str, shapes: tuple[tuple[int, ...], ...], expected: bool) -> None:
    products = kernel_products(equation, *shapes, item_size=4)
    assert products == (expected,) * len(products)


@pytest.mark.parametrize(
    ("shapes", "item_size", "expected"),
    [
        (((1, 8, 20, 300, 50), (8, 50, 50)), 4, (False, True, True)),  # the forward's matrix fills the shared memory
        (((1, 8, 20, 300, 50), (8, 50, 50)), 2, (True, True, True)),
        (((16, 8, 8, 300, 42), (8, 42, 42)), 4, (True, True, True)),
        (((32, 8, 8, 300, 40), (8, 40, 64)), 4, (False, True, True)),
    ],
)
def test_what_shared_memory_holds(shapes: tuple[tuple[int, ...], ...], item_size: int, expected: tuple) -> None:
    assert kernel_products("nkctv,kvw->nctw", *shapes, item_size=item_size) == expected


@pytest.mark.parametrize(
    ("shape", "columns", "item_size", "learned", "expected"),
    [
        ((8, 64, 300, 25), 128, 4, False, (True, True, True)),
        ((8, 64, 300, 25), 128, 2, False, (True, True, True)),
        ((8, 64, 304, 25), 128, 2, True, (False, False, True)),  # rows at 16 bytes
        ((8, 64, 300, 25), 128, 0, True, (False, False, False)),
        ((8, 64, 300, 25), 300, 4, True, (True, False, True)),  # sums over 300 channels
        ((8, 300, 300, 25), 64, 4, True, (False, True, True)),
        ((2, 64, 75, 18), 128, 4, False, (False, False, True)),  # small
        ((2, 64, 75, 18), 128, 4, True, (True, True, True)),
        ((2, 64, 75, 18), 128, 2, True, (True, True, True)),
        ((1, 64, 75, 18), 128, 4, True, (False, False, True)),  # no sum over samples
        ((1, 64, 75, 18), 128, 2, True, (False, False, False)),  # nor float32
        ((2, 64, 75, 18), 256, 2, True, (False, False, True)),
        ((1, 152, 300, 25), 128, 4, False, (True, True, True)),
        ((1, 128, 300, 25), 24, 4, False, (False, True, True)),  # sums for few columns
        ((8, 224, 304, 25), 12, 2, False, (True, True, True)),  # but of few channels
        ((8, 24, 304, 25), 128, 2, False, (True, False, True)),
        ((1, 224, 304, 25), 12, 2, False, (False, False, True)),
        ((2, 256, 20, 18), 256, 4, True, (False, False, True)),
        ((2, 256, 8, 18), 256, 4, True, (False, False, False)),  # many more sums than what they are of
        ((2, 256, 20, 18), 256, 2, True, (False, False, False)),
        ((2, 256, 80, 18), 256, 2, True, (False, False, False)),  # products of two samples, rows at 16 bytes
        ((4, 256, 80, 18), 256, 2, True, (False, False, True)),
        ((1, 40, 150, 25), 288, 2, True, (True, False, True)),  # narrow
        ((1, 112, 300, 18), 146, 2, True, (False, False, False)),
        ((2, 16, 7, 18), 16, 4, True, (False, False, False)),
    ],
)
def test_what_the_cuda_kernels_that_mix_channels_are_for(
    shape: tuple[int, ...], columns: int, item_size: int, learned: bool, expected: tuple[bool, ...]
) -> None:
    equation, shapes = "nctw,cd->ndtw", (shape, (shape[1], columns))
    needs = (False, learned)
    assert kernel_products(equation, *shapes, item_size=item_size or 4, wide=item_size > 0, needs=needs) == expected


@pytest.mark.parametrize(
    ("equation", "shapes", "item_size", "expected"),
    [
        ("nkctv,kcvw->nctw", ((2, 3, 4, 75, 20), (3, 4, 20, 20)), 4, True),
        ("nkctv,kcvw->nctw", ((4, 3, 4, 75, 20), (3, 4, 20, 20)), 4, False),
        ("nkctv,kcvw->nctw", ((4, 3, 4, 75, 20), (3, 4, 20, 20)), 2, True),
        ("nkctv,kcvw->nctw", ((4, 3, 4, 300, 20), (3, 4, 20, 20)), 2, False),
        ("nctw,cd->ndtw", ((2, 4, 300, 25), (4, 6)), 2, False),
        ("kcvw,nkctv->nctw", ((3, 4, 20, 20), (2, 3, 4, 75, 20)), 4, True),
        ("nkctv->nkct", ((2, 3, 4, 75, 20),), 4, False),
    ],
)
def test_which_outputs_are_views_in_training(
    equation: str, shapes: tuple[tuple[int, ...], ...], item_size: int, expected: bool
) -> None:
    assert few_rows(equation, *shapes, item_size=item_size) == expected


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("nkctv,kvw->nctw", ((2, 3, 4, 5, 7), (3, 7, 6))),
        ("nkctv,kcvw->nctw", ((2, 3, 4, 5, 7), (3, 4, 7, 6))),
        ("...kctv,kvw->...ctw", ((2, 3, 4, 5, 7), (3, 7, 6))),
        ("cd,nctw->ndtw", ((4, 6), (2, 4, 5, 3))),
        ("nctw,ndtw->cd", ((2, 4, 5, 3), (2, 6, 5, 3))),
    ],
)
def test_gradients_that_are_einsums(equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    operands = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    apply = partial(_Products.apply, equation)
    torch.testing.assert_close(apply(*operands), torch.einsum(equation, *operands))
    assert torch.autograd.gradcheck(apply, operands)
    assert torch.autograd.gradgradcheck(apply, operands)
    for needed in operands:  # of one alone, and of a sum, whose own gradient is expanded
        (actual,) = torch.autograd.grad(apply(*operands).sum(), needed)
        (expected,) = torch.autograd.grad(torch.einsum(equation, *operands).sum(), needed)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("nctw,cd->ndtw", ((2, 4, 5, 3), (1, 6))),  # broadcast
        ("nkctv,kvv->nctv", ((2, 3, 4, 5, 7), (3, 7, 7))),  # a diagonal
        ("nctwz,cd->ndtw", ((2, 4, 5, 3, 1), (4, 6))),  # a sum of one alone
    ],
)
def test_gradients_that_are_not(equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    assert _gradients(equation, *shapes) is None


def test_an_output_that_may_be_a_view_is_not_moved() -> None:
    equation, shapes = "nkctv,kcvw->nctw", ((2, 2, 4, 300, 20), (2, 4, 20, 20))
    for view, batch in ((False, 2), (True, 1)):
        chosen = plan(*canonical(equation, shapes), shapes, True, view)
        first = next(step for step in chosen.steps if isinstance(step, Reshape))
        assert len(first.groups) - 2 == batch
        operands = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        torch.testing.assert_close(run(bind(chosen, chosen.sizes), operands), torch.einsum(equation, *operands))


def test_labels_are_canonical() -> None:
    assert parse("Zb...,...b->...Z", (4, 2)) == ((0, 1, 2, 3, 3, 1, 2, 3, 0), (4, 2, 3))
    assert parse("ba", (2,)) == parse("yx->xy", (2,)) == ((0, 1, 1, 0), (2, 2))
    assert split((0, 1, 1, 2, 0, 2), (2, 2, 2)) == [(0, 1), (1, 2), (0, 2)]


class PeakMemory(TorchDispatchMode):
    """Bytes held by the results of operators while it is active: ``peak``, beyond what was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **kwargs or {})
        for tensor in output if isinstance(output, list | tuple) else [output]:
            storage = tensor.untyped_storage()
            inputs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
            if storage.data_ptr() not in self.known | inputs:
                self.known.add(storage.data_ptr())
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.free, storage.data_ptr(), storage.nbytes())
        return output

    def free(self, pointer: int, size: int) -> None:
        self.known.discard(pointer)
        self.live -= size


@pytest.mark.parametrize("name", SEED_EQUATIONS)
def test_peak_memory(name: str) -> None:
    equation, shapes, _ = SEED_EQUATIONS[name]
    operands = make(rebatched(shapes, 4), torch.float32)
    gc.collect()
    with torch.no_grad(), PeakMemory() as memory:
        output = einsum(equation, *operands)
    held = sum(x.nbytes for x in operands)
    copy = max(x.nbytes for x in operands)
    assert memory.peak >= output.nbytes  # it did count
    assert held + memory.peak <= 1.1 * (held + output.nbytes + copy)


def test_intermediate_results_are_freed() -> None:
    operands = make([(100, 100)] * 8)
    with torch.no_grad(), PeakMemory() as memory:
        einsum("ij,ji,ij,ji,ij,ji,ij,ji->ij", *operands)
    assert memory.peak <= 5 * operands[0].nbytes  # of seven products: the first four, and one more at a time


# ------------------------------------------------------------------ the torch operator


def test_operator_never_aliases_its_operands() -> None:
    for equation in ("ij->ij", "ij->ji", "ij->"):
        output = OP([X], *canonical(equation, [X.shape]))
        assert output.untyped_storage().data_ptr() != X.untyped_storage().data_ptr()
        assert output.is_contiguous()


@pytest.mark.core
def test_compile_and_export_keep_one_operator() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return einsum("...ij,jk->...ki", x, y) * 2

    x, y = make([(2, 3, 4), (4, 5)])
    expected = torch.einsum("...ij,jk->...ki", x, y) * 2
    compiled = torch.compile(Model(), fullgraph=True, backend="aot_eager")
    leaves = [t.clone().requires_grad_() for t in (x, y)]
    actual = compiled(*leaves)
    torch.testing.assert_close(actual, expected)
    actual.sum().backward()
    (torch.einsum("...ij,jk->...ki", *(others := [t.clone().requires_grad_() for t in (x, y)])) * 2).sum().backward()
    torch.testing.assert_close([t.grad for t in leaves], [t.grad for t in others])

    batch = torch.export.Dim("batch")
    program = torch.export.export(Model(), (x, y), dynamic_shapes=({0: batch}, None))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count(OP.torch_op) == 1
    wider = torch.cat([x, x, x])
    torch.testing.assert_close(program.module()(wider, y), torch.einsum("...ij,jk->...ki", wider, y) * 2)


# ------------------------------------------------------------------ the body


def check_body(equation: str, shapes: Any, opset: int, dtype: torch.dtype, **options: Any) -> None:
    operands = make(shapes, dtype)
    labels, ranks = canonical(equation, shapes)
    args = (operands, list(labels), list(ranks))
    (actual,) = run_op(OP, args, opset, **options)
    exact = torch.einsum(equation, *[x.double() for x in operands])
    magnitude = torch.einsum(equation, *[x.double().abs() for x in operands])
    assert actual.shape == exact.shape
    assert actual.dtype == dtype
    steps = 4 + math.log2(max(magnitude.numel(), 2))
    tolerance = steps * torch.finfo(dtype).eps * magnitude + torch.finfo(dtype).tiny
    assert ((actual.double() - exact).abs() <= tolerance).all()


@settings(quiet, max_examples=300)
@given(problems(), st.sampled_from(OPSETS), st.sampled_from([torch.float32, torch.float16]), st.booleans())
def test_body_with_static_shapes(problem: Any, opset: int, dtype: torch.dtype, lowered: bool) -> None:
    check_body(*problem, opset, dtype, lowered=lowered)


@pytest.mark.core
@settings(quiet, max_examples=200)
@given(problems(broadcast=False, smallest=1), st.sampled_from(OPSETS))
def test_body_with_dynamic_shapes(problem: Any, opset: int) -> None:
    check_body(*problem, opset, torch.float32, dynamic=True)


@pytest.mark.parametrize("opset", [11, 17, 18, 23])
@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bnij,bqj->bnqi", [(2, 3, 4, 0), (2, 6, 0)]),
        ("bnij,bqj->bnqi", [(2, 3, 0, 5), (2, 6, 5)]),
        ("bnij,bqj->bnqi", [(0, 3, 4, 5), (0, 6, 5)]),
        ("bij,bjk->bik", [(7, 4, 0), (7, 0, 5)]),
        ("...ij,...j->...i", [(7, 4, 0), (7, 0)]),
        ("bij,bij->", [(2, 3, 0), (2, 3, 0)]),
        ("bij,bjk,bkl->bil", [(3, 4, 5), (3, 5, 0), (3, 0, 2)]),
        ("bij,bjk,bkl->bil", [(3, 4, 5), (3, 5, 6), (3, 6, 0)]),
    ],
)
def test_sums_over_nothing_are_zero(equation: str, shapes: list[tuple[int, ...]], opset: int) -> None:
    """And not what was in memory before, a few times over. Dynamic sizes of 0 need a Reshape that knows them."""
    check_body(equation, shapes, opset, torch.float32)
    if opset >= 14:
        for _ in range(3):
            check_body(equation, shapes, opset, torch.float32, dynamic=True)
            check_body(equation, shapes, opset, torch.float16, dynamic=True)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", SEED_EQUATIONS)
def test_body_has_matrix_products_only(name: str, opset: int) -> None:
    equation, shapes, allowed = SEED_EQUATIONS[name]
    small = [tuple(min(size, 5) for size in shape) for shape in shapes]
    labels, ranks = canonical(equation, small)
    model = op_model(OP, (make(small, torch.float32), list(labels), list(ranks)), opset)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("MatMul") == 1
    assert kinds.count("Transpose") <= allowed
    assert set(kinds) <= {"MatMul", "Transpose", "Reshape", "ReduceSum"}


def test_body_of_integers_and_booleans() -> None:
    x, y = make([(3, 4), (4, 3)], torch.int32)
    for equation, operands in (("ij->i", [x]), ("ij,jk->ik", [x, y]), ("ij->ji", [x])):
        args = (operands, *canonical(equation, [t.shape for t in operands]))
        torch.testing.assert_close(run_op(OP, args, 13)[0], torch.einsum(equation, *operands))
    x, y = make([(3, 4), (4,)], torch.bool)
    torch.testing.assert_close(run_op(OP, ([x, y], *canonical("ij,j->ji", [x.shape, y.shape])), 13)[0], (x & y).T)
