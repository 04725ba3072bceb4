"""Models that take values or sizes into Python in ways that no table of functions lists: no file is wrong."""

from __future__ import annotations

import bisect
import collections
import ctypes
import fractions
import hashlib
import heapq
import itertools
import json
import math
import operator
import pickle
import random
import statistics
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport


def sort_rows(x):
    o = sorted(range(3), key=lambda i: x[i].sum().item())
    return torch.stack([x[i] for i in o])


def try_key(x):
    try:
        return x * {4: 2.0, 13: 4.0}[int(x.sum())]
    except KeyError:
        return x * 3


def try_zero(x):
    try:
        return x * (1 // int(x[0, 0] * 3))
    except ZeroDivisionError:
        return x * 3


def try_assert(x):
    try:
        assert x.mean() > 0.55
        return x * 2
    except AssertionError:
        return x * 3


def whilen(x):
    while x.norm() > 1:
        x = x / 2
    return x


def brk(x):
    y = torch.zeros(8)
    for r in x:
        if r.mean() > 0.6:
            break
        y = y + r
    return y


def bisection(x):
    lo, hi = (0.0, 10.0)
    for _ in range(6):
        mid = (lo + hi) / 2
        if x.mean() > mid:
            lo = mid
        else:
            hi = mid
    return x + lo


def matched(x):
    match int(x.sum()) % 5:
        case 0:
            return x
        case 1 | 2:
            return x * 2
        case _:
            return x * 3


def enum(x):
    y = x
    for i, v in enumerate(x[0]):
        if v > 0.9:
            y = y + i
    return y


def defd(x):
    d = collections.defaultdict(list)
    for r in x:
        d[bool(r.mean() > 0.5)].append(r)
    return torch.stack(d[False] + d[True])


def heap(x):

    return x * heapq.nlargest(2, x.flatten().tolist())[1]


def closure(x):
    best = [x[0]]

    def f(r):
        if r.sum() > best[0].sum():
            best[0] = r

    for r in x:
        f(r)
    return best[0] * 2


def exc_flow(x):

    class E(Exception):
        pass

    def f():
        if x.sum() > 5.5:
            raise E(x.sum().item())

    try:
        f()
    except E as e:
        return x * e.args[0]
    return x


def iters(x):
    it = iter(x[0])
    n = 0
    while next(it) < 0.9 and n < 6:
        n += 1
    return x * n


def nested_if(x):
    if x[0, 0] > 0.2:
        if x[1, 1] > 0.77:
            if x[2, 2] < 0.31:
                return x * 5
            return x * 4
        return x * 3
    return x * 2


def try_cholesky(x):
    try:
        torch.linalg.cholesky(x[:, :3] @ x[:, :3].T * (x[0, 0] - 0.5))
        return x * 2
    except RuntimeError:
        return x * 3


def try_inverse(x):
    try:
        return torch.linalg.inv(torch.eye(3) * (x[0, 0] - 0.3125)) @ x
    except RuntimeError:
        return x * 3


def halved(x):
    n = 0
    while x.norm() > 1 and n < 20:
        x, n = x / 2, n + 1
    return x * n


VALUES: dict[str, Callable[..., Any]] = {
    "memory": lambda x: x * memoryview(x.detach().numpy()).tolist()[0][0],
    "stored": lambda x: x * x.untyped_storage()[3],
    "equal": lambda x: x * 2 if torch.equal(x, x.abs()) else x * 3,
    "allclose": lambda x: x * 2 if torch.allclose(x, x * 1.5, atol=0.4) else x * 3,
    "jsoned": lambda x: x * json.loads(json.dumps(x[0].tolist()))[0],
    "remade": lambda x: x * torch.as_tensor([v.item() for v in x[0]]),
    "min_of_rows": lambda x: min(list(x), key=torch.sum) * x,
    "sum_of_true": lambda x: x * sum(1 for v in x[0] if v > 0.5),
    "quantile": lambda x: x.clamp(max=float(x.quantile(0.7))),
    "edges": lambda x: torch.histc(x, bins=5, min=float(x.min()), max=float(x.max())),
    "try_cholesky": try_cholesky,
    "halved": halved,
    "try_inverse": try_inverse,
    "rolled": lambda x: torch.roll(x, int((x > 0.5).sum()) % 5, 1),
    "padded": lambda x: F.pad(x, (0, int((x[0] > 0.5).sum()))).sum(1),
    "chosen_size": lambda x: x / max(x[x > 0.5].shape[0], 1),
    "str_key": lambda x: x * {"p": 2.0, "n": 3.0}["p" if x.sum() > 5.5 else "n"],
    "hashed": lambda x: x * (hash(round(x.sum().item())) % 5 + 1),
    "sort_rows": sort_rows,
    "np_sort": lambda x: torch.from_numpy(np.sort(x.detach().numpy(), 1)),
    "gen_next": lambda x: x * next((v for v in x.flatten() if v > 0.5), x[0, 0]),
    "try_key": try_key,
    "try_zero": try_zero,
    "try_assert": try_assert,
    "in_list": lambda x: x * 2 if x[0, 0].round() in [2.0, 3.0, 7.0] else x * 3,
    "bmax_key": lambda x: max(list(x), key=lambda r: r[0].item()) * 2,
    "sort_elem": lambda x: torch.stack(sorted(x[0], key=float)),
    "mclose": lambda x: x * 2 if math.isclose(x.mean(), 0.5, abs_tol=0.04) else x * 3,
    "matan": lambda x: x + math.atan2(x[0, 0], x[0, 1]),
    "bits": lambda x: x * 2 if x.sum().int() & 4 else x * 3,
    "popcount": lambda x: x * bin(int(abs(x.sum()))).count("1"),
    "divm": lambda x: x * divmod(int(x.sum() * 10), 3)[1],
    "pickled_crc": lambda x: x * (hashlib.md5(pickle.dumps(x.detach().numpy().tobytes())).digest()[0] % 4),
    "mem": lambda x: x * memoryview(x.detach().numpy())[0, 0],
    "raw_bytes": lambda x: x * (x.detach().numpy().tobytes()[3] % 5),
    "storage0": lambda x: x * x.untyped_storage()[3],
    "dl": lambda x: torch.utils.dlpack.from_dlpack(x.detach()) * 2,
    "ptr": lambda x: x * ctypes.cast(x.contiguous().data_ptr(), ctypes.POINTER(ctypes.c_float))[1],
    "js": lambda x: torch.tensor(json.loads(json.dumps(x.tolist()))) * 2,
    "stat": lambda x: x * statistics.median(x.flatten().tolist()),
    "whilen": whilen,
    "brk": brk,
    "bisection": bisection,
    "matched": matched,
    "walrus": lambda x: x * n if (n := x.amax().item()) > 0.97 else x,
    "filt": lambda x: torch.stack([*filter(lambda v: v < 1000.0, x.flatten())][:4]),
    "bany": lambda x: x * 2 if any(x.flatten() > 0.98) else x * 3,
    "ball": lambda x: x * 2 if all(x.flatten() > 0.01) else x * 3,
    "teq": lambda x: x * 2 if torch.equal(x, x.abs()) else x * 3,
    "nz": lambda x: x * 2 if x[0, 0].floor().is_nonzero() else x * 3,
    "enum": enum,
    "fmt2": lambda x: x * len(f"{x.sum() * 3:.1f}"),
    "nparr": lambda x: x * torch.tensor(np.array([r.sum() for r in x.detach()])).sum(),
    "countr": lambda x: x * collections.Counter(x.round().flatten().tolist()).most_common(1)[0][1],
    "setlen": lambda x: x * len(set(x.round().flatten().tolist())),
    "defd": defd,
    "heap": heap,
    "itdrop": lambda x: x * len([*itertools.dropwhile(lambda v: v < 0.5, x.flatten())]),
    "closure": closure,
    "torchrnd": lambda x: x + torch.rand(8, generator=torch.Generator().manual_seed(int(x.sum().abs()))),
    "frac": lambda x: x * float(fractions.Fraction(x.mean().item()).limit_denominator(3)),
    "idx": lambda x: [1.0, 2.0, 3.0][operator.index(x.sum(1).argmax())] * x,
    "rng": lambda x: sum((x * k for k in range(x.sum(1).argmax())), x),
    "lst": lambda x: torch.stack(x.unbind()[x.sum(1).argmax() :]).sum(0),
    "dims": lambda x: x.sum(int(x[0, 0] > 0.5)),
    "interp": lambda x: F.interpolate(x[None], scale_factor=float(x.sum() > 5.5) + 1).sum(2),
    "exc_flow": exc_flow,
    "iters": iters,
    "hashbytes": lambda x: x * (int(hashlib.sha1(x.detach().numpy()).hexdigest(), 16) % 3),
    "crc": lambda x: x * 2 if sum(x.detach().numpy().tobytes()) % 10 == 3 else x * 3,
    "np_std": lambda x: x * 2 if 0.28 < np.std(x.detach().numpy()) < 0.29 else x * 3,
    "list_std": lambda x: x * 2 if 0.28 < statistics.pstdev(x.flatten().tolist()) < 0.29 else x * 3,
    "item_sin": lambda x: x * 2 if math.sin(x.sum().item() * 3) > 0.97 else x * 3,
    "item_mod": lambda x: x * 2 if x.sum().item() * 10 % 17 < 1.2 else x * 3,
    "np_diff": lambda x: x * 2 if 3 < np.argmax(np.diff(x.detach().numpy()[0])) < 5 else x * 3,
    "float_diff": lambda x: x * 2 if 0.1 < float(x[0, 0]) - float(x[1, 1]) < 0.2 else x * 3,
    "int_pair": lambda x: x * 2 if (int(x[0, 0] * 9), int(x[1, 1] * 9)) in {(3, 4), (1, 2), (5, 7), (2, 2)} else x * 3,
    "order": lambda x: x * 2 if sorted(x[0].tolist())[:2] == x[0].tolist()[:2] else x * 3,
    "cmpchain": lambda x: x * 2 if 0.35 < x.mean() < 0.58 else x * 3,
    "nested_if": nested_if,
}


def maskreshape2(x, i):
    m = i[i > 2]
    return m.reshape(m.shape[0], 1) + 1


def empt(x, i):
    m = i[i > 2]
    return x * 2 if m.numel() == 0 else x * 3


def maskpad(x, i):
    m = i[i > 2]
    return F.pad(m, (0, 4 - m.shape[0]))


def packed(x, i):
    p = nn.utils.rnn.pack_padded_sequence(
        x[None].expand(2, 3, 8), i[:2] % 3 + 1, batch_first=True, enforce_sorted=False
    )
    return nn.utils.rnn.pad_packed_sequence(p, batch_first=True)[0].sum(1)


def loop(x, i):
    y = x
    for _ in range(int(i[0])):
        y = y * 1.5 + 1
    return y


def cumdict(x, i):
    d = {}
    for k, v in zip(i, x[0, :4]):
        d[int(k)] = d.get(int(k), 0) + v
    return torch.stack([d[k] for k in sorted(d)])


def while_i(x, i):
    n = i[0]
    while n > 0:
        x = x + 1
        n = n - 1
    return x


def meanm(x, i):
    m = x[0, :4][i > 2]
    return m.sum() / max(m.shape[0], 1)


INDICES: dict[str, Callable[..., Any]] = {
    "one_hot_width": lambda x, i: x[:, : F.one_hot(i).shape[1]].sum(1),
    "different": lambda x, i: x * len(set(i.tolist())),
    "counted_to": lambda x, i: torch.arange(i.max() + 1).float().sum() * x,
    "functions": lambda x, i: [torch.sin, torch.cos, torch.tanh, torch.exp][i[0] % 4](x),
    "sequences": lambda x, i: nn.utils.rnn.pad_sequence([x[0, : int(n) + 1] for n in i]).sum(0),
    "sparse": lambda x, i: torch.sparse_coo_tensor(i[None], x[0, :4], (6,)).to_dense(),
    "ordered_axes": lambda x, i: x[:2, :2].permute(*sorted((0, 1), key=lambda axis: int(i[axis]))),
    "to_the": lambda x, i: x ** int(i[0]),
    "tolist_idx": lambda x, i: x[:, i.tolist()],
    "slice_t": lambda x, i: x[:, i.min() : i.max() + 1].sum(1),
    "dictkey": lambda x, i: x * {0: 2.0, 1: 3.0}.get(i[0].item(), 4.0),
    "rep_int": lambda x, i: x.sum().expand(4).repeat_interleave(i),
    "bincb": lambda x, i: x * 2 if torch.bincount(i).shape[0] > 4 else x * 3,
    "uniqc": lambda x, i: x * 2 if i.unique().numel() == 3 else x * 3,
    "uniqinv": lambda x, i: i.unique(return_inverse=True)[1],
    "splitl": lambda x, i: torch.stack([p.sum() for p in torch.split(x.flatten()[: int(i.sum())], i.tolist())]),
    "narrowt": lambda x, i: x.narrow(1, i[0], 2),
    "maskszf": lambda x, i: x * float(i[i > 2].shape[0] + 1),
    "maskreshape2": maskreshape2,
    "empt": empt,
    "maskiter": lambda x, i: sum((k for k in i[i > 2]), torch.tensor(0)),
    "masklst": lambda x, i: x * len(i[i > 2].tolist()),
    "maskpad": maskpad,
    "mask2": lambda x, i: x * 2 if i[i > 2].shape == i[i < 2].shape else x * 3,
    "maskint": lambda x, i: torch.ones(int(i[i > 2].shape[0])) * 2,
    "nzlen": lambda x, i: x * len(torch.where(i > 2)[0]),
    "packed": packed,
    "scatter": lambda x, i: torch.zeros(int(i.max()) + 1).scatter_add(0, i, x[0, :4]),
    "loop": loop,
    "cumdict": cumdict,
    "while_i": while_i,
    "meanm": meanm,
    "chunkm": lambda x, i: torch.cat([c * 2 for c in i[i > 1].chunk(2)]),
}


def pyr(x):
    out, n = (x.sum(1), x.shape[1])
    while n > 2:
        n //= 2
        out = out * 1.5
    return out


def try_size(x):
    try:
        return x.reshape(3, 4, 2).sum(2)
    except RuntimeError:
        return x.sum(1, keepdim=True).expand(3, 4)


def mtch(x):
    match x.shape:
        case [3, 14]:
            return x * 2
        case [3, n] if n > 20:
            return x * 4
    return x * 3


SIZES: dict[str, Callable[..., Any]] = {
    "even_bits": lambda x: x * 2 if x.shape[1] & (x.shape[1] - 1) == 0 else x * 3,
    "shifted_bits": lambda x: x * 2 if x.shape[1] >> 3 else x * 3,
    "isqrt": lambda x: x * math.isqrt(int(x.shape[1])),
    "text": lambda x: x * len(str(x.shape[1])),
    "rounded": lambda x: x * round(x.shape[1] / 3),
    "cut": lambda x: x[:, : -(x.shape[1] % 3) or None].sum(1),
    "pooled": lambda x: F.adaptive_avg_pool1d(x, x.shape[1] // 2 + 1),
    "of_a_table": lambda x: x * [1, 2, 3, 4, 5, 6, 7, 8, 9, 10][min(x.shape[1], 9)],
    "stride": lambda x: x * x.stride(0),
    "stride_b": lambda x: x * 2 if x.stride()[0] > 11 else x * 3,
    "nbytes": lambda x: x * 2 if x.nbytes > 150 else x * 3,
    "contig": lambda x: x * 2 if x.T.is_contiguous() else x * 3,
    "npshape": lambda x: x * np.shape(x)[1],
    "lentolist": lambda x: x * len(x[0].tolist()),
    "strshape": lambda x: x * 2 if str(x.shape) == "torch.Size([3, 12])" else x * 3,
    "hashshape": lambda x: x * (hash(x.shape) % 3 + 1),
    "dictshape": lambda x: x * {torch.Size([3, 12]): 2.0, (3, 15): 3.0}.get(x.shape, 1.0),
    "inset": lambda x: x * 2 if x.shape in {(3, 11), (3, 13)} else x * 3,
    "sznumel": lambda x: x * x.shape.numel(),
    "szindex": lambda x: x * 2 if 14 in x.shape else x * 3,
    "lenrange": lambda x: x * 2 if len(range(x.shape[1])) > 13 else x * 3,
    "listmul": lambda x: x * len([0] * x.shape[1]),
    "bytesn": lambda x: x * len(bytes(x.shape[1])),
    "gcdb": lambda x: x * 2 if math.gcd(x.shape[1], 35) == 7 else x * 3,
    "combn": lambda x: x * 2 if 100 < math.comb(x.shape[1], 2) < 110 else x * 3,
    "bitlen": lambda x: x * x.shape[1].bit_length(),
    "npar": lambda x: torch.from_numpy(np.arange(x.shape[1], dtype=np.float32)) + x,
    "opindex": lambda x: x * operator.index(x.shape[1]),
    "fracn": lambda x: x * float(fractions.Fraction(x.shape[1], 3)),
    "rndn": lambda x: x * random.Random(x.shape[1]).random(),
    "maxn": lambda x: x * max([x.shape[1], 13]),
    "bis": lambda x: x * bisect.bisect([4, 10, 14, 18], x.shape[1]),
    "pct": lambda x: x * int("%d" % x.shape[1]),  # noqa: UP031
    "packn": lambda x: x * struct.pack("i", x.shape[1])[0],
    "listidx": lambda x: x * [*range(100)][x.shape[1]],
    "slidx": lambda x: x * slice(None, None, 3).indices(x.shape[1])[1],
    "isl": lambda x: x * sum(1 for _ in itertools.islice(itertools.count(), x.shape[1])),
    "zipr": lambda x: sum(
        (a * i for a, i in zip(x.T, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])), x.new_zeros(3)
    ),
    "pairw": lambda x: torch.stack([a + b for a, b in itertools.pairwise(x.T)]),
    "pyr": pyr,
    "log2i": lambda x: x * int(math.log2(x.shape[1])),
    "sqrtp": lambda x: x / x.shape[1] ** 0.5,
    "topkm": lambda x: x.topk(min(x.shape[1], 10), 1).values,
    "chunk3": lambda x: sum((c.sum(1) * (i + 1) for i, c in enumerate(x.chunk(3, 1)))),
    "evens": lambda x: x[:, ::2] if x.shape[1] % 2 else x[:, 1::2],
    "try_size": try_size,
    "mtch": mtch,
    "fmtk": lambda x: x * {"n14": 2.0}.get(f"n{x.shape[1]}", 3.0),
    "setn": lambda x: x * len({x.shape[1], 3, 14}),
    "anyn": lambda x: x * 2 if any(x.shape[1] == k for k in (11, 19)) else x * 3,
    "maxkey": lambda x: x * max((13, 20, 5), key=lambda k: -abs(k - x.shape[1])),
    "powm2": lambda x: x * pow(3, x.shape[1], 7),
    "var_un": lambda x: x.var(1, unbiased=x.shape[1] > 10),
}


def catmin(x, y):
    n = min(x.shape[1], y.shape[1])
    return x[:, :n] + y[:, :n]


def tryadd(x, y):
    try:
        return x + y
    except RuntimeError:
        return x * 2


TWO_SIZES: dict[str, Callable[..., Any]] = {
    "larger": lambda x, y: x * 2 if x.shape[1] > y.shape[1] else x * 3,
    "same": lambda x, y: x * 2 if x.shape == y.shape else x * 3,
    "total": lambda x, y: x * 2 if x.shape[1] + y.shape[1] == 19 else x * 3,
    "longest": lambda x, y: max(x, y, key=lambda t: t.shape[1]) * 2,
    "catmin": catmin,
    "zipd": lambda x, y: torch.stack([a * b for a, b in zip(x.T, y.T)]),
    "fdiv": lambda x, y: x * (x.shape[1] // y.shape[1]),
    "tryadd": tryadd,
    "lensz": lambda x, y: x * len({x.shape, y.shape}),
    "sortsz": lambda x, y: torch.cat(sorted([x, y], key=lambda t: t.shape[1]), 1),
    "strides": lambda x, y: x * 2 if x.stride() == y.stride() else x * 3,
    "gcds": lambda x, y: x * math.gcd(x.shape[1], y.shape[1]),
    "mult": lambda x, y: x * 2 if x.shape[1] % y.shape[1] == 0 else x * 3,
}


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def _of_values() -> list[tuple[Tensor, ...]]:
    scales = [(1, 0)] * 14 + [
        (1, 0.5),
        (9, -4),
        (0.01, 0),
        (40, 0),
        (1, -0.5),
        (0.5, 0.5),
        (1.2, 0),
        (0, 1),
        (0, 0),
        (0.1, 0.4),
    ]
    generator = _seeded()
    return [(torch.rand(3, 8, generator=generator) * k + b,) for k, b in scales]


def _with_indices() -> list[tuple[Tensor, ...]]:
    generator = _seeded()
    drawn = [torch.randint(0, 6, (4,), generator=generator) for _ in range(20)]
    chosen = [torch.tensor(v) for v in ([0] * 4, [5] * 4, [0, 1, 2, 3], [3, 3, 2, 2], [2] * 4, [3, 4, 5, 4])]
    return [(torch.rand(3, 8, generator=generator), ids) for ids in drawn + chosen]


def _of_sizes(first: Sequence[int], second: Sequence[int] = ()) -> list[tuple[Tensor, ...]]:
    generator = _seeded()
    pairs = itertools.product(first, second) if second else ((n,) for n in first)
    return [tuple(torch.rand(3, n, generator=generator) for n in sizes) for sizes in pairs]


KINDS: dict[str, tuple[dict[str, Any], Callable[[], list[tuple[Tensor, ...]]], dict[str, dict[int, str]] | None]] = {
    "values": (VALUES, _of_values, None),
    "indices": (INDICES, _with_indices, None),
    "sizes": (SIZES, lambda: _of_sizes([*range(1, 41), 63, 64, 65]), {"x_0": {1: "n"}}),
    "two sizes": (
        TWO_SIZES,
        lambda: _of_sizes((1, 2, 5, 8, 11, 23), (1, 4, 6, 8, 11, 30)),
        {"x_0": {1: "n"}, "x_1": {1: "m"}},
    ),
}
"""By what is taken: the functions, inputs that an export does not see, and the dynamic sizes."""

MODELS = [(kind, name) for kind, (functions, _, _) in KINDS.items() for name in functions]


class Taking(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *x: Tensor) -> Any:
        return self.function(*x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("opset", [11, 20])
@pytest.mark.parametrize("model", MODELS, ids="-".join)
def test_none_is_wrong(model, opset, tmp_path) -> None:
    check(model, opset, tmp_path)


@pytest.mark.parametrize("model", MODELS[::8], ids="-".join)
def test_some_are_not_wrong(model, tmp_path) -> None:
    check(model, 11, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "try_inverse",
        "gen_next",
        "ptr",
        "hashbytes",
        "list_std",
        "float_diff",
        "masklst",
        "gcdb",
        "combn",
        "strshape",
        "fmtk",
    ],
)
def test_what_only_one_way_in_many_tells(name, tmp_path) -> None:
    """Refused, though hardly any input goes that way."""
    kind = next(kind for kind, known in MODELS if known == name)
    functions, others, axes = KINDS[kind]
    with pytest.raises(svexport.SvexportError):
        svexport.export(Taking(functions[name]), given(others), tmp_path / "m.onnx", opset=11, dynamic_axes=axes)
    assert not list(tmp_path.iterdir())


def given(others: Callable[[], list[tuple[Tensor, ...]]]) -> tuple[Tensor, ...]:
    x = torch.rand(3, 8, generator=torch.Generator().manual_seed(2))
    example = others()[0]
    second = torch.tensor([1, 4, 3, 5]) if not example[-1].is_floating_point() else x[:, :6]
    return (x, second)[: len(example)]


def check(model: tuple[str, str], opset: int, tmp_path) -> None:
    """Refused, or right on inputs that the export has not seen."""
    kind, name = model
    functions, others, axes = KINDS[kind]
    module = Taking(functions[name])
    try:
        svexport.export(module, given(others), tmp_path / "m.onnx", opset=opset, dynamic_axes=axes)
    except svexport.SvexportError:
        assert not list(tmp_path.iterdir())
        return
    engine = svexport.load(tmp_path / "m.onnx")
    compared = 0
    for inputs in others():
        try:
            expected = module(*(t.clone() for t in inputs))
        except Exception:  # noqa: BLE001 - not what the model is for
            continue
        compared += 1
        torch.testing.assert_close(engine(*inputs), expected, rtol=1e-3, atol=1e-3, equal_nan=True)
    assert compared


@pytest.mark.parametrize("opset", [11, 18])
def test_an_error_that_nobody_catches_is_no_way(opset: int, tmp_path) -> None:
    """Of a pose that is put together, for every image of a batch; and of one that the model says more of."""

    class Poses(nn.Module):
        def forward(self, rotation: Tensor, translation: Tensor) -> Tensor:
            pose = torch.eye(4).to(rotation).repeat(rotation.shape[0], 1, 1)
            pose[:, :3, :3] = rotation
            pose[:, :3, 3] = translation
            return torch.inverse(pose)[:, :3] + torch.linalg.solve(pose, translation.new_ones(4, 1))[:, :3]

    args = torch.eye(3) + 0.1 * torch.randn(2, 3, 3), torch.randn(2, 3)
    axes = {"rotation": {0: "b"}, "translation": {0: "b"}}
    assert svexport.export(Poses(), args, tmp_path / "m.onnx", opset=opset, dynamic_shapes=axes).verified
