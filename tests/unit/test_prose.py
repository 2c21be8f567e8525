"""The documentation in plain English: short sentences, and the words of the field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (
    "../README",
    "../CONTRIBUTING",
    "../SECURITY",
    *(
        page.relative_to(DOCS).with_suffix("").as_posix()
        for page in sorted(DOCS.rglob("*.md"))
        if "_build" not in page.parts
    ),
)
MOST_WORDS = 25
ALLOWED: tuple[str, ...] = ()  # beginnings of sentences that may be longer; keep it short
BANNED = {  # a private term: the word of the field
    r"tiles?": "data shard",
    r"storms?|weather": "fault simulation",
    r"whoever|somebody|anybody|nobody": "worker, node, process; no worker",
    r"patience": "timeout",
    r"letters?": "message",
    r"the books": "state, ledger",
    r"doors?": "result check, validation",
    r"main nodes?": "central coordinator",
    r"sees? to|lets? go of|gives? back": "recover, retry, release",
    r"not heard of": "overdue",
    r"the slow ones?": "straggler",
}
_CODE = "Code"  # in the place of inline code: one word, which may begin a sentence
_ABBREVIATED = ("et al", "e.g", "i.e", "vs", "cf")


def without_code(text: str) -> str:
    """Return a page without fenced blocks, HTML, code and targets of links."""
    text = re.sub(r"^( *)(```+|~~~+).*?^\1\2[ \t]*$", "", text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->|</?\w[^>\n]*>", "", text, flags=re.S)
    text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", _CODE, text, flags=re.S)
    return re.sub(r"\]\([^)\s]*\)", "]", text)


def passages(text: str) -> Iterator[str]:
    """Yield paragraphs and items of lists; leave out titles, tables and descriptions of images."""
    text = re.sub(r"!\[[^\]]*\]", "", without_code(text))
    held: list[str] = []
    for line in [*text.splitlines(), ""]:
        bare = line.strip()
        ends = not bare or bare.startswith(("#", "|"))
        if ends or re.match(r"([-*+]|\d+[.)]) ", bare):
            if held:
                yield " ".join(held)
            held = []
        if not ends:
            held.append(re.sub(r"^([-*+]|\d+[.)]) ", "", bare))


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of the running text."""
    for passage in passages(text):
        plain = re.sub(r"[*\[\]]|(?<!\w)_|_(?!\w)", "", passage)
        begun = ""
        for piece in re.split(r"(?<=[.!?])[)\"”]* +(?=[\"“(]?[A-Z0-9])", plain):
            begun = f"{begun} {piece}".strip()
            if not begun.rstrip(".").endswith(_ABBREVIATED):
                yield begun
                begun = ""
        if begun:
            yield begun


def words(sentence: str) -> int:
    return sum(any(c.isalnum() for c in word) for word in sentence.split())


