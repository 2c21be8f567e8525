"""`paceline doctor`: check this machine and a Ray cluster, and measure its workers."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import click

from paceline.cli.show import json_option, patience, print_json, table
from paceline.core.extras import INSTALL_RAY, MissingRay

RAY = (2, 59)
"""The oldest supported version of Ray, see pyproject.toml."""
ROOM = 2**30
"""Bytes of memory, and of shared memory, that a cluster on this machine needs for objects."""
SLOW = 2.0
"""A worker that is this many times slower than the quickest gets a warning."""
_GRACE = 10.0  # seconds beyond the timeout, for Ray to start and to end


@dataclass(frozen=True)
class Finding:
    """The result of one check, and how to fix it."""

    level: Literal["ok", "warning", "error"]
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level:8} {self.text}" + (f"\n{'':8} -> {self.fix}" if self.fix else "")


@click.command()
@click.option(
    "--address", help="Address of a running cluster, or auto; by default a cluster is started here."
)
@click.option(
    "--workers", type=click.IntRange(min=1), help="Number of workers to start and measure."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    help="Seconds that the cluster has to answer.",
)
@json_option
def doctor(address: str | None, workers: int | None, timeout: float, as_json: bool) -> None:
    """Check this machine and a Ray cluster, and measure its workers.

    Exit code 1: a run would fail. Warnings do not count.
    """
    mine = host()
    findings = list(of_host(mine))
    cluster: Mapping[str, Any] = {}
    if not any(finding.level == "error" for finding in findings):
        with patience("asking Ray"):
            cluster = ask(address, workers, timeout)
        findings += of_cluster(cluster, mine, address)
    found = cluster.get("workers", {})
    if as_json:
        told = [asdict(finding) for finding in findings]
        print_json({"host": mine, "cluster": cluster, "findings": told})
    else:
        for finding in findings:
            click.echo(str(finding))
        if found:
            click.echo("\n" + _measured(found))
    if any(finding.level == "error" for finding in findings):
        raise click.exceptions.Exit(1)


def host() -> dict[str, Any]:
    """Return data about this machine; without Ray, only the version of Python."""
    try:
        from paceline.engines.ray.cluster.checkup import host as known
    except MissingRay as error:
        missing = error.reason
    except ImportError as error:
        missing = f"Ray cannot be imported: {error}"
    else:
        return known()
    return {"missing": missing, "versions": {"python": platform.python_version()}}


def ask(address: str | None, workers: int | None, timeout: float) -> dict[str, Any]:
    """Examine the cluster in another process; kill the process after the timeout."""
    given = json.dumps({"address": address, "workers": workers, "timeout": timeout})
    command = [sys.executable, "-m", "paceline.engines.ray.cluster.checkup", given]
    return answer_of(command, timeout + _GRACE)


def answer_of(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return the last line that a process prints, as JSON; kill it with its child processes."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # so that killpg reaches its children
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"error": f"no answer in {seconds:g} s"}
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = output.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        answer = None
    if isinstance(answer, dict):
        return answer
    return {"error": f"Ray exited with code {process.returncode} and gave no answer"}


# --- findings ----------------------------------------------------------------------------------


def of_host(mine: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the findings on this machine."""
    there = mine["versions"]
    if "missing" in mine or "ray" not in there:
        yield Finding("error", mine.get("missing", "Ray is not installed"), INSTALL_RAY)
        return
    told = ", ".join(f"{name} {version}" for name, version in there.items())
    if _release(there["ray"]) < RAY:
        wanted = ".".join(map(str, RAY))
        yield Finding("error", f"{told}: Ray is too old", f'pip install "ray[default]>={wanted}"')
    elif "torch" not in there:
        yield Finding("error", f"{told}: PyTorch is missing", "pip install torch")
    else:
        yield Finding("ok", told)
    load, cores = mine.get("load"), mine["cores"]
    if load is not None and cores and load > cores:
        yield Finding(
            "warning",
            f"a load of {load:.1f} on {cores} cores: other processes compute here",
            "end them, or expect Ray to start slowly and workers to be slow",
        )
    free, shared = mine["free_memory"], mine["shared_memory"]
    text = f"{mine['cores']} cores, {_size(free)} of {_size(mine['memory'])} memory free"
    if free is not None and free < ROOM:
        yield Finding(
            "warning", text, "end processes that use much memory: a cluster here needs 1 GiB"
        )
    else:
        yield Finding("ok", text)
    if shared is not None and shared < ROOM:
        fix = "enlarge /dev/shm: docker run --shm-size=2g, or mount -o remount,size=2G /dev/shm"
        yield Finding("warning", f"{_size(shared)} of shared memory free, Ray needs 1 GiB", fix)
    elif shared is not None:
        yield Finding("ok", f"{_size(shared)} of shared memory free")
    threads = mine["threads"]
    text = ", ".join(f"{name}={value}" for name, value in threads.items())
    many = [n for n, v in threads.items() if v.isdigit() and int(v) > (mine["cores"] or 1)]
    if many:
        fix = f"export {many[0]}={mine['cores']}, or less"
        yield Finding("warning", f"{text}: more threads than cores", fix)
    else:
        yield Finding(
            "ok", text or "no thread limit is set here; Ray limits the threads of workers"
        )


