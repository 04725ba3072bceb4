"""What other lines, functions and classes of a file tell of a value."""

from __future__ import annotations

import pytest

from tests.advise import codes


def test_a_function_that_views_takes_tensors(tmp_path):
    """Sizes and views of its arguments tell, where no annotation does; numpy has neither in this form."""
    for line, found in (("x.view(2, -1)", ["SVX206"]), ("x.size(1)", ["SVX206"]), ("x.view(int)", []), ("x.size", [])):
        text = f"import torch\n\n\ndef f(x):\n    y = {line}\n    return y, g(x).permute(0, 2, 1).permute(0, 2, 1)\n"
        assert codes(text, tmp_path) == found, line


@pytest.mark.parametrize(
    ("head", "found"),
    [
        ("@torch.no_grad()\ndef f(net, batches):", ["SVX304", "SVX101"]),
        ("@torch.inference_mode\ndef f(net, batches):", ["SVX304", "SVX101"]),
        ("def f(net, batches: list[torch.Tensor]):", ["SVX304", "SVX101"]),
        ("@torch.enable_grad()\ndef f(net, batches):", []),
        ("@torch.no_grad()\ndef train(net, batches):", []),
    ],
)
def test_functions_without_gradients_take_tensors(tmp_path, head, found):
    body = "    for x in batches:\n        best = net(x).softmax(1).argmax(1)\n        yield best.sum().item()\n"
    assert codes(f"import torch\n\n\n{head}\n{body}", tmp_path) == found


@pytest.mark.parametrize(("axis", "found"), [("dim=-1", ["SVX101"]), ("axis=-1", []), ('dim="time"', [])])
def test_reductions_along_a_dim_are_of_tensors(tmp_path, axis, found):
    """Numpy's along an axis, and those of other libraries along a name, are not."""
    body = f"    d = (a[0] - b).norm({axis})\n    return [float(d[i]) for i in range(3)]\n"
    assert codes(f"import torch\n\n\n@torch.no_grad()\ndef f(a, b):\n{body}", tmp_path) == found


@pytest.mark.parametrize(
    ("name", "line", "found"),
    [
        ("start", "return torch.zeros(3, 2).type_as(y)", ["SVX202"]),
        ("init_state", "return torch.zeros(3, 2).type_as(y)", ["SVX202"]),
        ("init_weights", "return torch.zeros(3, 2).type_as(self.weight)", []),
        ("train_step", "return torch.zeros(3, 2).type_as(y)", []),
    ],
)
def test_methods_that_a_forward_gives_tensors_are_reached(tmp_path, name, line, found):
    given = "y" if "y)" in line else "n"
    text = (
        f"import torch\n\n\nclass Cell(torch.nn.Module):\n    def {name}(self, {given}):\n        {line}\n\n\n"
        "class Model(torch.nn.Module):\n    def __init__(self):\n        self.cell = Cell()\n\n"
        f"    def forward(self, x: torch.Tensor, n):\n        return self.cell.{name}({'x' if given == 'y' else 'n'})\n"
    )
    assert codes(text, tmp_path) == found


@pytest.mark.parametrize(
    ("loop", "values", "found"),
    [
        ("for x in loader", ".tolist()", []),
        ("for x, y in zip(loader, paths)", ".tolist()", []),
        ("for x in loader", ".sum().item()", ["SVX101"]),  # which a sum on the device does without
        ("for x in range(8)", ".tolist()", ["SVX101"]),
        ("best = net(loader)\n    for i, name in enumerate(paths)", "; best[i].tolist()", []),
        ("best = net(loader).relu()\n    for i, name in enumerate(paths)", "; best[i].tolist()", ["SVX101"]),
    ],
)
def test_lists_of_a_batch_are_taken_batch_by_batch(tmp_path, loop, values, found):
    body = f"    {loop}:\n        yield net(x).argmax(dim=1){values}\n"
    assert codes(f"import torch\n\n\n@torch.no_grad()\ndef f(net, loader, paths):\n{body}", tmp_path) == found


@pytest.mark.parametrize(
    ("made", "found"),
    [("net(x)", ["SVX101"]), ("net(x).cpu()", []), ("net(x).detach().cpu().numpy()", []), ("np.load(x)", [])],
)
def test_values_on_the_host_are_not_waited_for(tmp_path, made, found):
    body = f"    y = {made}\n    return [y[i].item() for i in range(8)]\n"
    assert codes(f"import numpy as np\nimport torch\n\n\n@torch.no_grad()\ndef f(net, x):\n{body}", tmp_path) == found


def test_what_a_module_returns_it_returns_to_itself(tmp_path):
    forward = "    def forward(self, x):\n        return x.relu()\n\n"
    body = "        for row in self(x):\n            yield row.mean().item()\n"
    head = "    @torch.no_grad()\n    def each(self, x):\n"
    assert codes(f"import torch\n\n\nclass Model(torch.nn.Module):\n{forward}{head}{body}", tmp_path) == ["SVX101"]


