import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def forward(self, heat):
        local = torch.zeros_like(heat)
        local[:, :, 1:-1, 1:-1] = F.max_pool2d(heat, 3, stride=1)  # SVX105
        return heat * (heat == local)


def example_inputs():
    return (torch.randn(2, 3, 7, 5),)
