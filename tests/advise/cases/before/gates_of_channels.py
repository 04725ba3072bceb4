import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 3, 1), nn.ReLU(), nn.Conv2d(3, 6, 1), nn.Sigmoid()
        )
        self.where, self.up = nn.Conv2d(6, 1, 3, padding=1), nn.ConvTranspose2d(6, 6, 3)

    def forward(self, x):
        _, c, h, w = x.shape
        gate = self.gate(x).repeat(1, 1, h, w)  # SVX201
        mask = torch.sigmoid(self.where(x))
        up = self.up(x.mean((2, 3), keepdim=True))
        return x * gate + x * mask.repeat(1, c, 1, 1), x * up.repeat(1, 1, 2, 2)  # SVX201


def example_inputs():
    return (torch.randn(2, 6, 6, 6),)
