# One entry point for operators and contributors. `make` prints what there is.
# A recipe is one script (.ONESHELL) that ends at its first failing command: no `a && b`, which would hide a failing a.

VARIANT ?= fewchan_fusion
EXTRA ?=
JOBS ?= 2

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:
.NOTPARALLEL:

PYTHON ?=
export PYTHON
# Said aloud, because Ansible ignores an ansible.cfg that it finds in a directory which others may write.
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg
PLAYBOOK := .venv/bin/ansible-playbook
PYTEST := .venv/bin/python -m pytest

.PHONY: help
help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  VARIANT=$(VARIANT) names the variant; EXTRA='-e key=value --check --diff -i inventory/example' goes to ansible-playbook"

## --- the deployment

.PHONY: canary compare probe tune deploy rollback status benchmark precheck explain prune report stop destroy
deploy: controller ## set up what is missing and deploy VARIANT on the embedded node
	$(PLAYBOOK) deploy.yml -e variant=$(VARIANT) $(EXTRA)

rollback status benchmark precheck prune report stop: controller
	$(PLAYBOOK) $@.yml $(EXTRA)

compare: controller ## start VARIANT and another one in turn and judge; EXTRA='-e against=baseline -e rounds=3'
	$(PLAYBOOK) compare.yml -e variant=$(VARIANT) $(EXTRA)

canary: controller ## try VARIANT with dummy weights beside the live server; switches nothing
	$(PLAYBOOK) canary.yml -e variant=$(VARIANT) $(EXTRA)

probe: controller ## try the NCCL settings of VARIANT on the GPUs; EXTRA='-e variants=all' ranks the catalogue
	$(PLAYBOOK) probe.yml -e variant=$(VARIANT) $(EXTRA)

tune: controller ## search NCCL settings; EXTRA='-e tune_profile=single'
	$(PLAYBOOK) tune.yml $(EXTRA)

explain: controller ## show what VARIANT becomes; EXTRA='-e against=baseline' compares
	$(PLAYBOOK) explain.yml -e variant=$(VARIANT) $(EXTRA)

rollback: ## go back to the release promoted before; EXTRA='-e release=<id>' for another one
status: ## show release, variant, state, health and endpoint
benchmark: ## measure the running server
precheck: ## read the host and say what stands in the way
prune: ## delete old and unfinished releases
report: ## write report/report.html: what was served, measured and decided
stop: ## stop the server

destroy: controller ## stop the embedded server and remove everything it has on this machine
	@if [[ ! -d .embedded ]]; then echo "nothing to remove: .embedded does not exist"; exit 0; fi
	$(PLAYBOOK) stop.yml $(EXTRA)
	@if ! .venv/bin/python tools/processes.py .embedded; then
		echo "refused: the processes above still run from .embedded; end them, then run make destroy again" >&2
		exit 1
	fi
	rm -rf .embedded

## --- the tests

.PHONY: test lint unit pythons spec molecule playbooks decisions systemd integration faults releases browser bench-health bench-deploy bench-client bench-report gpu-bundle
test: lint unit pythons spec molecule playbooks integration ## run everything below, up to integration

lint: testenv ## ansible-lint (production), yamllint, ruff
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/yamllint --strict .
	echo "yamllint: clean"
	PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python tools/ansible_lint.py --offline --strict

unit: testenv ## modules and their functions; those that watch processes beside the others
	beside="tests/unit/health/test_beside.py" server="tests/unit/server tests/unit/canary" built="tests/unit/engine tests/unit/probe"
	watch="tests/unit/health --ignore=$$beside"
	others="tests/unit/health $$server $$built"
	tools/side_by_side unit "tests/unit $${others//tests/--ignore=tests}" "$$beside $$built" "$$watch" "$$server"

pythons: testenv ## the same under every other Python from 3.9 to 3.13 that this machine has
	.venv/bin/python tools/test_pythons.py

spec: testenv ## defaults = specs, documentation = specs, both inventories
	$(PYTEST) tests/spec

molecule: testenv ## every role by itself; JOBS scenarios at a time
	.venv/bin/python tools/molecule_all.py --jobs $(JOBS)

playbooks: testenv ## the verbs: dry runs, refusals, faults, decisions
	faults="tests/playbooks/test_faults.py tests/playbooks/test_killed.py"
	judged="tests/playbooks/test_canary.py tests/playbooks/test_comparisons.py tests/playbooks/test_decisions.py tests/playbooks/test_report.py"
	others="$$faults $$judged"
	tools/side_by_side playbooks "tests/playbooks $${others//tests/--ignore=tests}" "$$faults" "$$judged"

decisions: testenv ## how a release is judged, case by case, and a table of how often that is right; not part of test
	SGLANG_TEST_DECISIONS=1 $(PYTEST) tests/playbooks/test_decision_policies.py
	.venv/bin/python tools/simulate_decisions.py

systemd: testenv ## the verbs under a real systemd in a container, or skipped with the reason; not part of test
	$(PYTEST) tests/systemd

integration: testenv ## deploy, switch, crash and roll back with the real server
	$(PYTEST) tests/integration tests/gpu

releases: testenv ## the patches on every release package, which are downloaded; not part of test
	$(PYTEST) tests/patches_release

browser: testenv ## look at the report in Chromium, with an accessibility check; installs both; not part of test
	tools/browser
	SGLANG_TEST_BROWSER=required $(PYTEST) tests/unit/report/test_browser.py

bench-deploy: testenv ## time a deploy against plain playbooks
	.venv/bin/python tools/bench_deploy.py

gpu-bundle: controller ## two archives for a GPU machine without network, packages are downloaded; tests/gpu/run.py runs there
	.venv/bin/python tools/gpu_bundle.py
	.venv/bin/python tools/gpu_bundle.py --kimi

bench-health: testenv ## time how soon each fault of a start is seen; false alarms in 100 healthy starts
	.venv/bin/python tools/bench_health.py

faults: testenv ## kill, stop, fill and break the real server and its controller; an hour, not part of test; EXTRA='--instants 5'
	$(PYTEST) tests/faults $(EXTRA)

bench-client: testenv ## compare the benchmark client with others
	.venv/bin/python tools/bench_client.py

bench-report: testenv ## time the report of 10,000 runs
	.venv/bin/python tools/bench_report.py

## --- the tools

.PHONY: controller testenv lock
controller: ## set up .venv, which is all that a controller of real GPUs needs
	@tools/bootstrap controller

testenv: controller
	@tools/bootstrap test

lock: controller ## resolve requirements/*.in anew
	tools/lock
