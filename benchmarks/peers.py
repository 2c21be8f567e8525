"""Seconds to a loss beside DDP, torchft, Ray Train, Hivemind and DiLoCo, on the same four hosts.

Hosts are network namespaces on this machine (`paceline.testing.hosts`): 100 Mbit/s, 20 ms round
trips, 1.2 cores for the four training processes together. A CNN of 1.9 MB learns Fashion-MNIST, 512
samples a step (`--model gpt`: a GPT of 3.3 MB on tinyshakespeare, 64 windows a step). Each arm
trains from the same weights until the loss on held-out samples is reached. The process on host 0
keeps its model every ten steps. This script computes the losses, outside the limits of the hosts.

calm       equal hosts
speeds     cores as 1 : 1 : 2 : 4
stalls     every 10 s, all processes of a random host other than the driver's stop for 2 s
slow link  the link of one host has a tenth of its rate
far        all links have 20 Mbit/s, and 50 ms each way through two of them
killed     every 60 s all processes of a host are killed; the host is back after 20 s
added      the run begins with three hosts, and the fourth is added after 5 s

`--install` makes virtual environments for torchft, Hivemind and Ray Train. `--log FILE` has a line
for each run at once, and `--continue` leaves out the runs that the file has. `--tune` shows how the
learning rates were chosen.

    python benchmarks/peers.py [--quick] [--only ARM,ARM] [--scenarios NAME,NAME] [--seeds 3]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import venv
from argparse import Namespace
from contextlib import ExitStack, suppress
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import torch

import paceline as pl
from _bench_hosts import Testbed
from _report import OtherLoad, finish, machine, parser, table
from arms import families
from arms.lines import user_lines
from arms.rates import EASY, RATES, TARGET, Judge, tune
from arms.run import HOSTS, LIMIT, SCENARIOS, START, Run, Scenario
from arms.task import Order
from paceline.testing import groups
from paceline.testing.hosts import missing

CORES = 1.2  # of the four training processes together


# Family of processes and kind of learning rate of each arm. Ours begin with "paceline".
ARMS: dict[str, tuple[type[families.Family], str]] = {
    "ddp": (families.Gloo, "step"),
    "ddp + shares": (families.Gloo, "step"),
    "diloco": (families.Gloo, "local"),
    "ray train": (families.RayTrain, "step"),
    "torchft": (families.Torchft, "step"),
    "torchft diloco": (families.Torchft, "local"),
    "hivemind": (families.Hivemind, "step"),
    "sync": (families.Paceline, "step"),
    "sync + shares": (families.Paceline, "step"),
    "k_sync(3)": (families.Paceline, "step"),
    "rennala": (families.Paceline, "step"),
    "local_sgd": (families.Paceline, "local"),
    "local_sgd + shares": (families.Paceline, "local"),
    "sync + top 1 %": (families.Paceline, "step, few"),
    "local_sgd + few numbers": (families.Paceline, "local, few"),
    "local_sgd + shares + overlap": (families.Paceline, "local, overlap"),
    "local_sgd + shares + bf16": (families.Paceline, "local"),
    "auto": (families.Paceline, "step"),
    "session + shares": (families.Sessions, "step"),
    "local_steps": (families.Sessions, "local"),
    "local_steps + overlap": (families.Sessions, "local, overlap"),
}
OURS = list(ARMS)[list(ARMS).index("sync") :]
QUICK = ["ddp", "diloco", "sync + shares", "local_sgd + shares"]
# The arm of ours that bounds apply to, by model. It was named before the run, for all scenarios.
NAMED = {"cnn": "local_sgd + shares", "gpt": "local_sgd + few numbers"}
# Its seconds to those of the best rival, in the median over seeds.
BOUNDS = {name: 1.05 if name == "calm" else 1.0 for name in SCENARIOS}
QUICK_BOUNDS = {"calm": 1.25, "speeds": 1.0}


class Bench:
    """All arms on the same hosts, one run at a time."""

    def __init__(
        self,
        stack: ExitStack,
        arms: list[str],
        venvs: Path,
        model: str,
        easy: bool,
        limit: float = LIMIT,
    ) -> None:
        self._limit = limit
        self._bed = Testbed(HOSTS, CORES, stack)
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._model, self._target = model, (EASY if easy else TARGET)[model]
        self._judge, self._runs, self._gone = Judge(model), 0, set[int]()
        with_ray = any(ARMS[arm][0].needs_ray for arm in arms)
        here = Path(__file__).parent
        paths = [Path(pl.__file__).parents[1], here, here.parent / "examples"]
        if (site := families.RayTrain.site(venvs)) is not None:
            paths.append(site)  # its workers are processes of Ray's nodes
        found = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        self._ray = self._bed.hosts.start_ray(cpus=1, env=found, timeout=START) if with_ray else ""
        kinds = {ARMS[arm][0] for arm in arms} | {families.Torchrun}
        self._families = {k: k(self._bed, self._folder, self._ray, venvs) for k in kinds}

    def run(self, arm: str, name: str, seed: int) -> dict[str, Any]:
        """Train once; return the result, or why there is none."""
        scenario, kind = SCENARIOS[name], ARMS[arm][0]
        if scenario.elastic and kind is families.Gloo:
            kind = families.Torchrun
        family, order = self._families[kind], self._order(arm, seed, scenario)
        result = {"arm": arm, "scenario": name, "seed": seed, "model": self._model}
        result |= {"target": self._target, "lines": user_lines(kind.module, arm)}
        if reason := family.why_not():
            return result | {"not_run": reason}
        hosts = [host for host in range(HOSTS) if not (scenario.added and host == HOSTS - 1)]
        try:
            if scenario.elastic or self._gone:
                for each in self._families.values():
                    each.end()  # the run begins with processes on the hosts that are there
            self._restore(hosts)
            family.prepare(order, hosts)
            self._bed.limit_all(family.mark)
            self._bed.speeds(scenario.speeds)
            self._bed.links(scenario.rate, scenario.delay, scenario.slow)
            family.give(order)
            given = self._bed, family, order, scenario, self._judge, self._gone, self._limit
            result |= Run(*given).follow()
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            result["failed"] = str(error)[-500:]
            family.end()
        finally:
            self._bed.speeds()
            self._bed.links()
        if scenario.elastic or "failed" in result:
            family.end()
        return result

    def _order(self, arm: str, seed: int, scenario: Scenario) -> Order:
        self._runs += 1
        folder = self._folder / f"run{self._runs}"
        folder.mkdir()
        kind = ARMS[arm][1]
        lr, outer = RATES[kind, self._model]
        return Order(
            arm, str(folder), seed, self._model, lr, outer, HOSTS, HOSTS - scenario.added,
            HOSTS - scenario.elastic, self._ray, f"run{self._runs}", self._target,
            tuple(self._bed.hosts.ip(host) for host in range(HOSTS)),
        )  # fmt: skip

    def _restore(self, hosts: list[int]) -> None:
        """Start Ray again on hosts that were killed, and kill those that shall not be there yet."""
        for host in set(range(HOSTS)) - set(hosts) - self._gone:
            self._bed.hosts.kill(host)
            self._gone.add(host)
        for host in self._gone & set(hosts):
            if self._ray and self._bed.hosts.start_node(host).wait(60):
                raise RuntimeError(f"Ray does not start again on host {host}")
        self._gone -= set(hosts)


def install(venvs: Path) -> None:
    """Make an environment for each optional arm; each sees the packages of this Python."""
    constraints = Path(__file__).parents[1] / ".ci" / "constraints.txt"
    optional = {kind.package: kind.requirement for kind, _ in ARMS.values() if kind.package}
    for package, requirement in optional.items():
        folder = venvs / package
        if not (folder / "bin" / "python").exists():
            venv.create(folder, with_pip=True, system_site_packages=True)
        (site,) = (folder / "lib").glob("python*/site-packages")
        (site / "outer.pth").write_text("\n".join(p for p in sys.path if "site-packages" in p))
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]
        done = subprocess.run([*command, "-c", str(constraints), *requirement.split()], timeout=900)
        print(f"{requirement}: " + ("did not install" if done.returncode else "installed"))


def wanted(given: Namespace) -> tuple[list[str], list[str]]:
    """Return arms and scenarios; refuse unknown ones."""
    arms = [each for each in given.only.split(",") if each] or (QUICK if given.quick else [*ARMS])
    scenarios = [each for each in given.scenarios.split(",") if each]
    scenarios = scenarios or (list(QUICK_BOUNDS) if given.quick else [*SCENARIOS])
    if unknown := (set(arms) - set(ARMS)) | (set(scenarios) - set(SCENARIOS)):
        raise SystemExit(f"{unknown} is unknown; arms: {[*ARMS]}, scenarios: {[*SCENARIOS]}")
    return arms, scenarios


def measure(bench: Bench, given: Namespace, done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run all arms in all scenarios, seed by seed; write each result at once."""
    arms, scenarios = wanted(given)
    known = {(each["scenario"], each["seed"], each["arm"]) for each in done}
    found = list(done)
    for name in scenarios:
        for seed in range(given.seeds or (1 if given.quick else 3)):
            for arm in arms if seed % 2 == 0 else arms[::-1]:
                if (name, seed, arm) in known:
                    continue
                result = bench.run(arm, name, seed)
                found.append(result)
                if given.log:
                    with open(given.log, "a") as log:
                        log.write(json.dumps(result) + "\n")
                about = result.get("seconds") or result.get("failed") or result.get("not_run")
                print(f"{name}, seed {seed}, {arm}: {about}", flush=True)
    return found