@pytest.mark.parametrize(("call", "found"), [("self(x)", ["SVX304"]), ("self.forward(x)", ["SVX304"]), ("x", [])])
def test_a_method_that_runs_the_forward_takes_tensors(tmp_path, call, found):
    method = f"    def read(self, x):\n        y = {call}\n        return torch.softmax(y, 1).argmax(1)\n"
    assert codes(f"import torch\n\n\nclass Model(torch.nn.Module):\n{method}", tmp_path) == found


@pytest.mark.parametrize(("name", "found"), [("initial", ["SVX304"]), ("init_weights", []), ("initialize", [])])
def test_names_of_set_up_are_whole_words(tmp_path, name, found):
    method = f"    def {name}(self, x: torch.Tensor):\n        return torch.softmax(x, 1).argmax(1)\n"
    assert codes(f"import torch\n\n\nclass Model(torch.nn.Module):\n{method}", tmp_path) == found


FILE = """import torch
from torch import nn, Tensor

LIMITS = [0.0, 1.0]


{helper}


class Inner(nn.Module):
    MEAN = (0.5, 0.25)

    def __init__(self, bins, sizes=(1.0, 2.0)):
        super().__init__()
        self.sizes = sizes
        self.bins, self.count = bins, 2 * bins

    def grow(self):
        self.count += 1

    def forward(self, y):
        return {inner}, 3


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.inner = Inner()
        self.other = layer

    def image(self, x):
        return x.float().permute(0, 3, 1, 2)

    def forward(self, x: Tensor, p):
        {lines}
"""


@pytest.mark.parametrize(
    ("helper", "inner", "lines", "found"),
    [
        # An argument is what the callers in the file give, where all give the same.
        ("def f(p):\n    return len(p)", "y", "return f(x)", ["SVX103"]),
        ("def f(p):\n    return len(p)", "y", "return f(p)", []),
        ("def f(p):\n    return len(p)", "y", "return f(x), f([x])", []),
        ("def f(p):\n    return (p / (1 - p)).log()", "y", "return f(p)", ["SVX303"]),
        ("def f_loss(p):\n    return len(p)", "y", "return f_loss(x)", []),
        # What functions, methods and layers of the file return.
        ("def f(p):\n    return p, p.sigmoid()", "y", "_, z = f(x)\n        return len(z)", ["SVX103"]),
        ("def f(p):\n    return p, [1]", "y", "_, z = f(x)\n        return len(z)", []),
        ("def f(p):\n    if p is None:\n        return None\n    return p + 1", "y", "return len(f(x))", []),
        ("", "y.sigmoid()", "z, _ = self.inner(p)\n        return len(z)", ["SVX103"]),
        ("", "y.sigmoid()", "_, z = self.inner(p)\n        return len(z)", []),
        ("", "len(y)", "return self.inner(x)", ["SVX103"]),
        ("", "len(y)", "return self.inner(p)", []),
        # Constants are what the file, or the default of an argument, says.
        ("", "y * torch.tensor(self.sizes)", "return x", ["SVX106"]),
        ("", "y * torch.linspace(0, self.bins - 1, self.bins, device=y.device)", "return x", ["SVX106"]),
        ("", "y * torch.tensor(self.count)", "return x", []),
        ("", "y", "return x * torch.tensor(LIMITS)", ["SVX106"]),
        ("", "y", "LIMITS = p\n        return x * torch.tensor(LIMITS)", []),
        ("def f(p: Tensor):\n    return p * torch.tensor([1.0, 2.0])", "y", "return f(x)", ["SVX106"]),
        ("def f(p: Tensor):\n    return p * torch.arange(8)", "y", "return f(x)", []),
        ("def f(p):\n    return p.view(1, -1)", "y", "return x * f(p).repeat(3, 1)", ["SVX201"]),
        ("def f(p):\n    return p.view(2, -1)", "y", "return x * f(p).repeat(3, 1)", []),
        ("", "y * torch.tensor(self.MEAN)", "return x", ["SVX106"]),
        # What a forward gives is taken apart along axes: a tensor.
        ("def f(p):\n    return p[..., [0, 1]] * 2", "y", "return f(p)", ["SVX204"]),
        ("def f(p):\n    return p[0] * 2, [0, 1]", "y", "return f(p)", []),
        # Ranks are what the callers give, and what functions do with what they are given.
        (
            "def f(p):\n    return (p.unsqueeze(2) * p.unsqueeze(1)).sum(-1)",
            "y",
            "b, n, c = x.shape\n        return f(x)",
            ["SVX301"],
        ),
        (
            "def f(p):\n    return (p.unsqueeze(2) * p.unsqueeze(1)).sum(-1)",
            "y",
            "b, n, c = x.shape\n        return f(x), f(x[0])",
            [],
        ),
        (
            "def f(p):\n    return p.bmm(p)",
            "y",
            "f(x)\n        return (x.unsqueeze(2) * x.unsqueeze(1)).sum(-1)",
            ["SVX301"],
        ),
        # So are sizes of 1.
        (
            "def f(p, q):\n    return p * torch.conv2d(q, q).repeat(1, 1, 8, 8), p * q.repeat(1, 1, 8, 8)",
            "y",
            "return f(x, x.mean((2, 3), True))",
            ["SVX201"],
        ),
        (
            "def f(p, q):\n    return p * q.repeat(1, 1, 8, 8)",
            "y",
            "return f(x, x.mean((2, 3), True)), f(x, x)",
            [],
        ),
        # The order of axes is told by what makes the tensor.
        ("", "y", "return torch.conv2d(self.image(x).contiguous(), p)", ["SVX207"]),
        ("", "y", "return torch.conv2d(self.other(x).contiguous(), p)", []),
    ],
)
def test_what_other_functions_tell(tmp_path, helper, inner, lines, found):
    assert codes(FILE.format(helper=helper, inner=inner, lines=lines), tmp_path) == found


