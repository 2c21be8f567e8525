"""Compressed messages: accuracy against bytes, and seconds to an accuracy on a slow network.

Parts, each in its own file, which describes it:
- star (messages_star.py): encoded results of 8 workers on handwritten digits or Fashion-MNIST, in
  simulated time, with two controls.
- lazy (messages_lazy.py): workers send only the changes of their results.
- gossip (messages_gossip.py): 8 nodes in a ring, decentralized, on the same data.
- cifar (messages_cifar.py): the same for a convolutional network on CIFAR-10; it needs the files:
  `--cifar DIR`.
- network (messages_network.py): seconds to the same accuracy on four hosts behind slow links,
  against DistributedDataParallel; needs root.

Without `--only`, all parts run that can run here; with `--quick`, only the first.

    python benchmarks/messages.py [--quick] [--only PART] [--cifar DIR] [--tune]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import messages_cifar
import messages_gossip
import messages_lazy
import messages_network
import messages_star
from _report import finish, machine, parser
from paceline.testing.hosts import missing

PARTS = ("star", "lazy", "gossip", "cifar", "network")


def hindrances(cifar: Path | None) -> dict[str, str | None]:
    """Return for each part why it cannot run here, or None."""
    return {
        "star": None,
        "lazy": None,
        "gossip": None,
        "cifar": messages_cifar.missing(cifar),
        "network": missing(),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=PARTS)
    arguments.add_argument("--cifar", type=Path, metavar="DIR", help="data_batch_1.bin and so on")
    about = "network: learning rates only; cifar: trials for every method first"
    arguments.add_argument("--tune", action="store_true", help=about)
    about = "of star or gossip, instead of all: the reference and the control come first"
    arguments.add_argument("--methods", nargs="+", metavar="NAME", help=about)
    options = arguments.parse_args()
    wanted = [options.only] if options.only else ["star"] if options.quick else list(PARTS)
    hindered = hindrances(options.cifar)
    if options.tune and wanted == ["network"]:
        messages_network.tune([0, 1])
        return
    figures: dict[str, Any] = {}
    held: list[bool] = []
    for part in wanted:
        if reason := hindered[part]:
            print(f"\n{part}: not run, {reason}", flush=True)
            figures[part] = {"not_run": reason}
            held += [options.only != part]  # a part that was requested and not run does not hold
        elif part == "star":
            figures[part] = messages_star.measure(options.quick, options.methods)
            held += [messages_star.holds(figures[part])]
        elif part == "lazy":
            figures[part] = messages_lazy.measure(options.quick)
            held += [messages_lazy.holds(figures[part])]
        elif part == "gossip":
            figures[part] = messages_gossip.measure(options.quick, options.methods)
            held += [messages_gossip.holds(figures[part])]
        elif part == "cifar":
            figures[part] = messages_cifar.measure(options.cifar, options.quick, options.tune)
            held += [messages_cifar.holds(figures[part], options.quick)]
        elif part == "network":
            figures[part] = messages_network.measure(options.quick)
            held += [messages_network.holds(figures[part], options.quick)]
    bounds = {
        f"{part}_{key}": bound
        for part, module in (
            ("star", messages_star), ("lazy", messages_lazy), ("gossip", messages_gossip),
            ("cifar", messages_cifar), ("network", messages_network),
        )
        for key, bound in module.BOUNDS.items()
        if part in wanted
    }  # fmt: skip
    finish("messages", figures, bounds, all(held), machine("torch", "paceline"), options)


if __name__ == "__main__":
    main()
