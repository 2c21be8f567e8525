"""Group codes: exact from every set that may remain, or refused; never in between."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codes import generators as make
from paceline.codes.base import NotDecodable
from paceline.codes.blocks import combine_rows, message_length
from paceline.codes.generators import Matrix
from paceline.codes.groups import CACHED, Grouped
from tests.unit.codes.exchange import error, gradients, messages, worst
from tests.unit.codes.test_generators import HAMMING


@pytest.mark.parametrize(("n", "d", "m"), [(8, 4, 2), (12, 4, 2), (24, 6, 3)])
def test_exact_from_every_set(n: int, d: int, m: int) -> None:
    code = Grouped(n, make.best(d, m))
    assert (code.stragglers, code.load, code.messages, code.parts) == (d - m, d, m, n)
    assert worst(code) < 1e-14
    assert worst(code, np.float32) < 5e-7


@pytest.mark.parametrize(
    "generator",
    [
        make.repetition(3),
        make.parity(4),
        make.identity(3),
        make.systematic(5, 3, range(50)),
        make.gaussian(5, 3, range(50)),
        make.harmonic(7, 3),
        make.matrix(HAMMING),
    ],
)
def test_every_kind_is_exact(generator: Matrix) -> None:
    code = Grouped(2 * len(generator[0]), generator)
    assert worst(code, length=61) < 1e-13


def test_too_few_answers_are_refused() -> None:
    """Three of a group of four are missing, where two may be; both other groups are whole."""
    code = Grouped(12, make.best(4, 2))
    with pytest.raises(NotDecodable, match=r"rows 4, 5, 7 of group 1 \(rows 4 to 7\) are missing"):
        code.decode(set(range(12)) - {4, 5, 7})
    with pytest.raises(NotDecodable, match="and 2 other groups"):
        code.decode([])
    assert issubclass(NotDecodable, ValueError)


def test_many_may_be_missing_if_no_group_lacks_too_many() -> None:
    code = Grouped(12, make.best(4, 2))
    g = gradients(code)
    assert error(code, g, messages(code, g), {0, 1, 4, 6, 10, 11}) < 1e-14
    collector = code.collector()
    assert [collector.add(row) for row in (0, 1, 2, 3, 4, 5, 6, 7, 8)] == [False] * 9
    assert collector.add(8) is False  # the same again
    assert collector.add(11) is True and collector.ready


def test_a_code_that_is_not_mds_decodes_when_the_rank_allows() -> None:
    """The Hamming code bears any two missing, most sets of three, and never four."""
    code = Grouped(7, HAMMING)
    g = gradients(code, 40)
    sent = messages(code, g)
    outcomes = {True: 0, False: 0}
    for missing in combinations(range(7), 3):
        rows = [row for row in range(7) if row not in missing]
        rank = np.linalg.matrix_rank(np.array(HAMMING)[:, rows])
        collector = code.collector()
        for row in rows:
            collector.add(row)
        assert collector.ready == (rank == 4)
        outcomes[collector.ready] += 1
        if rank == 4:
            assert error(code, g, sent, missing) < 1e-13
        else:
            with pytest.raises(NotDecodable):
                code.decode(rows)
    assert min(outcomes.values()) > 0


@given(st.integers(1, 5), st.integers(0, 3), st.integers(1, 3), st.integers(0, 999), st.data())
@settings(max_examples=80, deadline=None)
def test_decode_is_exact_or_refuses(
    m: int, more: int, groups: int, seed: int, data: st.DataObject
) -> None:
    d = m + more
    g = np.random.default_rng(seed).integers(-2, 3, (m, d)).astype(float)
    if np.linalg.matrix_rank(g) < m or not g.any(axis=0).all():
        return
    code = Grouped(groups * d, g)
    missing = data.draw(st.sets(st.integers(0, code.n - 1)))
    rows = [row for row in range(code.n) if row not in missing]
    collector = code.collector()
    order = data.draw(st.permutations(rows))
    for row in order:
        collector.add(row)
    ranks = [
        np.linalg.matrix_rank(g[:, [r % d for r in rows if r // d == group]])
        for group in range(groups)
    ]
    assert collector.ready == (min(ranks) == m)
    if collector.ready:
        vectors = gradients(code, 17)
        assert error(code, vectors, messages(code, vectors), missing) < 1e-9
    else:
        with pytest.raises(NotDecodable):
            code.decode(rows)


def test_repetition_is_fractional_repetition() -> None:
    """One answer of each group is added as it is, bit for bit."""
    code = Grouped(6, make.repetition(3))
    g = gradients(code, 50)
    sent = messages(code, g)
    np.testing.assert_array_equal(sent[4], g[3] + g[4] + g[5])
    assert code.decode({1, 2, 5}) == {1: (1.0,), 5: (1.0,)}
    np.testing.assert_array_equal(combine_rows(code.decode({1, 2, 5}), sent, 50), sent[1] + sent[5])


def test_identity_is_reduce_scatter() -> None:
    """As in reduce-scatter: each message is a block of the sum, bit for bit."""
    code = Grouped(3, make.identity(3))
    g = gradients(code, 60, np.float32)
    sent = messages(code, g)
    whole = combine_rows(code.decode(range(3)), sent, 60)
    np.testing.assert_array_equal(whole, np.stack([sent[0], sent[1], sent[2]], axis=1).reshape(-1))
    total = g.astype(np.float64).sum(axis=0).astype(np.float32)
    np.testing.assert_array_equal(whole, total)


def test_blocks_sent_as_they_are_need_no_arithmetic() -> None:
    code = Grouped(4, make.parity(4))
    unit = {0: (1.0, 0.0, 0.0), 1: (0.0, 1.0, 0.0), 2: (0.0, 0.0, 1.0)}
    assert code.decode([0, 1, 2]) == code.decode([3, 2, 1, 0]) == unit
    chain = {0: (1.0, -1.0, 0.0), 2: (0.0, -1.0, 1.0), 3: (0.0, 1.0, 0.0)}
    assert code.decode([0, 2, 3]) == chain


def test_every_answer_helps() -> None:
    """Weights of four answers are smaller than of any two, so that rounding grows less."""
    code = Grouped(4, make.gaussian(4, 2, [5]))
    size = {
        count: max(
            np.linalg.norm(list(code.decode(rows).values()))
            for rows in combinations(range(4), count)
        )
        for count in (2, 3, 4)
    }
    assert size[4] < size[3] < size[2]


@pytest.mark.parametrize(("length", "m", "numbers"), [(600, 3, 200), (601, 3, 201), (2, 3, 1)])
def test_message_length(length: int, m: int, numbers: int) -> None:
    code = Grouped(12, make.best(6, m))
    g = gradients(code, length)
    sent = messages(code, g)
    assert {message.shape for message in sent.values()} == {(numbers,)}
    assert sum(message.size for message in sent.values()) == 12 * message_length(length, m)
    assert error(code, g, sent, {0, 1, 2}) < 1e-14


def test_whole_blocks_of_padding() -> None:
    """31 numbers in 10 blocks of 4: one block is cut short, and one is nothing but zeros."""
    code = Grouped(10, make.identity(10))
    g = gradients(code, 31)
    assert error(code, g, messages(code, g), ()) < 1e-15


def test_an_ill_conditioned_generator_is_decoded_as_well_as_can_be() -> None:
    """With this condition number, normal equations would leave 1e-2 of the other blocks."""
    close = 1e-7
    code = Grouped(4, [[1.0] * 4, [1.0 + i * close for i in range(4)]])
    assert 1e7 < code.condition < 1e8
    weights = np.array(list(code.decode([1, 2, 3]).values()))
    residual = np.array(code.generator)[:, 1:] @ weights - np.eye(2)
    assert np.abs(residual).max() < 1e-7


def test_support() -> None:
    """A message does not change, bit for bit, when a part that its row does not hold does."""
    code = Grouped(8, make.best(4, 2))
    g = gradients(code)
    before = messages(code, g)
    for part in range(8):
        changed = g.copy()
        changed[part] += 1e6
        after = messages(code, changed)
        for row in range(8):
            same = bool((before[row] == after[row]).all())
            assert same == (part not in code.row(row))


def test_noise_grows_by_the_condition_number_at_most() -> None:
    """Oracle: for lines at equal angles of 45 degrees the ratio is 0.996 at the worst pair."""
    code = Grouped(4, make.harmonic(4))
    rng = np.random.default_rng(1)
    blocks = rng.standard_normal((2, 5000))
    generator = np.array(code.generator)
    ratios = []
    for pair in combinations(range(4), 2):
        columns = generator[:, pair]
        sent = columns.T @ blocks
        noisy = sent + 1e-4 * np.linalg.norm(sent) / np.sqrt(sent.size) * rng.standard_normal(
            sent.shape
        )
        found = combine_rows(code.decode(pair), dict(zip(pair, noisy, strict=True)), 10_000)
        relative = np.linalg.norm(found - blocks.T.reshape(-1)) / np.linalg.norm(blocks)
        ratios.append(relative / (np.linalg.cond(columns) * 1e-4))
    assert max(ratios) == pytest.approx(0.996, abs=0.01)


def test_the_cache_is_bounded() -> None:
    code = Grouped(13, make.harmonic(13, 3))
    for pattern in range(1 << 13):
        rows = [t for t in range(13) if pattern >> t & 1]
        if len(rows) >= 3:
            code.decode(rows)
    assert len(code._decoders) == CACHED


def test_ten_thousand_workers() -> None:
    """Every group loses up to s at random; the sum is exact all the same."""
    code = Grouped(10_000, make.best(10, 5))
    rng = np.random.default_rng(0)
    missing = {
        group * 10 + t
        for group in range(1000)
        for t in rng.choice(10, rng.integers(0, 6), replace=False).tolist()
    }
    g = gradients(code, 10)
    assert error(code, g, messages(code, g), missing) < 1e-12


def test_codes_are_values() -> None:
    assert Grouped(8, make.best(4, 2)) == Grouped(8, np.array(make.best(4, 2)))
    assert hash(Grouped(4, [[1, 1, 1, 1]])) == hash(Grouped(4, make.repetition(4)))
    with pytest.raises(ValueError, match=r"n=10 is no multiple.*use 8 or 12 workers, or hybrid"):
        Grouped(10, make.best(4, 2))
    with pytest.raises(ValueError, match="row 8 is not of this code"):
        Grouped(8, make.best(4, 2)).row(8)
    with pytest.raises(ValueError, match="row -1 is not of this code"):
        Grouped(8, make.best(4, 2)).decode([-1, 0])