def faults(text: str) -> list[str]:
    """Return a line for each long sentence, each banned term and each indirect subject."""
    found = []
    for sentence in sentences(text):
        if (count := words(sentence)) > MOST_WORDS and not sentence.startswith(ALLOWED):
            found.append(f"{count} words, at most {MOST_WORDS}: {sentence}")
        indirect = re.match(r"(Who|Whoever|What|None|One that|Those who)\b", sentence)
        if indirect and not re.search(r"\?|:$", sentence):
            found.append(f"{indirect[0]!r} is no subject; name it: {sentence}")
    for line in without_code(text).splitlines():
        for term, better in BANNED.items():
            if hit := re.search(rf"\b(?:{term})\b", line, re.I):
                found.append(f"{hit[0]!r}; write {better!r}: {line.strip()}")
    return found


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_in_plain_english(name: str) -> None:
    found = faults((DOCS / f"{name}.md").read_text())
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", PAGES)
def test_a_longer_sentence_fails_on_every_page(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text()
    longer = " ".join(["word"] * MOST_WORDS)
    assert not faults(f"{text}\nA {longer[5:]}.\n")
    assert len(faults(f"{text}\nA {longer}.\n")) == 1


SHORT = "It waits for k results."
LONG = "A step waits " + "and waits " * 12 + "again."


def test_sentences_are_counted_one_by_one() -> None:
    assert words(LONG) == 28
    assert faults(LONG) and not faults(SHORT)
    assert list(sentences(f"{SHORT} {SHORT}\n{SHORT}")) == [SHORT] * 3
    assert faults(f"- {SHORT}\n- {LONG}\n") and faults(f"1. {LONG}") and faults(f"  {LONG}")
    assert not faults(f"- {LONG[:60]}\n- {LONG[:60]}\n")  # items are not one sentence
    assert not faults(f"{LONG[:-7]}: `again`.".replace("waits and waits and ", "", 6))


def test_code_does_not_end_or_lengthen_a_sentence() -> None:
    assert list(sentences("Use `a. B c` now. `x = 1` is code.")) == [
        "Use Code now.",
        "Code is code.",
    ]
    assert list(sentences("As in Dutta et al. (2018). See arXiv 1803.01113.")) == [
        "As in Dutta et al. (2018).",
        "See arXiv 1803.01113.",
    ]
    assert not faults(f"```text\n{LONG}\n```\n\n| {LONG} |\n\n`{LONG}`\n\n# {LONG}\n")
    assert not faults(f"[{SHORT}](a/{'b' * 99}.md#tiles) ![{LONG}](figures/x.svg)")


@pytest.mark.parametrize("term", ["tile", "Tiles", "whoever", "a storm", "the slow one", "nobody"])
def test_private_terms_are_found_outside_of_code(term: str) -> None:
    assert faults(f"Here is {term}.") and faults(f"| {term} |") and faults(f"## {term}")
    assert not faults(f"Here is `{term}`.") and not faults(f"```python\n{term}\n```")


def test_a_subject_is_named() -> None:
    assert faults("Who does not wait leaves work unused.")
    assert not faults("Who is slow? Whole batches count. What the worker does:")


SOURCE = ROOT / "src" / "paceline"
MODULES = sorted(SOURCE.rglob("*.py"))
ARGUMENTS = ("tiles?", "patience")  # names of arguments, so their docstrings may use them


def docstrings(source: str) -> Iterator[str]:
    """Yield the prose of each public docstring; arguments become items of a list."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and not getattr(node, "name", "module").startswith("_"):
            text = ast.get_docstring(node) or ""
            text = re.sub(r"^ *>>> .*?(\n\n|\Z)", "\n", text, flags=re.M | re.S)
            text = re.sub(r"\n\n(?: {4}.*(?:\n|\Z)|\n(?= {4}))+", "\n\n", text)
            yield re.sub(r"^(\w+(?:, \w+)*): ", r"- \1: ", text, flags=re.M)


def docstring_faults(source: str) -> list[str]:
    """Return a line for each long sentence and each banned term in public docstrings."""
    found = []
    for text in docstrings(source):
        found += [each for each in sentences(text) if words(each) > MOST_WORDS]
        for term in BANNED.keys() - set(ARGUMENTS):
            found += re.findall(rf".*\b(?:{term})\b.*", without_code(text), re.I)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_public_docstrings_are_in_plain_english(path: Path) -> None:
    found = docstring_faults(path.read_text())
    assert not found, "\n".join(found)


@pytest.mark.parametrize("owner", ["", "class A:", "def a():", "async def a():"])
def test_a_long_docstring_is_found(owner: str) -> None:
    def planted(text: str) -> str:
        quoted = f'"""{SHORT}\n\n{text}\n"""'
        return f"{owner}\n" + (indent(quoted, "    ") if owner else quoted)

    assert docstring_faults(planted(LONG)) == [LONG]
    assert docstring_faults(planted(f"a, b: {SHORT}\n    {LONG}")) == [LONG]
    assert docstring_faults(planted(f"a: one of these:\n    {LONG}"))
    assert docstring_faults(planted(f">>> 1\n1\n\n{LONG}")) == [LONG]
    assert docstring_faults(planted(f"As code:\n\n    x = 1\n\n{LONG}")) == [LONG]
    assert docstring_faults(planted("The slow one waits; a tile does not.")) == [
        "The slow one waits; a tile does not."
    ]
    assert not docstring_faults(planted(f"a: {LONG[:60]}\nb: {LONG[:60]}"))
    assert not docstring_faults(planted(f"As code:\n\n    {LONG}\n\n    {LONG}"))
    assert not docstring_faults(planted(f">>> {LONG!r}\n{LONG!r}"))


def test_private_docstrings_are_free() -> None:
    assert not docstring_faults(f'def _a():\n    """{LONG}"""\n')
