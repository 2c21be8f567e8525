"""Expressions are read as data: whatever they say, nothing but known names is called."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

import paceline as pl
from paceline.cli.expressions import CODECS, parse
from paceline.core.state import describe


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("sync()", pl.sync()),
        (" k_sync(6) ", pl.k_sync(6)),
        ("k_sync(k=3, samples=8)", pl.k_sync(3, 8)),
        ("bandit(4, hedge=2)", pl.bandit(4, hedge=2)),
        ("bandit(2, index=Thompson())", pl.bandit(2, index=pl.selection.Thompson())),
        ("ata(6)", pl.ata(6)),
        ("rennala(4)", pl.rennala(4)),
        ("ringmaster(16, stops=False)", pl.ringmaster(16, stops=False)),
        ("asynchronous(max_staleness=inf, damping=True)", pl.asynchronous()),
        ("k_async(2)", pl.k_async(2)),
        ("local_sgd(8)", pl.local_sgd(8)),
        ("deadline(2.5)", pl.deadline(2.5)),
        ("Gather(placement=BySpeed())", pl.policies.Gather(placement=pl.BySpeed())),
        ("OnlyWorkers(['w0', 'w2'], sync())", pl.policies.OnlyWorkers(["w0", "w2"], pl.sync())),
        ("k_sync(Schedule({0: 2, 10: 4}))", pl.k_sync(pl.policies.Schedule({0: 2, 10: 4}))),
        (
            "Until(MinWorkers(2, sync()), steps=9)",
            pl.policies.Until(pl.policies.MinWorkers(2, pl.sync()), 9),
        ),
    ],
)
def test_what_is_written_is_what_is_built(text: str, policy: Any) -> None:
    assert describe(parse(text)) == describe(policy)
    assert describe(parse(describe(policy))) == describe(policy)  # as journals name it


def test_codecs_are_built() -> None:
    assert parse("Feedback(TopK(0.1))", CODECS) == pl.codecs.Feedback(pl.codecs.TopK(0.1))
    assert parse("asynchronous()").max_staleness == inf


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("__import__('os').system('true')", "is not a call"),
        ("k_sync(__import__('os'))", "'__import__'"),
        ("k_sync(open('x'))", "'open'"),
        ("k_sync(().__class__)", "use numbers, strings, lists"),
        ("k_sync(*[1])", "use numbers, strings, lists"),
        ("k_sync(**{'k': 1})", "one by one"),
        ("k_sync(10 ** 10)", "use numbers, strings, lists"),
        ("k_sync([x for x in (1,)])", "use numbers, strings, lists"),
        ("k_sync({[1]: 2})", "use numbers, strings, lists"),
        ("k_sync({**{}})", "use numbers, strings, lists"),
        ("k_sync(k := 2)", "use numbers, strings, lists"),
        ("(lambda: k_sync(2))()", "is not a call"),
        ("eval('1')", "'eval' is unknown; known are Backups"),
        ("Trainer()", "'Trainer' is unknown"),
        ("Int8()", "'Int8' is unknown"),  # known, and no policy
        ("k_sync", "lacks its arguments"),
        ("k_sync(", "cannot be read"),
        ("k_sync()", "missing 1 required"),
        ("k_sync(0)", "use k >= 1"),
        ("sync(" + "(" * 300 + ")" * 300 + ")", "cannot be read"),
        ("k_sync(" + "1" * 20_000 + ")", "use at most 10000"),
        ("", "cannot be read"),
    ],
)
def test_what_else_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse(text)
    assert told in str(refused.value)