def report(found: list[dict[str, Any]]) -> tuple[dict[str, float], dict[str, Any]]:
    """Print a table of all arms.

    Return the ratio of our named arm to the best rival, and the medians of all arms, by scenario.
    """
    rows, ratios, medians = [], {}, dict[str, Any]()
    for name in dict.fromkeys(each["scenario"] for each in found):
        best: dict[str, float] = {}
        medians[name] = {}
        for arm in dict.fromkeys(each["arm"] for each in found):
            runs = [each for each in found if (each["scenario"], each["arm"]) == (name, arm)]
            good = [each for each in runs if "seconds" in each]
            about: dict[str, Any] = {"runs": len(runs), "reached": len(good)}
            row = [f"{name}, {arm}", f"{len(good)} of {len(runs)}"]
            seconds = median(each.get("seconds", inf) for each in runs) if runs else inf
            if seconds < inf:  # or most runs did not reach the loss
                named = arm == NAMED[runs[0]["model"]]
                kind = "named" if named else "ours" if arm in OURS else "rival"
                best[kind] = min(best.get(kind, seconds), seconds)
                times = [each["seconds"] for each in good]
                about |= {"seconds": round(seconds, 1)}
                about |= {"least": round(min(times), 1), "most": round(max(times), 1)}
                keys = "steps", "MB", "longest", "lines"
                about |= {key: round(median(each[key] for each in good), 2) for key in keys}
                row += [f"{seconds:.1f} [{min(times):.1f}–{max(times):.1f}]"]
                row += [f"{about[key]:.4g}" for key in keys]
            medians[name][arm] = about
            rows.append([*row, *["-"] * (7 - len(row))])
        if "named" in best and "rival" in best:
            ratios[name] = round(best["named"] / best["rival"], 3)
    table(["", "reached", "seconds", "steps", "MB", "longest stall", "lines"], rows)
    return ratios, medians


