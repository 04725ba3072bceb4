import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def forward(self, heat):
        local = F.pad(F.max_pool2d(heat, 3, stride=1), (1, 1, 1, 1))
        return heat * (heat == local)


def example_inputs():
    return (torch.randn(2, 3, 7, 5),)
