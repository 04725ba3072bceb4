from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from examples import stgcn

LAYOUTS = list(stgcn.LAYOUTS)

# joints of the left half of the body and their twins on the right, numbered as the data sets' papers do
MIRROR = {
    "ntu-rgb+d": {5: 9, 6: 10, 7: 11, 8: 12, 13: 17, 14: 18, 15: 19, 16: 20, 22: 24, 23: 25},
    "kinetics": {2: 5, 3: 6, 4: 7, 8: 11, 9: 12, 10: 13, 14: 15, 16: 17},
}


@pytest.fixture(scope="module")
def net() -> stgcn.STGCN:
    return stgcn.model(frames=16)


# ---------------------------------------------------------------------------------------------------------- graph


@pytest.mark.parametrize(("layout", "joints"), [("ntu-rgb+d", 25), ("kinetics", 18)])
def test_skeleton_is_a_tree(layout, joints):
    graph = stgcn.Graph(layout)
    assert graph.layout.joints == joints
    assert len(graph.layout.bones) == joints - 1
    assert graph.hops.isfinite().all()  # connected, and with joints - 1 bones free of cycles


@pytest.mark.parametrize("layout", LAYOUTS)
def test_skeleton_is_symmetric(layout):
    first = 1 if layout == "ntu-rgb+d" else 0
    twin = {a - first: b - first for a, b in MIRROR[layout].items()}
    twin |= {b: a for a, b in twin.items()}
    bones = {frozenset(bone) for bone in stgcn.LAYOUTS[layout].bones}
    assert {frozenset(twin.get(joint, joint) for joint in bone) for bone in bones} == bones


@pytest.mark.parametrize(
    ("layout", "joint", "hops"),
    [
        ("ntu-rgb+d", 20, 0),  # the centre itself
        ("ntu-rgb+d", 3, 2),  # head, by the neck
        ("ntu-rgb+d", 15, 6),  # left foot: spine, base, hip, knee, ankle, foot
        ("ntu-rgb+d", 23, 6),  # right finger tip: shoulder, elbow, wrist, hand, thumb, tip
        ("kinetics", 16, 3),  # right ear: nose, eye, ear
        ("kinetics", 13, 4),  # left ankle: shoulder, hip, knee, ankle
    ],
)
def test_hops_from_the_centre(layout, joint, hops):
    graph = stgcn.Graph(layout)
    assert graph.hops[graph.layout.centre, joint] == hops
    assert torch.equal(graph.hops, graph.hops.T)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_subsets_add_up_to_the_mean_over_neighbours(layout):
    graph = stgcn.Graph(layout)
    joints = graph.layout.joints
    neighbours: list[set[int]] = [{joint} for joint in range(joints)]
    for a, b in graph.layout.bones:
        neighbours[a].add(b)
        neighbours[b].add(a)
    expected = np.zeros((joints, joints), dtype=np.float32)
    for joint in range(joints):
        for neighbour in neighbours[joint]:
            expected[neighbour, joint] = 1 / len(neighbours[joint])

    assert graph.adjacency.shape == (3, joints, joints)
    torch.testing.assert_close(graph.adjacency.sum(0), torch.from_numpy(expected))
    torch.testing.assert_close(graph.adjacency.sum((0, 1)), torch.ones(joints))  # each column is a mean


@pytest.mark.parametrize("layout", LAYOUTS)
def test_subsets_are_the_spatial_configuration(layout):
    graph = stgcn.Graph(layout)
    distance = graph.hops[graph.layout.centre]
    root, centripetal, centrifugal = (subset > 0 for subset in graph.adjacency)

    assert torch.equal(root, torch.eye(graph.layout.joints, dtype=torch.bool))
    for neighbour, joint in centripetal.nonzero().tolist():
        assert distance[neighbour] == distance[joint] - 1
    for neighbour, joint in centrifugal.nonzero().tolist():
        assert distance[neighbour] == distance[joint] + 1
    assert torch.equal(centripetal, centrifugal.T)
    # a tree has one way in from every joint but the centre
    assert torch.equal(centripetal.sum(0), (distance > 0).long())


def test_unknown_layout_is_refused():
    with pytest.raises(ValueError, match=r"unknown layout 'coco', expected one of ntu-rgb\+d, kinetics"):
        stgcn.Graph("coco")


# -------------------------------------------------------------------------------------------------------- network


def test_graph_convolution_is_the_explicit_sum():
    n, c_in, c_out, k, t, v = 2, 3, 4, 3, 2, 5
    torch.manual_seed(0)
    layer = stgcn.GraphConv(c_in, c_out, k).double()
    x, A = torch.randn(n, c_in, t, v, dtype=torch.float64), torch.randn(k, v, v, dtype=torch.float64)
    got = layer(x, A).detach().numpy()

    weight = layer.conv.weight.detach().numpy().reshape(k, c_out, c_in)
    bias = layer.conv.bias.detach().numpy().reshape(k, c_out)
    for index in np.ndindex(n, c_out, t, v):
        b, c, frame, joint = index
        expected = 0.0
        for subset in range(k):
            for neighbour in range(v):
                mixed = weight[subset, c] @ x[b, :, frame, neighbour].numpy() + bias[subset, c]
                expected += A[subset, neighbour, joint].item() * mixed
        assert got[index] == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("frames", "expected"), [(300, (300, 150, 75)), (37, (37, 19, 10)), (1, (1, 1, 1))])
