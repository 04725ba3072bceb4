"""Small tensors that are kept from call to call."""

import gc
import weakref

import torch

from svexport.ops import _kept


def double(t):
    return 2 * t


def test_made_again_when_the_tensor_is_written_to():
    t = torch.arange(3)
    first = _kept.kept_of(t, double)
    assert _kept.kept_of(t, double) is first
    t[1] = 7
    assert _kept.kept_of(t, double).tolist() == [0, 14, 4]
    assert _kept.kept_of(t.clone(), double) is not first
    assert _kept.kept_of(t, torch.neg).tolist() == [0, -7, -2]


def test_goes_with_the_tensor():
    t = torch.arange(3)
    kept = weakref.ref(_kept.kept_of(t, double))
    del t
    gc.collect()  # of other tensors too, which tests before have left
    assert kept() is None


def test_nothing_is_kept_of_tensors_of_modes():
    t = torch.ones(2)
    with torch.inference_mode():
        assert _kept.kept_of(t, double) is not _kept.kept_of(t, double)
        assert _kept.zeros(t, (2,)) is not _kept.zeros(t, (2,))
    kept = _kept.zeros(t, (2,))
    assert kept is _kept.zeros(t, (2,))
    assert not kept.is_inference()
    assert torch.compile(lambda x: x + _kept.zeros(x, (2,)), backend="eager", fullgraph=True)(t).tolist() == [1, 1]
