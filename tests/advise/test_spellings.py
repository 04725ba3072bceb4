"""Habits in the spellings that people use, each beside its near miss that is none."""

from __future__ import annotations

import pytest

from svexport.advise import advise

HEAD = """import torch
import torch.nn.functional as F
from torch import Tensor, nn


def helper(x) -> Tensor:
    return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)
        self.range = [-51.2, -51.2, 51.2, 51.2]
"""


def codes(lines, folder, parameters="x: Tensor, y: Tensor, p"):
    path = folder / "model.py"
    body = "\n".join(f"        {line}" for line in lines.split("; "))
    path.write_text(f"{HEAD}\n    def forward(self, {parameters}):\n{body}\n")
    report = advise([path])
    assert not report.unread
    return [f.code for f in report.findings]


@pytest.mark.parametrize(
    ("habit", "code"),
    [
        ("label = x.softmax(-1).max(-1)[1]; return label", "SVX304"),
        ("_, label = torch.softmax(x, dim=1).max(dim=1); return label", "SVX304"),
        ("return F.softmax(x, -1).max(-1).indices", "SVX304"),
        ("return x.sigmoid().squeeze(-1) > 0.5", "SVX302"),
        ("q = x.sigmoid(); return q[..., 0] > 0.5, q.flatten(1) > 0.3", "SVX302"),
        ("y = x.permute(0, 2, 1); y = torch.tanh(y); return y", "SVX205"),
        ("y = x.transpose(1, 2); y = y > 0; return y", "SVX205"),
        ("y = self.conv(y); y = x.permute(0, 3, 1, 2).contiguous(); return self.conv(y)", "SVX207"),
        ("return self.conv(x.movedim(-1, 1).contiguous())", "SVX207"),
        ("return (x[:, :, None, :, None] * y[:, None, :, :, :]).sum((-2, 0))", "SVX301"),
        ("lo = torch.tensor(self.range[:2], device=x.device); return x - lo", "SVX106"),
        ("x = x.clamp(0, 1); return torch.log(x / (1 - x))", "SVX303"),
        ("x = x.clip(min=0, max=1); return torch.log(x / (1 - x))", "SVX303"),
        ("return x[..., (0, 1)] * 2", "SVX204"),
        ("n = len(x[0]); return n", "SVX103"),
        ("return len(helper(p)[0])", "SVX103"),
        ("for i in range(3): p.append((x + i).nonzero().tolist()); return p", "SVX101"),
        ("for i, row in enumerate(x): p[i] = row.flatten().tolist(); return p", "SVX101"),
        ("for a, b in zip(x, y): p.append(b.tolist()); return p", "SVX101"),
        ("return x[:, :1].repeat(1, 3, 1) * y", "SVX201"),
        ("z = torch.zeros_like(x); z[:-1, :2] = x[1:, :2]; z[:, 2:] = x[:, 2:]; return z", "SVX105"),
        ("z = torch.zeros(8, 8).to(x.device, x.dtype); z[:, 0] = x; z[:, 1] = y; return z", "SVX105"),
        ("z = torch.zeros_like(x); z[:, 0] = y; z[:, 1] = y; return z[:, 0]", "SVX105"),
        (
            "z = torch.zeros_like(x); z[0::2, 0::2] = y; z[1::2, 0::2] = y; z[0::2, 1::2] = y; z[1::2, 1::2] = y; "
            "return z",
            "SVX105",
        ),
    ],
)
def test_found(tmp_path, habit, code):
    assert code in codes(habit, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "score, label = x.softmax(-1).max(-1); return score, label",
        "return x.softmax(-1).max(-1)[0]",
        "return x.softmax(-1).max()",
        "q = x.sigmoid(); return q[..., 0] > 0.5, q.flatten(1)",
        "y = x.permute(0, 2, 1); z = torch.tanh(y); return y, z",
        "y = x.permute(0, 2, 1); p = y; y = torch.tanh(y); return y, p",
        "y = self.conv(y); y = x.permute(0, 3, 1, 2).contiguous(); p = self.conv(y); return p, y.view(-1)",
        "return self.conv(x.movedim(1, -1).contiguous())",
        "return (x[:, :, None, :] * y[:, None, :, :]).sum((1, 3))",
        "y = x + 1; try:;     y = x.sigmoid();     return y > 0.5; finally:;     print(y)",
        "lo = torch.tensor(self.range[p:]); return x - lo",
        "x = x.clamp(0, 0.999); return torch.log(x / (1 - x))",
        "return x[(0, 1)] * 2, x[:, (0, 2, 1)]",
        "for rows in x.nonzero(as_tuple=True): p.append(rows); return p",
        "return x[:, :2].repeat(1, 3, 1) * y, x[0, :1].repeat(1, 3, 1) * y",
        "z = torch.zeros_like(x); z[0::2, 0::2] = y; z[1::2, 1::2] = y; return z",
        "z = torch.zeros_like(x); z[2:4, :2] = x[2:4, :2]; z[:, 2:] = x[:, 2:]; return z",
    ],
)
def test_not_found(tmp_path, text):
    assert codes(text, tmp_path) == []


def test_a_function_that_views_takes_tensors(tmp_path):
    """Sizes and views of its arguments tell, where no annotation does; numpy has neither in this form."""
    path = tmp_path / "helpers.py"
    for line, found in (("x.view(2, -1)", ["SVX206"]), ("x.size(1)", ["SVX206"]), ("x.view(int)", []), ("x.size", [])):
        path.write_text(
            f"import torch\n\n\ndef f(x):\n    y = {line}\n    return y, g(x).permute(0, 2, 1).permute(0, 2, 1)\n"
        )
        assert [f.code for f in advise([path]).findings] == found, line
