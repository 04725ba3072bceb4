import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        mean = torch.tensor([0.485, 0.456, 0.406], device=x.device)  # SVX106
        return x - mean[:, None, None]


def example_inputs():
    return (torch.rand(2, 3, 4, 4),)
