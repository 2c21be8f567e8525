# Everything CI does, in pieces. PYTHON may name another interpreter.
PYTHON ?= python

.PHONY: check format lint types test coverage cluster long timing fresh release-check bench peers gpu docs

check: lint types test  ## what must pass before a commit

format:
	$(PYTHON) -m ruff format src tests benchmarks examples
	$(PYTHON) -m ruff check --fix src tests benchmarks examples

lint:  ## pyproject.toml has the settings; codespell's list of words is there too
	$(PYTHON) -m ruff format --check src tests benchmarks examples
	$(PYTHON) -m ruff check src tests benchmarks examples
	$(PYTHON) -m codespell_lib src docs examples benchmarks tests .github *.md

types:
	$(PYTHON) -m mypy

test:  ## fast tests and doctests, no cluster; what fails is tried once more, and named
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist worksteal --reruns=1 -raR -m "not cluster and not fresh and not long" tests
	$(PYTHON) -m pytest --doctest-modules src/paceline

coverage:  ## statements and branches of core/ and policies/ in their unit tests; below 90 % is a failure
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n 2 --dist worksteal --cov --cov-report= tests/unit/core tests/unit/policies
	$(PYTHON) -m coverage report --skip-covered --include='*/paceline/core/*'
	$(PYTHON) -m coverage report --skip-covered --include='*/paceline/policies/*'

cluster:  ## the tests on a real Ray, started on this machine; what fails is tried once more, and named
	$(PYTHON) -m pytest --durations=15 --timeout=900 --reruns=1 -raR -m "cluster and not timing and not long" tests/cluster tests/contract

long:  ## more tests, with more seeds and on a real Ray, which take long together: after a change of what they test, before a release
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist worksteal --reruns=1 -raR -m "long and not cluster" tests
	$(PYTHON) -m pytest --durations=15 --timeout=900 --reruns=1 -raR -m "long and cluster and not timing" tests/cluster tests/contract

timing:  ## the tests on a real Ray that measure time, with real stragglers: on an idle machine
	$(PYTHON) -m pytest --durations=15 --timeout=900 --reruns=1 -raR -m timing tests/cluster

fresh:  ## README and the ten minutes, literally, and an install without Ray: in new environments
	$(PYTHON) -m pytest -m fresh tests/fresh

release-check:  ## wheel and sdist: built, checked, installed in a new environment and tried
	PYTHON=$(PYTHON) bash .ci/release-check

bench:  ## the benchmarks at full size; --quick for a short look
	$(PYTHON) benchmarks/simulator.py
	$(PYTHON) benchmarks/overhead.py
	$(PYTHON) benchmarks/stragglers.py
	$(PYTHON) benchmarks/sessions.py
	$(PYTHON) benchmarks/sessions_hosts.py
	$(PYTHON) benchmarks/feeding.py
	$(PYTHON) benchmarks/dataplane.py
	$(PYTHON) benchmarks/dataplane.py --large
	$(PYTHON) benchmarks/selection.py
	$(PYTHON) benchmarks/coding.py
	$(PYTHON) benchmarks/placement.py
	$(PYTHON) benchmarks/messages.py
	$(PYTHON) benchmarks/planner.py
	$(PYTHON) benchmarks/report.py
	$(PYTHON) benchmarks/tokens.py
	$(PYTHON) benchmarks/curve.py
	$(PYTHON) benchmarks/chaos.py
	$(PYTHON) benchmarks/chaos_soak.py
	$(PYTHON) benchmarks/elastic.py
	$(PYTHON) benchmarks/fleet.py
	$(PYTHON) benchmarks/fleet_bytes.py
	$(PYTHON) benchmarks/exchange.py
	$(PYTHON) benchmarks/sparse_local.py
	$(PYTHON) benchmarks/async_local.py
	$(PYTHON) benchmarks/ringleader.py

peers:  ## DDP, torchft, Ray Train, Hivemind, DiLoCo and Paceline on four hosts: hours; as root
	$(PYTHON) benchmarks/peers.py --install --log peers.jsonl --continue

gpu:  ## ten minutes on a machine with GPUs; writes gpu_report.json, and ends with 3 where there is none
	$(PYTHON) benchmarks/gpu.py

docs:
	$(PYTHON) -m sphinx -W -b html docs docs/_build
