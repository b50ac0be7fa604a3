# make run: train, here and now.  make test: everything that must hold.  Both set up all they need below this folder.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# What is never imported need not be compiled. The rest is when it is first imported, and kept: else every rank of every
# test would compile torch again, for seconds.
unexport PYTHONDONTWRITEBYTECODE
PIP = -m pip --disable-pip-version-check install --quiet --no-compile $(PIP_ARGS)
JOB ?= jobs/digits-dssp.toml
SIZES ?= 1 2 3 5
AT_A_TIME ?= 3  # processes of unit tests and of runs on one host: one more than cores, since runs wait
TURNS ?= --take-turns  # some cases at each of these numbers of ranks; all of them with TURNS=

run: .venv/ready
	.venv/bin/hpcsync run $(JOB)

# Two of these at a time: they wait for the network and the disk, or are one process.
test: .venv/ready
	$(MAKE) -j 2 check docs venv
	$(MAKE) -j 2 --output-sync=line unit slurm
	$(MAKE) ranks

# ---- the environments: made again when what they are made from changes ----

MADE_FROM = setup.cfg pyproject.toml constraints.txt

.venv/ready: $(MADE_FROM)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x .venv/bin/pip || $(PYTHON) -m venv --clear .venv
	.venv/bin/python $(PIP) --constraint constraints.txt --editable '.[mpi,analysis,models,dev]'
	touch $@

# The other MPI. Two MPIs from PyPI do not share an environment, but everything else may: a .pth file lends it.
.venv-mpich/ready: $(MADE_FROM) .venv/ready
	test -x .venv-mpich/bin/pip || $(PYTHON) -m venv --clear .venv-mpich
	.venv-mpich/bin/python $(PIP) --constraint constraints.txt mpi4py mpich
	.venv/bin/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
	    > "$$(.venv-mpich/bin/python -c 'import site; print(site.getsitepackages()[0])')/lent.pth"
	touch $@

venv: .venv/ready .venv-mpich/ready

# ---- the tests ----

check: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

unit: .venv/ready
	.venv/bin/python -m pytest -q -n $(AT_A_TIME) --dist loadfile $(TURNS) tests/unit

# What is marked `once`, because it hardly depends on the MPI, is left to the first.
ONCE = $(if $(filter .venv-mpich,$*),-m "not once")

# Under Slurm, for which these tests wait most of the time, so they run beside the unit tests.
slurm: slurm-.venv slurm-.venv-mpich

slurm-.venv slurm-.venv-mpich: slurm-%: %/ready
	$*/bin/python -m pytest -x -q -rs tests/slurm $(ONCE)

# Under both MPIs: the same tests at several numbers of ranks, then whole runs between hosts, two files at a time, since what is timed
# there fails now and then with three, and on one host, three at a time, since many runs wait more than they work; the files that take
# longest come first. (The two MPIs side by side take little less on two cores.)
ranks: ranks-.venv ranks-.venv-mpich

ranks-.venv ranks-.venv-mpich: ranks-%: %/ready
	@set -e; \
	if ls tests/mpi/test_*.py >/dev/null 2>&1; then \
	    for n in $(SIZES); do \
	        $*/bin/python -m hpcsync launch -n $$n --timeout 600 -- python -m mpi4py -m pytest -x -q --color=no tests/mpi \
	            $(ONCE) $(TURNS); \
	    done; \
	fi; \
	if ls tests/gpu/test_*.py >/dev/null 2>&1; then \
	    $*/bin/python -m hpcsync launch -n 2 --timeout 1200 -- python -m mpi4py -m pytest -x -q -rs --color=no tests/gpu; \
	fi; \
	for part in "2 tests/hosts" "$(AT_A_TIME) tests/runs"; do \
	    echo "$*/bin/python -m pytest -n $$part"; \
	    $*/bin/python -m pytest -x -q -rs --dist loadfile --no-loadscope-reorder -n $$part $(ONCE); \
	done

# The wheel in an environment of its own, with what it asks for in the pinned versions. (`make test` tries it in one that
# borrows these.)
wheel-check: .venv/ready
	HPCSYNC_WHEEL=install .venv/bin/python -m pytest -q --timeout 1800 tests/runs/test_wheel.py

# The examples in jobs/scripts, with Lightning Fabric and the Hugging Face Trainer too, whose packages take half a minute to
# install. In an environment of their own, without torchvision: transformers imports it, and it may not fit torch.
scripts: .venv-scripts/ready
	.venv-scripts/bin/python -m pytest -q -rs tests/unit/mpi/test_scripts.py tests/unit/mpi/test_hugging_face_datasets.py \
	    tests/runs/test_scripts.py tests/runs/test_recording.py

