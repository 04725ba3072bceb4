import torch
import torch.nn.functional as func
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, clouds, weights):
        x = self.encode(clouds)
        y = self.encode(func.normalize(x, dim=-1))
        scaled = torch.softmax(y, -1) * weights[:, None, None]
        for layer, name in zip(self.encode, ("linear", "tanh")):
            assert name, layer
        return scaled / y.shape[1] + weights.softmax(0)[:, None, None]


def example_inputs():
    return torch.rand(3, 5, 4), torch.rand(3)