def of_cluster(
    cluster: Mapping[str, Any], mine: Mapping[str, Any], address: str | None
) -> Iterator[Finding]:
    """Yield the findings on the answer of a cluster, or on its missing answer."""
    if "error" in cluster:
        fix = (
            "on the head: ray start --head --port 6379; here: --address HOST:6379, a port that "
            "no firewall blocks, and the same RAY_AUTH_MODE and token"
            if address
            else "run `ray start --head`, which prints the cause"
        )
        yield Finding("error", f"Ray: {cluster['error']}", fix)
        return
    nodes, workers = cluster["nodes"], cluster["workers"]
    cpus = sum(node["cpus"] for node in nodes)
    where = "started here for this check" if cluster["started"] else f"at {address}"
    count = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    yield Finding("ok", f"Ray {cluster['ray']} {where}: {count}, {cpus:g} CPUs")
    yield _authentication(cluster)
    yield from _versions(workers, mine)
    yield from _threads(workers)
    yield from _speeds(workers)


def _authentication(cluster: Mapping[str, Any]) -> Finding:
    if cluster["authentication"] == "token":
        return Finding("ok", "authenticated by a token")
    if cluster["started"]:
        return Finding(
            "warning",
            "not authenticated: Ray listens on all addresses of this machine, although its node "
            "is on loopback; any process that reaches a port can run code",
            "unset RAY_AUTH_MODE (the default here is token), or close the ports",
        )
    return Finding(
        "warning",
        "not authenticated: any process that reaches a port of the cluster can run code on it",
        "run ray get-auth-token --generate, copy the token to all machines, and set "
        "RAY_AUTH_MODE=token",
    )


def _versions(workers: Mapping[str, Any], mine: Mapping[str, Any]) -> Iterator[Finding]:
    for name, here in mine["versions"].items():
        others = {
            worker: facts["versions"].get(name, "missing") for worker, facts in workers.items()
        }
        if differing := [worker for worker, version in others.items() if version != here]:
            told = ", ".join(f"{worker} {others[worker]}" for worker in differing[:4])
            level: Literal["error", "warning"] = "warning" if name == "numpy" else "error"
            fix = f"install {name} {here} there" if name != "python" else f"use Python {here} there"
            yield Finding(level, f"{name} is {here} here, but differs on workers: {told}", fix)


def _threads(workers: Mapping[str, Any]) -> Iterator[Finding]:
    on = Counter(facts["node"] for facts in workers.values())
    seen = set()
    for worker, facts in workers.items():
        node, cores = facts["node"], facts["cores"] or 1
        if node in seen:
            continue
        seen.add(node)
        told = facts["threads"].get("OMP_NUM_THREADS", "")
        threads = int(told) if told.isdigit() else cores
        if on[node] * threads > cores:
            text = (
                f"{facts['host']} has {cores} cores for {on[node]} workers of {threads} threads "
                f"each ({worker} and others): they slow each other down"
            )
            fewer = f"use {cores} workers there or fewer"
            fix = (
                fewer if threads == 1 else f"export OMP_NUM_THREADS=1 before ray start, or {fewer}"
            )
            yield Finding("warning", text, fix)


def _speeds(workers: Mapping[str, Any]) -> Iterator[Finding]:
    speeds = {worker: facts["gigaflops"] for worker, facts in workers.items()}
    quick, slow = max(speeds, key=speeds.__getitem__), min(speeds, key=speeds.__getitem__)
    times = speeds[quick] / speeds[slow]
    if times >= SLOW:
        yield Finding(
            "warning",
            f"{slow} is {times:.1f} times as slow as {quick}",
            "use a policy that does not wait for it: `paceline profile` and `paceline plan` "
            "choose one",
        )


def _measured(workers: Mapping[str, Any]) -> str:
    rows = [
        [
            name,
            facts["host"],
            str(facts["cores"]),
            _size(facts["free_memory"]),
            facts["threads"].get("OMP_NUM_THREADS", "all"),
            f"{facts['gigaflops']:.3g}",
            f"{1e3 * facts['latency']:.3g}",
            f"{facts['bytes_per_second'] / 1e6:.4g}",
        ]
        for name, facts in workers.items()
    ]
    columns = ("worker", "host", "cores", "free", "threads", "Gflop/s", "latency ms", "MB/s")
    return table(columns, rows)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _size(count: int | None) -> str:
    from paceline.report.text import in_bytes

    return "an unknown amount" if count is None else in_bytes(count)