.venv-scripts/ready: $(MADE_FROM)
	test -x .venv-scripts/bin/pip || $(PYTHON) -m venv --clear .venv-scripts
	.venv-scripts/bin/python $(PIP) --constraint constraints.txt --editable '.[mpi,scripts,dev]'
	touch $@

# ---- the figures of the page about benchmarks: 20 minutes of a quiet machine, as root ----

benchmarks: docs/benchmarks.json

docs/benchmarks.json: venv
	.venv/bin/python -m hpcsync bench --json .venv/bench.json $$($(call targets,True))
	.venv-mpich/bin/python -m hpcsync bench --json .venv-mpich/bench.json $$($(call targets,target.ranks))
	.venv/bin/python -c 'import json, sys; print(json.dumps([json.load(open(path)) for path in sys.argv[1:]], indent=1))' \
	    .venv/bench.json .venv-mpich/bench.json > $@

targets = .venv/bin/python -c 'from hpcsync.bench import TARGETS; \
    print(*[name for name, target in TARGETS.items() if "cpu" in target.devices and $(1)])'

# ---- on a machine with a GPU: its tests, what doctor finds, what bench measures ----

# `make gpu GPU_PYTHON=python3` sets up nothing: that Python has everything.
GPU_PYTHON ?= .venv/bin/python

gpu: $(if $(filter .venv/bin/python,$(GPU_PYTHON)),.venv/gpu-ready)
	@set -e; for n in 1 2 3; do \
	    $(GPU_PYTHON) -m hpcsync launch -n $$n --timeout 1200 -- python -m mpi4py -m pytest -x -q -rs --color=no tests/gpu; \
	done
	$(GPU_PYTHON) -m hpcsync doctor
	$(GPU_PYTHON) -m hpcsync bench --device cuda --json gpu.json

# With CuPy for the CUDA of the torch that is there, and without where torch has none.
.venv/gpu-ready: .venv/ready
	.venv/bin/python $(PIP) --constraint constraints.txt --editable ".[mpi$$(.venv/bin/python -c \
	    'from torch.version import cuda; print(",cuda" + cuda.split(".")[0] if cuda else "")')]"
	touch $@

# ---- besides what constraints.txt pins: the newest of everything, as `pip install` brings it today ----

# The unit tests, loaders with processes, and a run that must end without a word on stderr. torch is its CUDA build, with
# several GB of packages; hence the pin stays with the last torch of which there is a CPU build at hand.
newest:
	test -x .venv-newest/bin/pip || $(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python $(PIP) --upgrade --upgrade-strategy eager --editable '.[mpi,analysis,models,dev]'
	.venv-newest/bin/python -m pytest -q -n 2 --dist loadfile tests/unit tests/runs/test_loading.py tests/runs/test_scripts.py
	said=$$(.venv-newest/bin/hpcsync run jobs/digits-bsp.toml 2>&1 >/dev/null) && test -z "$$said" || { echo "$$said"; exit 1; }

# The unit tests with the oldest torch, NumPy, h5py, mpi4py and pydantic that are accepted. Newer pyarrows need NumPy 2, which
# they do not tell pip.
oldest:
	test -x .venv-oldest/bin/pip || $(PYTHON) -m venv --clear .venv-oldest
	.venv-oldest/bin/python $(PIP) --editable '.[mpi,analysis,models,dev]' torch==2.6.0 numpy==1.25.0 h5py==3.12.1 \
	    mpi4py==4.1.0 pydantic==2.11.5 pyarrow==17.0.0
	.venv-oldest/bin/python -m pytest -q -n 2 --dist loadfile $(TURNS) tests/unit

# ---- the documentation: docs/_build/html/index.html ----

docs: .venv/docs-ready
	.venv/bin/sphinx-build -W -n --keep-going -q -b html docs docs/_build/html

.venv/docs-ready: .venv/ready
	.venv/bin/python $(PIP) --constraint constraints.txt --editable '.[docs]'
	touch $@

format: .venv/ready
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean:
	rm -rf .venv .venv-mpich .venv-newest .venv-oldest .venv-scripts build dist docs/_build docs/_generated gpu.json *.egg-info \
	    .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: run test venv check unit slurm slurm-.venv slurm-.venv-mpich ranks ranks-.venv ranks-.venv-mpich wheel-check scripts benchmarks docs/benchmarks.json gpu newest oldest docs format clean
