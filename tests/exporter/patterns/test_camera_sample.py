"""Camera sampling in other people's code is found and replaced; near misses are left alone, or replaced correctly."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import svexport

SIZE, RANGE = (32, 48), (-8.0, -6.0, -2.0, 8.0, 6.0, 2.0)
WHAT = "project, mask, sample, weigh, sum"


def rig(batch, cams):
    """Cameras at the origin that look around: x right, y down, z ahead."""
    angles = torch.arange(cams) * (6.2832 / cams)
    matrix = torch.zeros(cams, 4, 4)
    matrix[:, 0, 0], matrix[:, 0, 1] = 20 * angles.sin() + 24 * angles.cos(), -20 * angles.cos() + 24 * angles.sin()
    matrix[:, 1, 2] = -20
    matrix[:, 1, 0], matrix[:, 1, 1] = 16 * angles.cos(), 16 * angles.sin()
    matrix[:, 2, 0], matrix[:, 2, 1] = angles.cos(), angles.sin()
    matrix[:, 3, 3] = 1
    return (matrix + 0.01 * torch.randn(batch, cams, 4, 4)).contiguous()


class Looks(nn.Module):
    """An attention to cameras with every step open to change."""

    def __init__(self, cams=3, points=2, levels=2, channels=8, **change):
        super().__init__()
        self.cams, self.points, self.levels = cams, points, levels
        self.scores = nn.Linear(channels, cams * points * levels)
        self.out = nn.Linear(channels, channels)
        self.config = SimpleNamespace(**change)
        self.range = RANGE

    def change(self, name, default):
        return getattr(self.config, name, default)

    def forward(self, query, points, features, cameras):
        b, q, _ = query.shape
        low, high = self.range[:3], self.range[3:]
        place = [points[..., i : i + 1] * (high[i] - low[i]) + low[i] for i in range(3)]
        place = torch.cat([*place, torch.ones_like(place[0])], -1)  # (B, Q, 4)
        seen = (cameras[:, :, None] @ place[:, None, :, :, None]).squeeze(-1)  # (B, cams, Q, 4)
        depth = torch.maximum(seen[..., 2:3], torch.full_like(seen[..., 2:3], 1e-5))
        uv = self.change("project", lambda seen, depth: seen[..., :2] / depth)(seen, depth)
        uv = uv / uv.new_tensor((SIZE[1], SIZE[0])) * 2 - 1
        uv = self.change("place", lambda uv: uv)(uv)
        inside = ((uv > -1) & (uv < 1)).all(-1)
        valid = self.change("valid", lambda depth, inside: (depth > 1e-5) & inside)(seen[..., 2], inside)
        options = {"padding_mode": "zeros", "align_corners": False, **self.change("options", {})}
        found = []
        for feature in features:
            image = feature.view(-1, *feature.shape[2:])
            level = F.grid_sample(image, uv.flatten(0, 1)[:, None], **options)  # (B*cams, C, 1, Q)
            found.append(level.view(b, self.cams, -1, q))
        found = torch.stack(found, 2)  # (B, cams, L, C, Q)
        weights = self.scores(query).reshape(b, q, self.cams, self.points, self.levels)
        weights = self.change("activate", torch.sigmoid)(weights) * valid.transpose(1, 2)[..., None, None]
        weights = self.change("weigh", lambda w: w)(weights)
        total = self.change(
            "sum", lambda f, w: (f[:, :, None] * w.permute(0, 2, 3, 4, 1)[:, :, :, :, None]).sum((1, 2, 3))
        )
        return self.out(total(found, weights).transpose(1, 2)) + query


def inputs(cams=3, channels=8, batch=2, queries=9):
    features = [torch.randn(batch, cams, channels, *size) for size in ((6, 9), (3, 4))]
    points = 0.1 + 0.8 * torch.rand(batch, queries, 3)
    return torch.randn(batch, queries, channels), points, features, rig(batch, cams)


def outcome(model, args):
    """Outputs and all gradients."""
    given = [
        a.clone().requires_grad_() if isinstance(a, torch.Tensor) else [t.clone().requires_grad_() for t in a]
        for a in args
    ]
    output = model(*given)
    leaves = [t for a in given for t in (a if isinstance(a, list) else [a])]
    return [output, *torch.autograd.grad(output.square().sum(), [*leaves, *model.parameters()], allow_unused=True)]


def whats(model):
    return [r.before for r in model.svexport_replacements if not r.before.startswith("torch.")]


WRITTEN = {
    "broadcast": {},
    "einsum": {"sum": lambda f, w: torch.einsum("bnlcq,bqnpl->bcq", f, w)},
    "softmax": {"activate": lambda w: w.flatten(2).softmax(-1).view_as(w)},
    "clamped": {"valid": lambda depth, inside: depth > 1e-5, "place": lambda uv: uv.clamp(-3, 3)},
    "mean of cameras": {"sum": lambda f, w: torch.einsum("bnlcq,bqnpl->bcq", f, w) / 3},
    "by half": {"place": lambda uv: (uv + 1) * 0.5 * 2 - 1},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_found_however_it_is_written(name):
    model, args = Looks(**WRITTEN[name]), inputs()
    replaced = svexport.replace(model, args, verbose=False)
    assert whats(replaced) == [WHAT]
    other = inputs(batch=1, queries=23)  # sizes that it was not recorded for
    for given in (args, other):
        torch.testing.assert_close(outcome(replaced, given), outcome(model, given), rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        exported = torch.export.export(replaced, args)
    assert "svexport.camera_sample.default" in [str(node.target) for node in exported.graph.nodes]


NEARLY = {
    "nearest": {"options": {"mode": "nearest"}},
    "border": {"options": {"padding_mode": "border"}},
    "corners": {"options": {"align_corners": True}},
    "no depth": {"valid": lambda depth, inside: inside},
    "no image": {"valid": lambda depth, inside: depth > 1e-5},
    "all": {"valid": lambda depth, inside: torch.ones_like(inside)},
    "mirrored": {"place": lambda uv: -uv},
    "y before x": {"place": lambda uv: uv.flip(-1)},
    "distorted": {"place": lambda uv: uv * (1 + 0.02 * uv.square().sum(-1, keepdim=True))},
    "parallel": {"project": lambda seen, depth: seen[..., :2] * 4},
    "tanh": {"activate": torch.tanh},
    "twice": {"activate": lambda w: w.sigmoid().sigmoid()},
    "normalized": {"weigh": lambda w: w / (w.sum((2, 3, 4), keepdim=True) + 1e-3)},
    "constant weights": {"weigh": lambda w: w.detach()},
    "constant places": {"place": lambda uv: uv.detach()},
    "levels in reverse": {"weigh": lambda w: w.flip(-1)},
    "first camera": {"sum": lambda f, w: torch.einsum("blcq,bqpl->bcq", f[:, 0], w[:, :, 0])},
}


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_that_is_left_or_right(name):
    model, args = Looks(**NEARLY[name]), inputs()
    replaced = svexport.replace(model, args, verbose=False)
    assert WHAT not in whats(replaced)
    torch.testing.assert_close(outcome(replaced, args), outcome(model, args), rtol=1e-3, atol=1e-4)


def test_more_than_it_is_given():
    """Something else decides that does not show on these inputs."""

    class Masked(Looks):
        def __init__(self):
            super().__init__()
            self.mask = nn.Parameter(torch.zeros(8, 1))

        def forward(self, query, points, features, cameras):
            self.config.sum = lambda f, w: torch.einsum("bnlcq,bqnpl->bcq", f, w) + self.mask
            return super().forward(query, points, features, cameras)

    model, args = Masked(), inputs()
    replaced = svexport.replace(model, args, verbose=False)
    with torch.no_grad():
        for m in (model, replaced):
            m.mask.fill_(3.0)
    torch.testing.assert_close(replaced(*args), model(*args), rtol=1e-4, atol=1e-4)


def test_copies_keep_the_forward_and_go_back_to_the_authors():
    model, args = Looks(), inputs()
    replaced = svexport.replace(model, args, verbose=False)
    expected = model(*args)
    for same in (replaced, copy.deepcopy(replaced), pickle.loads(pickle.dumps(replaced))):  # noqa: S301
        assert type(same) is type(replaced)
        torch.testing.assert_close(same(*args), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(same(args[0], args[1], features=args[2], cameras=args[3]), expected)
    assert replaced.state_dict().keys() == model.state_dict().keys()
    for m in (model, replaced):
        m.range = (*RANGE[:3], 9.0, 7.0, 3.0)  # which the graph holds as constants
    torch.testing.assert_close(replaced(*args), model(*args), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model(*args), expected)


def test_compiles_whole():
    model, args = Looks(), inputs()
    torch.compiler.reset()
    compiled = torch.compile(svexport.replace(model, args, verbose=False), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*args), model(*args), rtol=1e-4, atol=1e-4)


def test_only_and_skip():
    model, args = Looks(), inputs()
    assert whats(svexport.replace(model, args, only="camera_sample", verbose=False)) == [WHAT]
    assert WHAT not in whats(svexport.replace(model, args, skip="camera_sample", verbose=False))


def test_export_is_no_larger(tmp_path):
    model, args = Looks(), inputs()
    with torch.no_grad():
        files = [tmp_path / "theirs.onnx", tmp_path / "ours.onnx"]
        for m, file in zip((model, svexport.replace(model, args, verbose=False)), files, strict=True):
            svexport.export(m, args, file, opset=16)
    assert files[1].stat().st_size <= files[0].stat().st_size
