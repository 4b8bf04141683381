# `make demo` runs the quickstart job on a real model; `make test` runs the tests. Both first set up what they need, in this folder.
SHELL := bash
MODELS := $(CURDIR)/.models
FIXTURES := $(CURDIR)/.fixtures
PYTHON := $(CURDIR)/.oracle/bin/python
SMOLLM2 := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf
# Without cargo-nextest, which runs each test in a process of its own, tests take turns: MLX wants one thread.
NEXTEST := $(shell cargo nextest --version 2>/dev/null)
TEST := $(if $(NEXTEST),cargo nextest run --locked,cargo test --locked -- --test-threads=1)
TEST_ALL := $(if $(NEXTEST),cargo nextest run --locked --run-ignored all,cargo test --locked -- --include-ignored --test-threads=1)
export PYTHONDONTWRITEBYTECODE := 1
# Tests run side by side: threads of OpenBLAS that wait for each other spin, and make each other ten times slower.
test test-models: export OPENBLAS_NUM_THREADS := 1

.PHONY: demo demo-audio build test test-models goldens bench bench-speech bench-gpu fmt lint clean help setup release model oracle fixtures smollm2 whisper

demo: release model ## build, fetch SmolLM2 (98 MB), run jobs/quickstart.toml
	target/release/mlxbatch run jobs/quickstart.toml

demo-audio: release ## build, fetch Whisper tiny.en (75 MB) and real speech, run jobs/speech.toml, print the transcripts
	@fixtures/fetch_models.sh whisper-tiny.en
	@fixtures/fetch_speech.sh
	@[ -f $(MODELS)/whisper-tiny.en/config.json ] || { rm -rf $(MODELS)/whisper-tiny.en; target/release/mlxbatch convert $(MODELS)/whisper-tiny.en-ct2 $(MODELS)/whisper-tiny.en; }
	target/release/mlxbatch run jobs/speech.toml
	target/release/mlxbatch show out/speech --columns id,wer,text

build: setup ## build for development
	cargo build --locked

test: setup ## the tests that need nothing but this folder
	$(TEST)

test-models: setup fixtures ## all tests, with SmolLM2, Whisper tiny.en and base, real speech, every tiny checkpoint and Python's Parquet readers
	@fixtures/fetch_models.sh smollm2 whisper-tiny.en whisper-base || echo "test-models: going on without; tests that need it are skipped by name" >&2
	@fixtures/fetch_speech.sh || echo "test-models: going on without; tests that need it are skipped by name" >&2
	@fixtures/fetch_photographs.sh || echo "test-models: going on without; tests that need them are skipped by name" >&2
	MLXBATCH_MODELS=$(MODELS) MLXBATCH_FIXTURES=$(FIXTURES) MLXBATCH_PYTHON=$(PYTHON) $(TEST_ALL)

goldens: fixtures smollm2 whisper ## have mlx-lm, mlx-vlm and mlx-whisper compute goldens/ again; review the difference like code
	$(PYTHON) fixtures/make_goldens.py $(FIXTURES) goldens/models
	$(PYTHON) fixtures/make_goldens.py $(FIXTURES)/gguf goldens/gguf
	$(PYTHON) fixtures/make_logprobs_goldens.py fixtures/checkpoints goldens/logprobs
	$(PYTHON) fixtures/make_whisper_goldens.py $(FIXTURES)/speech goldens/whisper
	$(PYTHON) fixtures/make_gemma4_goldens.py $(FIXTURES)/gemma4 goldens/gemma4
	$(PYTHON) fixtures/whisper_golden.py $(MODELS)/whisper-tiny.en goldens/whisper-tiny.en.json
	$(PYTHON) fixtures/smollm2_golden.py $(MODELS)/smollm2/dense goldens/smollm2-greedy.json
	python3 -m pip download -q --disable-pip-version-check --no-deps -d $(FIXTURES)/wheels mlx-whisper==0.4.3 mlx-vlm==0.7.6
	LD_PRELOAD=$(wildcard .mlx/mlx/lib/libmlxblas.so) $(PYTHON) fixtures/make_gemma4_tower_goldens.py $(FIXTURES)/gemma4 goldens/gemma4_towers e2b dense unified
	$(PYTHON) fixtures/mel_goldens.py $(FIXTURES)/wheels goldens/mel
	@fixtures/fetch_speech.sh
	LD_PRELOAD=$(wildcard .mlx/mlx/lib/libmlxblas.so) $(PYTHON) fixtures/transcripts_golden.py $(MODELS) goldens/transcripts.json # with its own products MLX takes a quarter of an hour
	$(PYTHON) fixtures/planted_faults.py $(FIXTURES) goldens/models
	$(PYTHON) fixtures/gemma4_planted_faults.py $(FIXTURES)/gemma4 goldens/gemma4

bench: release smollm2 ## tokens a second beside mlx-lm's, and a million rows without a model; takes a quarter of an hour
	$(PYTHON) tests/bench_generate.py target/release/mlxbatch $(SMOLLM2) $(MODELS)/smollm2
	$(PYTHON) tests/bench_rows.py target/release/mlxbatch

bench-speech: release oracle whisper ## decoding against ffmpeg, Whisper against mlx-whisper and faster-whisper; takes a quarter of an hour
	@fixtures/fetch_speech.sh
	@[ -d $(CURDIR)/.oracle/peers ] || python3 -m pip install -q --disable-pip-version-check --only-binary=:all: --target $(CURDIR)/.oracle/peers faster-whisper==1.2.1
	$(PYTHON) tests/bench_speech.py target/release/mlxbatch $(MODELS) $(CURDIR)/.oracle/peers

bench-gpu: release ## pack into .gpu/ what a GPU machine needs to measure mlxbatch beside mlx-lm and transformers
	@tests/gpu/stage.sh target/release/mlxbatch .mlx/mlx/lib .gpu
	@echo "Copy .gpu/ to a machine with an NVIDIA GPU, a CUDA 13 driver and a Python 3.12 with numpy, torch and transformers; there"
	@echo "    bash .gpu/b/run.sh              measures all, in some ten minutes, and prints a table; run.sh tells of its options"
	@echo "Where files travel in pieces, take .gpu/a first and call .gpu/a/run.sh, which keeps it; then .gpu/b."

fmt: ## format the sources
	cargo fmt

lint: setup ## what CI checks before the tests
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings

clean: ## remove what was built and what jobs wrote; `git clean -xfd` removes fetched things too
	rm -rf target out .fixtures

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-13s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# What the above need.
setup:
	@.linux/setup.sh

release: setup
	cargo build --release --locked

model:
	@fixtures/fetch_models.sh

oracle:
	@fixtures/oracle.sh

fixtures: oracle
	@fixtures/make_fixtures.sh $(FIXTURES)

smollm2: oracle model
	@[ -f $(MODELS)/smollm2/quantized/tokenizer.json ] || $(PYTHON) fixtures/convert_smollm2.py $(SMOLLM2) $(MODELS)/smollm2

whisper: release
	@fixtures/fetch_models.sh whisper-tiny.en whisper-base
	@for model in whisper-tiny.en whisper-base; do \
	  [ -f $(MODELS)/$$model/config.json ] || { rm -rf $(MODELS)/$$model; target/release/mlxbatch convert $(MODELS)/$$model-ct2 $(MODELS)/$$model; } || exit 1; \
	done
