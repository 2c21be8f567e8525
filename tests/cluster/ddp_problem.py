"""A small problem for scripts under torchrun, the same on every rank."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import TensorDataset


def classified(samples: int, width: int, classes: int, seed: int) -> TensorDataset:
    """Return random but learnable samples and their classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, width, generator=generator)
    labels = (inputs @ torch.randn(width, classes, generator=generator)).argmax(dim=1)
    return TensorDataset(inputs, labels)


def perceptron(*sizes: int, seed: int) -> nn.Sequential:
    """Return layers of these sizes."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])
