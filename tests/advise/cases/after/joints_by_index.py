import torch
from torch import nn

SWAPPED = (1, 3, 0, 3, 2)
PARENTS = (1, 3, 0, 3, 2)


class Model(nn.Module):
    def forward(self, joints):
        flipped = torch.flip(joints, (2,))
        return flipped[:, SWAPPED], joints - joints[:, PARENTS]


def example_inputs():
    return (torch.randn(2, 5, 7),)
