"""What the tests of patterns compare: the outputs and all gradients of a model and of its rewritten copy."""

import torch

import svexport

__all__ = ["gradients_of", "replaced_with", "whats"]


def gradients_of(model, args):
    """Output, then gradients of tensors in floating point and of parameters."""
    given = [a.clone().requires_grad_() if a.is_floating_point() else a for a in args]
    output = model(*given)
    wanted = [a for a in given if a.requires_grad] + list(model.parameters())
    return [output, *torch.autograd.grad(output.square().sum(), wanted, allow_unused=True)]


def whats(model):
    return [r.before for r in model.svexport_replacements if not r.before.startswith("torch.")]


def replaced_with(model, args, what, others=()):
    """The copy, after comparing it on ``args`` and ``others``; and whether it has that part as an op."""
    replaced = svexport.replace(model, args, verbose=False)
    for given in (args, *others):
        torch.testing.assert_close(gradients_of(replaced, given), gradients_of(model, given), rtol=1e-4, atol=1e-4)
    return replaced, what in whats(replaced)