def test_shapes_through_the_strides(frames, expected):
    net = stgcn.STGCN(classes=7).eval()
    shapes = []
    for block in net.blocks:
        block.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    with torch.inference_mode():
        scores = net(torch.randn(1, 3, frames, 25, 1))
    assert scores.shape == (1, 7)
    assert shapes == [
        *[(1, 64, expected[0], 25)] * 4,
        *[(1, 128, expected[1], 25)] * 3,
        *[(1, 256, expected[2], 25)] * 3,
    ]


def test_parameter_count(net):
    """3.1 M, the size known of the published network; three quarters of it are the temporal kernels."""
    subsets, joints, kernel, classes = 3, 25, 9, 60
    widths = [3, 64, 64, 64, 64, 128, 128, 128, 256, 256, 256]
    spatial = sum(a * b * subsets + b * subsets for a, b in pairwise(widths))
    temporal = sum(b * b * kernel + b for b in widths[1:])
    norms = sum(2 * 2 * b for b in widths[1:]) + 2 * 3 * joints
    edges = 10 * subsets * joints**2
    shortcuts = sum(a * b + b + 2 * b for a, b in [(64, 128), (128, 256)])  # only where the width changes
    classifier = 256 * classes + classes

    total = sum(parameter.numel() for parameter in net.parameters())
    assert total == spatial + temporal + norms + edges + shortcuts + classifier
    assert total == pytest.approx(3.1e6, rel=0.01)


def test_people_are_averaged(net):
    clip = stgcn.example_clips(frames=16, people=2, clips=2, seed=3)
    with torch.inference_mode():
        both, first, second = net(clip), net(clip[..., :1]), net(clip[..., 1:])
    torch.testing.assert_close(both, (first + second) / 2, rtol=1e-4, atol=1e-4)
    assert (first - second).abs().max() > 0.1


def test_joints_meet_along_bones_and_frames_within_the_kernel(net):
    block = net.blocks[0]
    x = torch.randn(1, 3, 16, 25)
    moved = x.clone()
    moved[:, :, 8, 3] += 1  # the head, in one frame
    with torch.inference_mode():
        changed = (block(x, net.A) != block(moved, net.A)).any(dim=1)[0]  # (T, V)
    assert set(changed.any(dim=0).nonzero().flatten().tolist()) == {2, 3}  # neck and head
    assert set(changed.any(dim=1).nonzero().flatten().tolist()) == set(range(4, 13))  # nine frames


def test_training_step_lowers_the_loss():
    torch.manual_seed(0)
    net = stgcn.STGCN(classes=4, dropout=0.1)
    clips, labels = stgcn.example_clips(frames=12, people=1, clips=4, seed=1), torch.arange(4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(net(clips), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in net.parameters())


# -------------------------------------------------------------------------------------------------------- example


@pytest.mark.parametrize(("layout", "shape", "classes"), [("ntu-rgb+d", (300, 25), 60), ("kinetics", (150, 18), 400)])
def test_model_carries_inputs_of_the_data_set(layout, shape, classes):
    net = stgcn.model(layout)
    (clip,) = net.example_inputs
    assert clip.shape == (1, 3, *shape, 2)
    assert not net.training
    with torch.inference_mode():
        scores = net(clip)
    assert scores.shape == (1, classes)
    assert scores.isfinite().all()
    assert scores.std() > 0.5  # an answer that could be wrong, not a constant


def test_model_is_deterministic_and_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    first, again, other = stgcn.model(frames=8), stgcn.model(frames=8), stgcn.model(frames=8, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(first.state_dict(), again.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(first.example_inputs, again.example_inputs, rtol=0, atol=0)
    assert not torch.equal(first.classifier.weight, other.classifier.weight)


def test_model_hides_no_parameter(net):
    for name, value in net.state_dict().items():
        neutral = 0.0 if name.endswith(("bias", "running_mean")) else 1.0
        if "num_batches" not in name and name != "A":
            assert (value != neutral).float().mean() > 0.9, name


def test_example_bones_keep_their_length():
    clip = stgcn.example_clips(frames=9)
    for a, b in stgcn.LAYOUTS["ntu-rgb+d"].bones:
        length = (clip[:, :, :, a] - clip[:, :, :, b]).norm(dim=1)
        torch.testing.assert_close(length, torch.full_like(length, 0.25))
    assert (clip[:, :, 1:] != clip[:, :, :-1]).all()  # and everything moves


def test_script_exports_at_opset_11(monkeypatch, capsys):
    calls = []

    def export(model, **options):
        calls.append((type(model).__name__, options))
        return "exported"

    monkeypatch.setitem(sys.modules, "svexport", SimpleNamespace(export=export))
    monkeypatch.setattr(sys, "argv", ["stgcn.py", "--frames", "8", "--output", "there.onnx"])
    stgcn.main()
    assert calls == [("STGCN", {"path": "there.onnx", "opset": 11})]
    assert capsys.readouterr().out.endswith("exported\n")


def test_script_runs_without_svexport(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "svexport", None)  # makes the import fail
    monkeypatch.setattr(sys, "argv", ["stgcn.py", "--frames", "8", "--layout", "kinetics"])
    stgcn.main()
    output = capsys.readouterr().out
    assert "(1, 3, 8, 18, 2)" in output
    assert "nothing exported" in output
