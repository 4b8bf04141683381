#!/usr/bin/env bash
# Packs what a bare GPU machine needs to measure mlxbatch beside mlx-lm and transformers: MLX's CUDA build in two halves of some
# 40 MB, its Python front for Python 3.12, mlx-lm, the program and the scripts. That machine needs an NVIDIA driver for CUDA 13 and a
# Python 3.12 with numpy, torch and transformers; from torch's own packages come the CUDA libraries.
#
#     tests/gpu/stage.sh PROGRAM LIBRARIES DIR     LIBRARIES holds the libmlxc.so that the program was linked with
#
# Makes DIR/a and DIR/b, which may travel one after the other. run.sh says what is done there.
set -euo pipefail
program=${1:?the program} libraries=${2:?the folder of libmlxc.so} dir=${3:?where to}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$dir/a" "$dir/b"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
version=0.32.2

# MLX changes with its version alone.
if [ "$(cat "$dir/version" 2>/dev/null)" != "$version" ] || [ ! -s "$dir/a/part.aa" ] || [ ! -s "$dir/b/part.ab" ]; then
  fetch() { python3 -m pip download -q --disable-pip-version-check --no-deps -d "$work/wheels" "$@"; }
  fetch "mlx-cuda-13==$version" "mlx-lm==$version"
  fetch --python-version 3.12 --only-binary=:all: --platform manylinux_2_35_x86_64 "mlx==$version"
  mkdir "$work/env"
  for wheel in "$work"/wheels/mlx-*.whl "$work"/wheels/mlx_cuda_13-*.whl; do python3 -m zipfile -e "$wheel" "$work/env"; done
  # Headers too: MLX compiles kernels when it first needs them.
  tar c -C "$work/env" mlx mlx_cuda_13.libs | xz -T0 -6 >"$work/all.tar.xz"
  (cd "$work" && split -n 2 all.tar.xz part.)
  mv "$work/part.aa" "$dir/a/part.aa"
  mv "$work/part.ab" "$dir/b/part.ab"
  rm -f "$dir"/b/mlx_lm-*.whl
  cp "$work"/wheels/mlx_lm-*.whl "$dir/b/"
  echo "$version" >"$dir/version"
fi

strip -o "$work/mlxbatch" "$program"
xz -T0 -6 -c "$work/mlxbatch" >"$dir/b/mlxbatch.xz"
cp "$libraries/libmlxc.so" "$dir/b/libmlxc.so"
# The program asks for the products of the CPU build by this name; on a GPU it takes none from there.
gcc -shared -x c /dev/null -o "$dir/b/libmlxblas.so"
cp "$here"/*.py "$here/run.sh" "$dir/b/"
cp "$here"/../../fixtures/{make_gemma4,make_checkpoints,tiny_tokenizer}.py "$dir/b/"
cp "$here/run.sh" "$dir/a/"

# Of photographs and recordings those that fixtures/fetch_photographs.sh and fetch_speech.sh have fetched.
if [ -e "$here/../../.models/photographs" ] && [ -e "$here/../../.models/speech" ]; then
  (cd "$here/../../.models" && tar c photographs/*.jpg photographs/*.png speech/*.wav) >"$dir/b/media.tar"
else
  echo "stage: no photographs or no clips in .models, so media is left out (make test-models fetches them)"
fi

# Workload d: Whisper base and the clips of fixtures/fetch_speech.sh, where they have been fetched and converted.
models=$here/../../.models
if [ -e "$models/whisper-base/weights.safetensors" ] && [ -e "$models/speech" ]; then
  mkdir -p "$dir/c" "$dir/d" "$dir/e"
  tar c -C "$models/whisper-base" config.json tokenizer.json weights.safetensors >"$work/whisper.tar"
  (cd "$work" && split -n 3 whisper.tar whisper.)
  mv "$work/whisper.aa" "$dir/c/" && mv "$work/whisper.ab" "$dir/d/" && mv "$work/whisper.ac" "$dir/e/"
  tar c -C "$models/speech" . >"$dir/c/clips.tar"
  for part in c d e; do cp "$here/run.sh" "$dir/$part/"; done
else
  echo "stage: no Whisper base or no clips in .models, so workload d is left out (make test-models fetches them)"
fi

for half in "$dir"/[a-e]; do
  half=${half##*/}
  kibibytes=$(du -sk "$dir/$half" | cut -f1)
  echo "$dir/$half: $((kibibytes / 1024)) MiB"
  [ "$kibibytes" -lt 65536 ] || { echo "stage: $dir/$half has more than 64 MiB" >&2; exit 1; }
done
