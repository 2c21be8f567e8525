"""What a session sends to its run: the trained part of the model, without a frozen base."""

from __future__ import annotations

import pickle

import numpy as np
import torch
from torch import nn

from paceline.learners.frozen import frozen_parameters
from paceline.sessions.learner import learner_of
from paceline.sessions.session import recipe_of


def net() -> nn.Sequential:
    torch.manual_seed(0)
    base = nn.Linear(512, 512).bfloat16().requires_grad_(False)
    return nn.Sequential(base, nn.BatchNorm1d(512), nn.Linear(512, 2))


def test_a_frozen_base_is_not_sent() -> None:
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    recipe = recipe_of(model, torch.optim.AdamW(model.parameters(), lr=0.1), None, None, ())
    sent = pickle.dumps(recipe.model)
    assert len(sent) < 40_000 < model.get_parameter("0.weight").nbytes
    hub = learner_of(recipe, 8, 64)
    server = hub.server()
    start = server.vector.copy()
    server.step([1.0], [np.ones_like(start)], frozenset())
    assert (server.vector[: server.layout.trained] < start[: server.layout.trained]).all()
    frozen = {name for name, _ in frozen_parameters(model)}
    assert frozen == {"0.weight", "0.bias"}
    assert server.export().keys() == before.keys() - frozen
    places = server.places()
    assert (
        places is not None
        and {*places.starts} | {*places.rest(start[-1025:])} == {*before.keys()} - frozen
    )
    assert "frozen" not in hub.about()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
