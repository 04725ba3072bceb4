"""Copies of functions whose names are rebound to ops, however they are reached and whatever is done to the copy."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from types import MethodType, ModuleType

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import svexport
from svexport import ops
from svexport.exporter.functions import NAMES
from tests.exporter import reached


class Seen(TorchFunctionMode):
    """The functions of torch that have an op and are called nevertheless."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in NAMES:
            self.names.append(NAMES[function])
        return function(*args, **(kwargs or {}))


def left_to_torch(model, *args):
    with Seen() as seen:
        model(*args)
    return seen.names


def inputs():
    torch.manual_seed(0)
    return torch.randn(2, 3, 5, 5), torch.rand(2, 5, 5, 2) * 2 - 1


METHODS = sys.version_info >= (3, 11)


@pytest.fixture(scope="module")
def everything():
    if not METHODS:
        pytest.skip("methods of tensors are bound from Python 3.11 on")
    args = inputs()
    model = reached.Everything()
    return model, svexport.replace(model, args, verbose=False), args


def test_whatever_way_a_function_is_reached(everything):
    model, replaced, args = everything
    (left,) = replaced.svexport_left_alone
    assert (left.kind, left.reason) == ("its forward as a graph", "its forward makes tensors of its own")
    # The one with out=, which the op leaves to torch.
    assert left_to_torch(replaced, *args) == ["torch.linalg.inv"]
    assert len(left_to_torch(model, *args)) > 30
    torch.testing.assert_close(replaced(*args), model(*args), rtol=1e-5, atol=1e-5)


def test_nothing_but_private_names_is_added_to_modules(everything):
    code = f"import {reached.__name__} as reached; print(*vars(reached))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    added = vars(reached).keys() - set(told.stdout.split())
    assert added
    assert all(name.startswith("_svexport_") for name in added)
    assert not [name for name in vars(torch.nn.functional) if "svexport" in name]
    assert (
        reached.warp.__code__.co_names == ("F", "grid_sample", "scale", "entered")
        or "F" in reached.warp.__code__.co_names
    )
    assert type(everything[0]) is reached.Everything


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),  # noqa: S301 - written here
        lambda model: pickle.loads(pickle.dumps(model, protocol=2)),  # noqa: S301
    ],
)
def test_copies_are_like_the_copy(everything, copied):
    model, replaced, args = everything
    other = copied(replaced)
    assert [type(m) for m in other.modules()] == [type(m) for m in replaced.modules()]
    assert type(other.helper) is type(replaced.helper)
    assert left_to_torch(other, *args) == ["torch.linalg.inv"]
    torch.testing.assert_close(other(*args), model(*args), rtol=1e-5, atol=1e-5)
    assert not {id(p) for p in other.parameters()} & {id(p) for p in replaced.parameters()}