BASE = """import torch
from torch import nn, Tensor


class Base{bases}:
    def __init__(self, anchors: Tensor, dim=8):
        super().__init__()
        self.conv = nn.Conv2d(3, dim, 1)
        self.anchors = anchors

    def decode(self, x):
        return {decode}


class Head(Base):
    def forward(self, x):
        return {head}
"""


@pytest.mark.parametrize("bases", ["(nn.Module)", ""])
@pytest.mark.parametrize(
    ("decode", "head", "found"),
    [
        ("torch.cat((x, x), 1).nonzero()", "self.decode(x)", ["SVX104"]),
        ("torch.cat((x, x), 1).nonzero()", "x", []),
        ("x", "len(self.conv(x)[0])", ["SVX103"]),
        ("x", "len(self.lin(x)[0])", []),
        ("x", "len(self.anchors)", ["SVX103"]),
        ("len(x)", "self.decode(self.conv(x))", ["SVX103"]),
    ],
)
def test_what_a_base_has_its_heirs_have(tmp_path, bases, decode, head, found):
    assert codes(BASE.format(bases=bases, decode=decode, head=head), tmp_path) == found


@pytest.mark.parametrize(
    ("name", "annotation", "found"),
    [("MetricDepth", "Inner", ["SVX103"]), ("MetricDepth", "nn.Module", []), ("DepthMetric", "Inner", [])],
)
def test_layers_are_what_annotations_of_arguments_say(tmp_path, name, annotation, found):
    text = (
        "import torch\nfrom torch import nn\n\n\nclass Inner(nn.Module):\n    def forward(self, x):\n"
        f"        return x.relu(), 1\n\n\nclass {name}(nn.Module):\n    def __init__(self, net: {annotation}):\n"
        "        self.net = net\n\n    def forward(self, x):\n        y, _ = self.net(x)\n        return len(y)\n"
    )
    assert codes(text, tmp_path) == found


@pytest.mark.parametrize(
    ("head", "found"),
    [
        ("def f(model: Model, x):", ["SVX101"]),
        ("def f(model, x):", []),
        ("def f(x):\n    model = Model().cuda().eval()", ["SVX101"]),
        ("def f(x):\n    model = load(Model()).eval()", []),
    ],
)
@pytest.mark.parametrize("call", ["model(x)", "model.read(x)"])
def test_models_of_the_file_are_known_outside_of_classes(tmp_path, head, call, found):
    method = "(self, x: torch.Tensor):\n        return 1, x.argmax(1)\n\n"
    text = (
        f"import torch\n\n\nclass Model(torch.nn.Module):\n    def forward{method}    def read{method}\n"
        f"@torch.no_grad()\n{head}\n    _, best = {call}\n    return [int(k) for k in best]\n"
    )
    assert codes(text, tmp_path) == found


@pytest.mark.parametrize(
    ("argument", "made", "found"),
    [
        ("bands", "Norm(bands=5)", ["SVX103"]),
        ("bands", "Norm(5), Norm(2)", ["SVX103"]),
        ("bands", "Norm(5), Norm(2.5)", []),
        ("bands", "None", []),
        ("bands: int", "None", ["SVX103"]),
        ("bands: float", "Norm(5)", []),
        ("bands=0.5", "Norm(5)", []),
    ],
)
def test_attributes_are_integers_where_the_file_says_so(tmp_path, argument, made, found):
    text = (
        f"import torch\n\n\nclass Norm(torch.nn.Module):\n    def __init__(self, {argument}):\n"
        "        self.bands = bands\n\n"
        f"    def forward(self, x):\n        return x, int(x.shape[1] / self.bands)\n\n\nLAYERS = {made}\n"
    )
    assert codes(text, tmp_path) == found


@pytest.mark.parametrize(
    ("base", "head", "found"),
    [
        ("torch.nn.Module", "@torch.no_grad()", ["SVX204"]),
        ("torch.nn.Module", "", []),
        ("Thing", "@torch.no_grad()", []),
    ],
)
def test_modules_without_gradients_have_no_arrays(tmp_path, base, head, found):
    text = (
        f"import torch\n\n\nclass Model({base}):\n    {head}\n    def collide(self, boxes):\n"
        "        return boxes[..., [0, 1]] * 2\n"
    )
    assert codes(text, tmp_path) == found
