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
        gate = self.gate(x)
        mask = torch.sigmoid(self.where(x))
        up = self.up(x.mean((2, 3), keepdim=True))
        return x * gate + x * mask, x * up.repeat(1, 1, 2, 2)


def example_inputs():
    return (torch.randn(2, 6, 6, 6),)
