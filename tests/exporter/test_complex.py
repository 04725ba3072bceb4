"""Complex numbers that a model computes with between real inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from svexport.exporter.trace import torch_export_first
from tests.support import OPSETS, check_export


def rotations(features: int, places: int) -> Tensor:
    """As Llama has them, which others copied."""
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, features, 2)[: features // 2].float() / features))
    angles = torch.outer(torch.arange(places), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


class Rotary(nn.Module):
    """Rotary embeddings of queries and keys, of a buffer (an attribute, or made by forward)."""

    def __init__(self, held: str = "buffer", heads: int = 3, features: int = 10) -> None:
        super().__init__()
        self.heads, self.features, self.held = heads, features, held
        self.qk = nn.Linear(7, 2 * heads * features)
        if held == "buffer":
            self.register_buffer("freqs_cis", rotations(features, 32))
        elif held == "attribute":
            self.freqs_cis = rotations(features, 32)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        n, length, _ = x.shape
        freqs_cis = self.freqs_cis[:length] if self.held != "forward" else rotations(self.features, length)
        q, k = self.qk(x).view(n, length, 2, self.heads, self.features).unbind(2)
        q_ = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
        k_ = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
        freqs_cis = freqs_cis.view([d if i in (1, 3) else 1 for i, d in enumerate(q_.shape)])
        q_out = torch.view_as_real(q_ * freqs_cis).flatten(3)
        k_out = torch.view_as_real(k_ * freqs_cis).flatten(3)
        return {"q": q_out.type_as(q), "k": k_out.type_as(k)}


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("held", ["buffer", "attribute", "forward"])
def test_rotary_embeddings(held: str, opset: int, tmp_path) -> None:
    if opset == 9:  # no slices of dynamic sizes
        check_export(Rotary(held).eval(), tmp_path, opset, (torch.randn(2, 5, 7),), (torch.randn(2, 5, 7),))
        return
    axes = {"x": {0: "batch", 1: "length"}}
    args, *others = (torch.randn(2, 5, 7),), (torch.randn(3, 11, 7),), (torch.randn(1, 2, 7),)
    report = check_export(Rotary(held).eval(), tmp_path, opset, args, *others, dynamic_shapes=axes)
    assert any("length=" in p.run for p in report.parity)


@pytest.mark.core
@pytest.mark.parametrize("opset", [11, 17, 18])
def test_buffers_are_real_constants(opset: int, tmp_path) -> None:
    model = Rotary().eval()
    report = check_export(model, tmp_path, opset, (torch.randn(2, 5, 7),))
    held = onnx.load(report.path).graph.initializer
    assert {t.data_type for t in held} <= {onnx.TensorProto.FLOAT, onnx.TensorProto.INT64}
    assert model.freqs_cis.dtype == torch.complex64
    assert svexport.check(report.path, "8.4" if opset < 18 else "10.15").ok


@pytest.mark.parametrize("opset", [11, 17, 18])
def test_half_models_keep_their_rotations(opset: int, tmp_path) -> None:
    """``Module.to`` would take the real parts of a complex buffer."""
    report = svexport.export(
        Rotary().eval(), torch.randn(2, 5, 7), tmp_path / "m.onnx", opset=opset, dtype=torch.float16
    )
    assert report.verified
    assert report.outputs["q"].startswith("float16")


def z_of(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.reshape(x.shape[0], x.shape[1], 4, 2))


def real(**results: Tensor) -> dict[str, Tensor]:
    return {name: torch.view_as_real(z.resolve_conj()) if z.is_complex() else z for name, z in results.items()}


def arithmetic(x: Tensor) -> dict[str, Tensor]:
    z, w, r = z_of(x), z_of(x.roll(1, 0) + 2), x[..., :4]
    integers = (4 * r).long()
    constant = torch.tensor([1j, 2, -1 + 0.5j, 0])
    accumulated = z.clone()
    accumulated *= w
    accumulated += 1j
    return real(
        product=z * w,
        by_real=z * r,
        of_real=r * z,
        by_number=2.5 * z,
        by_i=z * 1j,
        by_complex=(1 - 2j) * z,
        real_by_i=torch.exp(1j * x),
        real_by_complex=x * (1 + 2j),
        by_constant=z * constant,
        sum=z + w,
        sum_real=z + r[:, :1],
        sum_number=1 + z,
        sum_wider=z[:1] + r,
        alpha=torch.add(z, w, alpha=-2),
        difference=z - w,
        from_real=r - z,
        from_number=1 - z,
        less_complex=z - (1 + 2j),
        integers=integers + (1.5 + 2.5j),
        from_integers=(0.25 - 1.5j) - integers,
        integers_by_i=integers * 2.5j,
        quotient=z / w,
        by_positive=z / (r.abs() + 1),
        inverse=2 / w,
        negative=-z,
        power=z**3,
        exponential=z.exp(),
        logarithm=torch.log(w),
        conjugate=z * z.conj(),
        accumulated=accumulated,
        matrices=z @ w.mT,
        adjoint=z @ w.mH,
        einsum=torch.einsum("bnd,bmd->bnm", z, w),
        einsum_of_three=torch.einsum("bnd,bmd,bkd->nmk", z, w, r.cfloat()),
        linear=F.linear(z, torch.ones(3, 4) * 1j, torch.tensor([1j, 1, 2])),
    )


def parts(x: Tensor) -> dict[str, Tensor]:
    z = z_of(x)
    return real(
        real=z.real * 2,
        imag=torch.imag(z) + torch.real(z),
        abs=z.abs(),
        length=torch.abs(z) ** 2,
        angle=z.angle(),
        angle_of_zero=(z - z).angle(),
        polar=torch.polar(x.abs(), x * 3),
        complex=torch.complex(x, x.roll(1, -1)),
        conjugate=z.conj().resolve_conj(),
        made=x.to(torch.complex64) * 1j,
        zeros=torch.zeros_like(z) + z.sum(),
        doubles=z.to(torch.complex128).imag.float(),
    )


def layout(x: Tensor) -> dict[str, Tensor]:
    z = z_of(x)
    placed = torch.zeros(x.shape[0], x.shape[1], 6, dtype=torch.cfloat)
    placed[:, :, 1:5] = z
    return real(
        reshape=z.reshape(x.shape[0], -1),
        view=z.view(z.shape[0], z.size(1), 2, -1),
        flatten=z.flatten(1),
        unflatten=z.unflatten(-1, (2, 2)),
        transpose=z.transpose(-1, -2),
        permute=z.permute(2, 0, -2),
        unsqueeze=z.unsqueeze(-1),
        squeeze=z[:, :1].squeeze(1),
        expand=z[:, :1].expand(-1, 3, -1),
        repeat=z.repeat(1, 2, 1),
        cat=torch.cat([z, x[..., :4].contiguous(), z], -1),
        stack=torch.stack([z, z * 2], -1),
        first=z[0],
        rows=z[:, 1:3],
        column=z[..., 0],
        new=z[:, None, :, None],
        gathered=z[:, torch.tensor([2, 0])],
        sum=z.sum(1),
        mean=z.mean(-1, keepdim=True),
        split=torch.cat(z.chunk(2, -1)[::-1], -1),
        where=torch.where(x[..., :4] > 0, z, 0j),
        masked=z.masked_fill(x[..., :4] > 0, 1.0),
        roll=z.roll(1, -1),
        padded=F.pad(z, (1, 2)),
        placed=placed,
        clone=z.transpose(0, 1).contiguous().clone(),
    )


class Call(nn.Module):
    def __init__(self, function: Callable[[Tensor], dict[str, Tensor]]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.function(x)


@pytest.mark.parametrize(
    ("opset", "dynamic"), [(9, True), (11, False), (11, True), (13, False), (17, True), (18, False), (18, True)]
)
@pytest.mark.parametrize("function", [arithmetic, parts, layout])
def test_functions(function: Callable[[Tensor], dict[str, Tensor]], dynamic: bool, opset: int, tmp_path) -> None:
    axes = {"x": {0: "batch", 1: "rows"}} if dynamic else None
    other = torch.randn(4, 7, 8) if dynamic else torch.randn(3, 5, 8)
    check_export(
        Call(function), tmp_path, opset, (torch.randn(3, 5, 8),), (other,), dynamic_shapes=axes, tolerance=2e-5
    )


def transforms(x: Tensor) -> dict[str, Tensor]:
    """Mixers of FNet and GFNet, blocks of AFNO and FNO, and every other transform."""
    rows, columns = x.shape[1:3]
    weight = torch.complex(torch.linspace(-1, 1, columns // 2 + 1), torch.linspace(1, 2, columns // 2 + 1))[:, None]
    spectrum = torch.fft.rfft2(x, dim=(1, 2), norm="ortho")
    kept = torch.zeros_like(spectrum)
    kept[:, :2, :3] = spectrum[:, :2, :3] * weight[:3]
    z = torch.complex(x, x.roll(1, 0))
    return real(
        fnet=torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real,
        gfnet=torch.fft.irfft2(spectrum * weight, s=(rows, columns), dim=(1, 2), norm="ortho"),
        fno=torch.fft.irfft2(kept, s=(rows, columns), dim=(1, 2)),
        fft=torch.fft.fft(z),
        cut=torch.fft.fft(z, 3, dim=1),
        filled=torch.fft.ifft(z, 9, dim=2, norm="forward"),
        back=torch.fft.ifft(torch.fft.fft(z, norm="forward"), norm="forward"),
        rfft=torch.fft.rfft(x, dim=1),
        rfft_cut=torch.fft.rfft(x, n=4, norm="forward"),
        irfft=torch.fft.irfft(z, dim=1),
        irfft_odd=torch.fft.irfft(z, n=5),
        irfft_filled=torch.fft.irfft(z, n=20, dim=1),
        irfft_of_real=torch.fft.irfft(x),
        rfftn=torch.fft.rfftn(x, dim=(1, -1)),
        irfftn=torch.fft.irfftn(z, s=(3, 4)),
        fftn=torch.fft.fftn(x),
        ifft2=torch.fft.ifft2(z, s=(4, 8)),
        shifted=torch.fft.fftshift(torch.fft.fft2(x), dim=(-2, -1)),
        hfft=torch.fft.hfft(z, dim=1, norm="forward"),
        hfft_odd=torch.fft.hfft(x, 9),
        hfft2=torch.fft.hfft2(z, (4, 6), norm="ortho"),
        hfftn=torch.fft.hfftn(z, dim=(0, 2)),
        ihfft=torch.fft.ihfft(x, n=7, dim=2),
        ihfft2=torch.fft.ihfft2(x, norm="forward"),
        ihfftn=torch.fft.ihfftn(x, s=(3, 8)),
    )


@pytest.mark.parametrize(("opset", "size"), [(9, 7), (11, 10), (17, 7), (18, 10)])
def test_fourier_transforms(size: int, opset: int, tmp_path) -> None:
    example, other = torch.randn(2, 5, size, 6), torch.randn(2, 5, size, 6)
    report = check_export(Call(transforms), tmp_path, opset, (example,), (other,), tolerance=5e-5)
    assert "DFT" not in report.nodes  # which TensorRT lacks


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("opset", [11, 18])
def test_only_real_tensors_are_seen(opset: int, first: bool, tmp_path) -> None:
    """Its waves are exact where they are 0 or 1: what is large beside them leaves nothing behind."""
    model = Call(lambda x: torch.fft.hfft(x, dim=1))
    with torch_export_first(first):
        report = svexport.export(model, torch.randn(3, 7, 2), tmp_path / "m.onnx", opset=opset)
    assert "DFT" not in report.nodes
    x = torch.zeros(1, 7, 2).index_fill(1, torch.tensor(1), 1e30).expand(3, 7, 2)
    actual, expected = svexport.load(report.path)(x), model(x)
    assert (actual[:, [3, 9]] == 0).all()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e24)
    for kind in (torch.bool, torch.int64):
        x = torch.randint(0, 2, (31,)).to(kind)
        svexport.export(Call(torch.fft.hfft), x, tmp_path / "n.onnx", opset=opset)
        torch.testing.assert_close(svexport.load(tmp_path / "n.onnx")(x), torch.fft.hfft(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("opset", [11, 18])
def test_transforms_of_batches(opset: int, tmp_path) -> None:
    def spectrum(x: Tensor) -> dict[str, Tensor]:
        return real(all=torch.fft.fft2(x), half=torch.fft.irfft2(torch.fft.rfft2(x) * 2j))

    axes = {"x": {0: "n"}}
    check_export(Call(spectrum), tmp_path, opset, (torch.randn(2, 5, 6),), (torch.randn(7, 5, 6),), dynamic_shapes=axes)


@pytest.mark.parametrize("opset", [11, 20])
def test_transforms_of_dynamic_sizes(opset: int, tmp_path) -> None:
    """A spectrum that is written in part, cut and filled, forth and back, and the symmetric ones."""

    def spectrum(x: Tensor) -> dict[str, Tensor]:
        height, width = x.shape[-2:]
        kept = torch.zeros(2, height, width // 2 + 1, dtype=torch.cfloat)
        kept[:, :2] = torch.fft.rfft2(x, norm="ortho")[:, :2] * 2j
        back = torch.fft.irfft2(kept, s=(height, width), norm="ortho")
        return real(back=back, filled=torch.fft.fft(x, n=2 * height, dim=1), ends=torch.fft.hfft(x, dim=1))

    axes = {"x": {1: "h", 2: "w"}}
    example, *others = (torch.randn(2, *size) for size in ((6, 5), (7, 8), (31, 2)))
    report = check_export(Call(spectrum), tmp_path, opset, (example,), *((x,) for x in others), dynamic_shapes=axes)
    assert "DFT" not in report.nodes  # which TensorRT lacks
    assert not report.notes


@pytest.mark.parametrize("opset", [9, 17])
def test_unknown_functions_are_named(opset: int, tmp_path) -> None:
    def function(x: Tensor) -> dict[str, Tensor]:
        return {"x": torch.linalg.inv(z_of(x)[:, :4]).real}

    with pytest.raises(svexport.ExportError, match=r"linalg_inv (?s:.*)test_complex.py:\d+ (?s:.*)view_as_real"):
        svexport.export(Call(function), torch.randn(2, 4, 8), tmp_path / "m.onnx", opset=opset)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("opset", [11, 17])
def test_unknown_functions_of_real_tensors_are_named(opset: int, tmp_path) -> None:
    def function(x: Tensor) -> dict[str, Tensor]:
        return {"x": torch.linalg.eigvals(x[:, :4, :4]).real}

    with pytest.raises(svexport.ExportError, match=r"linalg_eigvals (?s:.*)test_complex.py:\d+ in function"):
        svexport.export(Call(function), torch.randn(2, 4, 8), tmp_path / "m.onnx", opset=opset)


@pytest.mark.core
@pytest.mark.parametrize("opset", [11, 18])
def test_complex_results(opset: int, tmp_path) -> None:
    with pytest.raises(svexport.ExportError, match=r"returned a complex64 tensor at z, (?s:.*)torch.view_as_real"):
        svexport.export(Call(lambda x: {"z": z_of(x) * 2}), torch.randn(2, 4, 8), tmp_path / "m.onnx", opset=opset)


def test_angles_of_what_is_no_number(tmp_path) -> None:
    model, nan = Call(lambda x: {"angle": z_of(x).angle()}), float("nan")
    report = svexport.export(model, torch.randn(2, 4, 8), tmp_path / "m.onnx", opset=13)
    x = torch.tensor([nan, 1.0, 2.0, nan, nan, nan, 0.0, -3.0]).repeat(2, 4, 1)
    torch.testing.assert_close(svexport.load(report.path)(x)[0], model(x)["angle"], equal_nan=True)
