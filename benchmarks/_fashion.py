"""Loads Fashion-MNIST for the benchmarks, and defines the losses that they train with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import _report  # noqa: F401 (adds the examples to the path)
from fashion_mnist import fashion_mnist


def images() -> TensorDataset:
    """Return the training images as bytes, of shape (1, 28, 28), with their labels."""
    data = fashion_mnist()
    pixels = torch.from_numpy(data.train_images).unsqueeze(1)
    return TensorDataset(pixels, torch.from_numpy(data.train_labels).long())


@cache
def vectors(test: bool = False, mean: float = 0.0, deviation: float = 1.0) -> TensorDataset:
    """Return training or test images as vectors of 784 numbers, with their labels."""
    data = fashion_mnist()
    pixels, labels = (
        (data.test_images, data.test_labels) if test else (data.train_images, data.train_labels)
    )
    x = (torch.from_numpy(pixels).flatten(1).float() / 255 - mean) / deviation
    return TensorDataset(x, torch.from_numpy(labels).long())


def small_cnn(seed: int = 0) -> nn.Module:
    """Return a CNN of 1.9 MB for images of shape (1, 28, 28)."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 48, 5, stride=2), nn.ReLU()),
        *(nn.Conv2d(48, 128, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(3200, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return the cross entropy of inputs that are floats."""
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def pixel_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return the cross entropy of images that are bytes."""
    pixels, labels = batch
    return nn.functional.cross_entropy(model(pixels / 255), labels)


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """Return the percentage of test images that the model classifies correctly."""
    inputs, labels = test.tensors
    with torch.no_grad():
        found = model(inputs).argmax(dim=1)
    return 100 * float((found == labels).float().mean())
