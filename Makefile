# Each target works on a fresh clone: it makes the virtual environment, installs, and runs.
.PHONY: help train train-smollm2 verify verify-curves verify-moe verify-vlm families faults test test-fast test-slow test-verl compare-verl lint check-full bench-plan bench-tensors bench-store bench-rollout bench-train bench-real bench-cluster pages scale-page clean
PYTHON ?= python3
BIN := .venv/bin

help: ## what there is to run
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

train: .venv/installed ## the verification run: dp 2, 45 prompts x 8 sessions, mini-batches of 15 prompts
	$(BIN)/raggedright train configs/compaction.toml --fresh $(ARGS)

train-smollm2: runs/models/SmolLM2-135M-Instruct/config.json ## a real model, SmolLM2-135M: fetch and convert it once, then three rounds, a few minutes
	$(BIN)/raggedright train configs/smollm2.toml --fresh $(ARGS)

verify: .venv/installed ## the verification runs: five seeds and four other ways to train; writes docs/verification.md
	$(BIN)/python verification/verify.py $(ARGS)

verify-curves: .venv/installed ## 20 rounds, cut in five ways, drawn together in docs/invariance.svg
	$(BIN)/python verification/verify.py --curves

verify-moe: .venv/installed ## a mixture of experts on three seeds, and what router replay is worth; about ten minutes
	$(BIN)/python verification/verify_moe.py $(ARGS)

verify-vlm: .venv/installed ## images: a vision-language model on three seeds; writes docs/verification-images.md
	$(BIN)/python verification/verify_vlm.py

families: .venv/installed ## which families of transformers are right in which collation; writes docs/models.md
	$(BIN)/python verification/families.py $(ARGS)

faults: .venv/installed ## break runs and commands in every way we know; writes the table in docs/faults.md (ARGS="--cases 10")
	$(BIN)/python verification/faults.py $(ARGS)

test: .venv/installed lint ## lint, types and every test that is not slow
	$(BIN)/pytest -q -n 2 --dist loadgroup -m "not slow"

test-fast: .venv/installed lint ## lint, types and the tests of the core, without torch: under a minute
	$(BIN)/pytest -q -n 2 --dist loadgroup -m "not slow" --no-torch tests/unit tests/properties

test-slow: runs/models/SmolLM2-135M-Instruct/config.json test-verl ## the few tests that need minutes
	$(BIN)/pytest -q -n 2 --dist loadgroup -m slow

test-verl: .venv-verl/installed ## agreement with verl, and the plug-in in it, in an environment of its own
	PYTHONPATH=src .venv-verl/bin/python -m pytest -q tests/verl

compare-verl: .venv-verl/installed ## verl without the plug-in and with it, on the same batch; writes docs/verl-comparison.md
	PYTHONPATH=src:tests/verl .venv-verl/bin/python verification/compare_verl.py $(ARGS)

check-full: .venv/installed ## the exactness check over every combination (hours; `raggedright check` takes a minute)
	$(BIN)/raggedright check --full

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --warnings

bench-plan: .venv/installed .venv-verl/installed ## the planner's time and quality compared with verl's, about two minutes (ARGS=--quick)
	$(BIN)/python benchmarks/bench_plan.py $(ARGS)

bench-tensors: .venv/installed ## padding rows and schema checks compared with the least they could take
	$(BIN)/python benchmarks/bench_tensors.py

bench-store: .venv/installed ## each store compared with bare TransferQueue, with files of 2 GB, about 15 minutes (ARGS=--quick)
	$(BIN)/python benchmarks/bench_store.py $(ARGS)

pages: .venv/installed ## the pages and pictures of docs/ that are made from the code
	$(BIN)/python -m pages

scale-page: .venv/installed ## what rounds of up to a million rows on 4,096 ranks cost, docs/scale.md
	$(BIN)/python benchmarks/scale.py

bench-rollout: .venv/installed ## the local rollout engine compared with transformers' own generate
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_rollout.py

bench-train: .venv/installed .venv-trl/installed ## a round's time by part, compared with a bare loop and TRL, and how cost grows (ARGS=--quick)
	$(BIN)/python benchmarks/bench_train.py $(ARGS)

bench-real: .venv-trl/installed runs/models/SmolLM2-135M-Instruct/config.json ## peak memory and trained tokens/s on SmolLM2, compared with TRL (ARGS=--quick)
	$(BIN)/python benchmarks/bench_real.py $(ARGS)

bench-cluster: .venv/installed ## Ray and TransferQueue compared with the local launcher, and rows through the store as they grow (ARGS=--quick)
	$(BIN)/python benchmarks/bench_cluster.py $(ARGS)

clean: ## remove the virtual environments and caches
	rm -rf .venv .venv-verl .venv-trl .pytest_cache .ruff_cache .hypothesis build dist

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv, some minutes"
	$(BIN)/pip install -q -c constraints.txt -e '.[train,lora,tasks,ray,wandb,mlflow,dev]'
	touch $@

# Order only: a model that is there stays, whatever is installed again.
runs/models/SmolLM2-135M-Instruct/config.json: | .venv/installed
	$(BIN)/python examples/smollm2/convert.py

# torch first and alone: an open range would pull gigabytes of CUDA. Peers that we compare with never enter .venv.
.venv-verl/installed: constraints-verl.txt
	test -x .venv-verl/bin/python || $(PYTHON) -m venv .venv-verl
	@echo "installing verl into .venv-verl, some minutes"
	.venv-verl/bin/pip install -q -c constraints-verl.txt torch==2.13.0
	.venv-verl/bin/pip install -q -c constraints-verl.txt verl==0.9.1 pytest hypothesis
	.venv-verl/bin/pip install -q -c constraints-verl.txt TransferQueue==0.1.11 cachetools fastapi uvicorn pydantic-settings tomli-w
	touch $@

.venv-trl/installed: constraints-trl.txt
	test -x .venv-trl/bin/python || $(PYTHON) -m venv .venv-trl
	@echo "installing TRL into .venv-trl, some minutes"
	.venv-trl/bin/pip install -q -c constraints-trl.txt torch==2.13.0
	.venv-trl/bin/pip install -q -c constraints-trl.txt trl==1.16.0
	touch $@