def main() -> None:
    arguments = parser(__doc__, seconds=300)
    arguments.add_argument("--model", choices=["cnn", "gpt"], default="cnn")
    arguments.add_argument("--only", default="", help="these arms alone, by comma")
    arguments.add_argument("--scenarios", default="", help="these scenarios alone, by comma")
    arguments.add_argument("--seeds", type=int, help="how many; 3 by default")
    arguments.add_argument("--limit", type=float, default=LIMIT, help="of a run, in seconds")
    arguments.add_argument("--log", help="a file of JSON lines, one for each run")
    arguments.add_argument("--continue", dest="go_on", action="store_true", help="see --log")
    arguments.add_argument("--tune", action="store_true", help="how the rates were chosen")
    arguments.add_argument("--install", action="store_true", help="optional arms, and then run")
    arguments.add_argument("--venvs", type=Path, default=Path.home() / ".cache/paceline-peers")
    given = arguments.parse_args()
    if given.tune:
        return tune(given.model)
    if given.install:
        install(given.venvs)
    arms, scenarios = wanted(given)
    about, goals = machine("torch", "ray", "numpy"), BOUNDS | (QUICK_BOUNDS if given.quick else {})
    bounds = {name: goals[name] for name in scenarios}
    if reason := missing() or groups.missing():
        finish("peers", {"not_run": reason}, bounds, False, about, given)
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the hosts too
    done = []
    if given.go_on and given.log:
        with suppress(FileNotFoundError), open(given.log) as log:
            target = (EASY if given.quick else TARGET)[given.model]
            done = [json.loads(line) for line in log]
            done = [run for run in done if (run["model"], run["target"]) == (given.model, target)]
    load = OtherLoad()
    with ExitStack() as stack:
        bench = Bench(stack, arms, given.venvs, given.model, given.quick, given.limit)
        found = measure(bench, given, done)
    ratios, medians = report(found)
    about["others"] = load.cores()
    ok = all(name in ratios and ratios[name] <= bound for name, bound in bounds.items())
    figures = {"ratios": ratios, "scenarios": medians, "runs": found}
    finish("peers", figures, bounds, ok, about, given)


if __name__ == "__main__":
    main()
