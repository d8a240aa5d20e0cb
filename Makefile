# Every target sets up what it needs: .venv is made from requirements/pip.txt and dev.txt, and re-made when they change.
# Only relative paths are used, so the repository may lie anywhere, in a path with spaces too.

ARGS ?=
# test processes; auto is one per core
JOBS ?= auto

py := .venv/bin/python
READY := .venv/.ready
export PYTHONUNBUFFERED := 1
# what the caller's shell has set for other Pythons stays out of ours
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

# A .venv that was copied from elsewhere, or whose interpreter is gone, is no .venv.
ifneq ($(shell test -x $(py) && cat $(READY) 2>/dev/null),$(CURDIR))
$(READY): again
endif

.DEFAULT_GOAL := help
.PHONY: again help java databases run cluster test slow spark check sim crash bench fuzz docs audit clean
.NOTPARALLEL:

help: ## this list
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

run: $(READY) ## see it work: a broker, orders, three groups, a live table  (DEMO_SECONDS=20 ends by itself)
	@$(py) -m fairway demo $(if $(DEMO_SECONDS),--seconds $(DEMO_SECONDS)) $(ARGS)

cluster: $(READY) java ## a whole cluster on this machine, live: kill something and watch  (CLUSTER_SECONDS=20 ends by itself)
	@$(py) -m fairway demo cluster $(if $(CLUSTER_SECONDS),--seconds $(CLUSTER_SECONDS)) $(ARGS)

test: check java databases ## check, then every test that is not marked slow  (ARGS="tests/unit -k name")
	@echo "make test: pytest, $(JOBS) at a time"
	@$(py) -m pytest -q -n $(JOBS) --dist loadgroup $(ARGS)

slow: $(READY) java databases ## every slow test but Spark's
	@echo "make slow: pytest, slow tests, $(JOBS) at a time"
	@$(py) -m pytest -q -n $(JOBS) --dist loadgroup -m slow --ignore=tests/spark --ignore=tests/test_docs.py tests $(ARGS)

spark: $(READY) java ## every test on Spark: its pages, a standalone cluster and killed drivers too
	@echo "make spark: pytest, Spark"
	@$(py) -m pytest -q -n $(JOBS) --dist loadgroup -m "slow or not slow" tests/spark \
		"tests/test_docs.py::test_documentation_runs[docs/start/archive-to-a-table.md]" \
		"tests/test_docs.py::test_documentation_runs[docs/how-to/spark.md]" \
		"tests/test_docs.py::test_documentation_runs[docs/how-to/spark-jobs.md]" \
		"tests/test_docs.py::test_documentation_runs[docs/how-to/trace.md]" \
		"tests/test_docs.py::test_documentation_runs[docs/how-to/report.md]" \
		"tests/test_docs.py::test_documentation_runs[docs/how-to/reconcile.md]" $(ARGS)

check: $(READY) ## ruff, mypy strict, and the tidy rules
	@echo "make check: ruff, mypy, tidy"
	@$(py) -m ruff check --quiet src tests bench docs/*.py
	@$(py) -m ruff format --quiet --check --diff src tests bench docs/*.py
	@$(py) -m mypy --no-error-summary
	@$(py) -m pytest -q --no-header tests/test_tidy.py tests/tidy

sim: $(READY) ## simulated crashes by the thousand  (ARGS="--seeds 5000")
	@echo "make sim: crashes in simulation, replayable from their seeds"
	@$(py) -m tests.simulation.campaign $(ARGS)

crash: $(READY) databases ## real crashes: kill -9, and power cuts where the machine allows
	@echo "make crash: real crashes of a writing process, of a broker, of programs that use it, of delay servers"
	@$(py) -m tests.crash.campaign $(ARGS)

bench: $(READY) java databases ## list the benches, or run some  (ARGS="storage" or ARGS="all")
	@echo "make bench: ratios on this machine"
	@$(py) -m bench $(ARGS)

fuzz: $(READY) ## a million mutated batches and frames: valid, or refused in the one right way
	@echo "make fuzz: mutated batches, mutated frames"
	@$(py) -m tests.hostile.batch_fuzz --inputs 1000000 $(ARGS)
	@$(py) -m tests.hostile.frame_fuzz --inputs 1000000 $(ARGS)

docs: $(READY) ## the site of the documentation, into build/site; links checked  (ARGS="serve" shows it meanwhile)
	@sh .ci/docs $(ARGS)

audit: $(READY) ## known vulnerabilities of every pin; needs the network, and is no part of make test
	@echo "make audit: pip-audit on requirements/"
	@$(py) .ci/audit $(ARGS)

clean: ## remove .venv and everything else that can be made again
	@echo "make clean: .venv, caches, build products"
	@rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find src tests bench -type d -name __pycache__ -prune -exec rm -rf {} +

java:
	@sh .ci/java

databases:
	@sh .ci/databases

$(READY): requirements/pip.txt requirements/dev.txt pyproject.toml .ci/venv
	@sh .ci/venv
