import torch as th
from torch import nn


class Model(nn.Module):
    def forward(self, image: th.Tensor) -> th.Tensor:
        phases = [image[..., row::2, column::2] for column in (0, 1) for row in range(2)]
        return th.concat(phases, dim=1)  # SVX203


def example_inputs():
    return (th.rand(1, 3, 6, 4),)
