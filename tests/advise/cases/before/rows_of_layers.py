import torch
import torch.nn.functional as func
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, clouds, weights):
        x = self.encode(clouds)
        unit = torch.stack([func.normalize(row, dim=-1) for row in x.unbind(0)])  # SVX102
        y = self.encode(unit)
        scaled = []
        for _, (row, weight) in enumerate(zip(y, weights)):  # SVX102
            scaled.append(torch.softmax(row, -1) * weight)
        return torch.stack(scaled) / y.shape[1] + weights.softmax(0)[:, None, None]


def example_inputs():
    return torch.rand(3, 5, 4), torch.rand(3)
