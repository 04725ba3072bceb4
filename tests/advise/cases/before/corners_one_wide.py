import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.range = (-51.2, -40.0, -5.0, 51.2, 60.0, 3.0)
        self.register_buffer("low", torch.tensor(self.range[:3]))
        self.register_buffer("size", torch.tensor(self.range[3:]) - self.low)

    def forward(self, points):
        low, high = self.range[:3], self.range[3:]
        metres = points.clone()
        metres[..., 0:1] = points[..., 0:1] * (high[0] - low[0]) + low[0]  # SVX105
        metres[..., 1:2] = points[..., 1:2] * (high[1] - low[1]) + low[1]
        metres[..., 2:3] = points[..., 2:3] * (high[2] - low[2]) + low[2]
        return metres


def example_inputs():
    return (torch.rand(2, 7, 3),)