def test_pickle_is_read_in_a_fresh_process(everything, tmp_path):
    model, replaced, args = everything
    torch.save((replaced, args, model(*args)), tmp_path / "model.pt")
    code = f"""
import torch
from tests.exporter.test_rebind import left_to_torch
replaced, args, expected = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
assert left_to_torch(replaced, *args) == ["torch.linalg.inv"]
torch.testing.assert_close(replaced(*args), expected, rtol=1e-5, atol=1e-5)
print("read", type(replaced).__qualname__)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path.cwd(), check=False)
    assert told.stdout == "read Everything\n", told.stderr


def test_globals_are_those_of_the_module(everything, monkeypatch):
    _, replaced, (x, grid) = everything
    before, entered = replaced.function(x, grid), reached.entered
    monkeypatch.setattr(reached, "scale", 2.0)
    torch.testing.assert_close(replaced.function(x, grid), 2 * before)
    assert reached.entered == entered + 1


def test_no_call_costs_more_than_that_of_the_op():
    """Every Python function that a forward enters, beside those of a model that calls the ops itself."""

    class ByHand(reached.Small):
        def warp(self, x, grid):
            return ops.grid_sample(x, grid, align_corners=False)

        def forward(self, x, grid):
            y = self.warp(self.conv(x), grid)
            return ops.einsum("nchw,ncij->nhwij", y, x)

    def entered(model):
        names = []
        with torch.no_grad():
            model(*args)  # caches
            sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
            try:
                model(*args)
            finally:
                sys.setprofile(None)
        return names

    args = inputs()
    replaced = svexport.replace(reached.Small(), args, verbose=False)
    assert entered(replaced) == entered(ByHand())
    assert torch.overrides._get_current_function_mode_stack() == []


def test_compiles_whole():
    args = inputs()
    model = reached.Small()
    replaced = svexport.replace(model, args, verbose=False)
    torch.compiler.reset()
    compiled = torch.compile(replaced, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*args), model(*args), rtol=1e-5, atol=1e-5)
    assert "svexport.einsum" in str(torch.export.export(replaced, args).graph)


def test_scripts_to_the_functions_of_the_text():
    args = inputs()
    model = reached.Small()
    replaced = svexport.replace(model, args, verbose=False)
    scripted = torch.jit.script(replaced)
    assert "svexport" not in str(scripted.inlined_graph)
    torch.testing.assert_close(scripted(*args), model(*args), rtol=1e-5, atol=1e-5)
    torch.jit.save(scripted, io.BytesIO())


@pytest.mark.filterwarnings("ignore")
def test_trains_under_ddp_and_fsdp(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    args = inputs()
    model = reached.Small()
    replaced = svexport.replace(model, args, verbose=False)
    model(*args).square().sum().backward()
    expected = model.conv.weight.grad
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(replaced))
        parallel(*args).square().sum().backward()
        torch.testing.assert_close(parallel.module.conv.weight.grad, expected)
        sharded = copy.deepcopy(replaced)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        sharded(*args).square().sum().backward()
        torch.testing.assert_close(sharded.conv.weight.grad.full_tensor(), expected)
    finally:
        torch.distributed.destroy_process_group()


def test_what_cannot_be_bound_is_left_alone_with_the_reason():
    args = inputs()
    model = reached.Unbindable()
    replaced = svexport.replace(model, args, verbose=False)
    forward, *left = replaced.svexport_left_alone
    assert (forward.kind, forward.name) == ("its forward as a graph", "")
    assert forward.reason
    functions = [a.source.partition(" in ")[2].partition(":")[0] for a in left]
    assert functions == ["of_a_table", "imported", "forward", "forward"]  # the last calls what has no lines
    *named, text = [a.reason for a in left]
    assert all("by no name that can be bound" in reason for reason in named)
    assert text == "from_text was executed from text, in globals that are no module's"
    assert [r.source.partition(" in ")[2].partition(":")[0] for r in replaced.svexport_replacements] == ["warp"]
    assert len(left_to_torch(replaced, *args)) == 4
    torch.testing.assert_close(replaced(*args), model(*args), rtol=1e-5, atol=1e-5)


def test_generated_code_is_left_alone():
    """torch.fx makes it anew for every copy."""
    args, model = inputs(), torch.fx.symbolic_trace(reached.Base())
    replaced = svexport.replace(model, args, verbose=False)
    assert replaced.svexport_replacements == []
    assert [a.reason for a in replaced.svexport_left_alone] == [
        "forward was executed from text, in globals that are no module's"
    ]
    torch.testing.assert_close(replaced(*args), model(*args), rtol=0, atol=0)


def test_without_inputs_everything_that_is_found_is_bound():
    args = inputs()
    replaced = svexport.replace(reached.Everything(), verbose=False)
    assert {r.proof for r in replaced.svexport_replacements} == {"not proven: no inputs"}
    assert any(
        r.source.endswith('in mix: return einsum("nchw,cd->ndhw", x, w)') for r in replaced.svexport_replacements
    )
    assert not METHODS or left_to_torch(replaced, *args) == ["torch.linalg.inv"]


def test_those_who_collect_classes_do_not_see_the_copies():
    collected = []

    class Registered(nn.Module):
        def __init_subclass__(cls, **kwargs):
            collected.append(cls)

    class Model(Registered):
        def forward(self, x):
            return torch.linalg.inv(x)

    replaced = svexport.replace(Model(), torch.eye(3)[None], verbose=False)
    assert len(replaced.svexport_replacements) == 1
    assert collected == [Model]


def test_objects_of_others_stay_theirs():
    class Shared(reached.Helper):
        def __deepcopy__(self, memo):
            return self

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = Shared()

        def forward(self, x, grid):
            return self.shared.sample(x, grid)

    model = Model()
    replaced = svexport.replace(model, inputs(), verbose=False)
    assert type(model.shared) is Shared
    assert len(replaced.svexport_left_alone) == 1


def test_functions_that_load_many_names():
    """More than one byte has room for: instructions with a prefix have it."""
    names = [f"name_{i}" for i in range(300)]
    module = ModuleType("many_names")
    module.__dict__.update(dict.fromkeys(names, 0.0), torch=torch, nn=nn)
    sums = " + ".join(names)
    for text, bound in (
        (f"return torch.linalg.inv(x) + {sums}", False),  # loads torch before all others
        (f"y = {sums}; return torch.linalg.inv(x) + y", True),
        (f"y = {sums}; return x.inverse() + y", METHODS),
    ):
        exec(f"class Many(nn.Module):\n    def forward(self, x):\n        {text}\n", module.__dict__)  # noqa: S102
        sys.modules["many_names"] = module
        try:
            replaced = svexport.replace(module.Many(), 2 * torch.eye(3)[None], verbose=False)
        finally:
            del sys.modules["many_names"]
        assert len(replaced.svexport_replacements) == bound
        assert [a.reason for a in replaced.svexport_left_alone] == ["its code has no room to load another name"][bound:]
        torch.testing.assert_close(replaced(2 * torch.eye(3)[None]), torch.eye(3)[None] / 2)


def test_a_forward_of_its_own():
    """Which some repositories put on an instance before they export it."""

    def forward(self, x, grid):
        return self.warp(x, grid) + torch.einsum("nchw->nchw", x)

    args, model = inputs(), reached.Small()
    model.forward = MethodType(forward, model)
    replaced = svexport.replace(model, args, verbose=False)
    assert len(replaced.svexport_replacements) == 2
    assert replaced.forward.__self__ is replaced
    assert left_to_torch(replaced, *args) == []
    torch.testing.assert_close(replaced(*args), model(*args), rtol=1e-5, atol=1e-5)


def test_names_that_mean_another_thing_later(monkeypatch):
    """A cell of a notebook is run again: an earlier copy keeps what it has, a new one has the new function."""
    args, model = inputs(), reached.Derived()
    first = svexport.replace(model, args, verbose=False)
    before = first(*args)

    def forward(self, x, grid):
        return torch.nn.functional.grid_sample(x, grid, align_corners=True) * 3

    forward.__qualname__ = "Base.forward"
    monkeypatch.setattr(reached.Base, "forward", forward)
    second = svexport.replace(model, args, verbose=False)
    torch.testing.assert_close(second(*args), model(*args), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(first(*args), before, rtol=0, atol=0)
    assert left_to_torch(second, *args) == left_to_torch(first, *args) == []


def test_a_copy_is_replaced_again():
    args = inputs()
    partly = svexport.replace(reached.Small(), args, only="einsum", verbose=False)
    assert left_to_torch(partly, *args) == ["torch.nn.functional.grid_sample"]
    replaced = svexport.replace(partly, args, verbose=False)
    assert [r.before for r in replaced.svexport_replacements] == ["torch.nn.functional.grid_sample"]
    assert left_to_torch(replaced, *args) == []
    assert left_to_torch(pickle.loads(pickle.dumps(replaced)), *args) == []  # noqa: S301 - written here
    torch.testing.assert_close(replaced(*args), partly(*args), rtol=1e-5, atol=1e-5)
