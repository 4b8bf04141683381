#!/usr/bin/env bash
# Makes .mlx/ (MLX 0.32.2 for Linux on x86-64, its C interface, OpenBLAS, Rust bindings) and .cargo/config.toml, which tells cargo to
# link them in place of mlx-sys's build script. Everything stays inside the project folder; running it again does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD here=$PWD/.linux out=$PWD/.mlx

case "$(uname -s)-$(uname -m)" in
  Linux-x86_64) ;;
  Darwin-*) exit 0 ;; # mlx-rs builds MLX itself, with Metal
  *) echo "set-up: $(uname -s) on $(uname -m) has not been tried; see docs/linux.md for what it would need" >&2; exit 1 ;;
esac
for tool in cargo gcc g++ python3; do
  command -v "$tool" >/dev/null || { echo "set-up: '$tool' is missing; install it (Debian: apt-get install gcc g++ python3 python3-pip; Rust: rustup) and run make again" >&2; exit 1; }
done
python3 -m pip --version >/dev/null || { echo "set-up: pip is missing; install python3-pip and run make again" >&2; exit 1; }

# The stamp names every input, the folder among them: a moved or changed checkout is set up anew.
stamp=$(cat "$here"/* <(grep -A1 -E 'name = "mlx-(rs|sys)"' Cargo.lock) <(echo "$root") | sha256sum | cut -c1-64)
if [ "$(cat "$out/stamp" 2>/dev/null)" = "$stamp" ] && [ -f .cargo/config.toml ]; then exit 0; fi
echo "set-up: MLX 0.32.2 for Linux into .mlx/ (once, two to four minutes)"
rm -rf "$out" && mkdir -p "$out/work" .cargo && rm -f .cargo/config.toml
work=$out/work

echo "set-up: fetching MLX, OpenBLAS, cmake and libclang"
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps --require-hashes --only-binary=:all: --target "$work/py" -r "$here/requirements.txt"
mv "$work/py/mlx" "$work/py/mlx_cpu.libs" "$out/"
# libopus is built by cmake whenever cargo builds its crate, so cmake stays; the wheel's own launcher wants Python, this does not.
mv "$work/py/cmake/data" "$out/cmake"
lib=$out/mlx/lib
cp "$work/py/scipy_openblas32/lib/libscipy_openblas.so" "$lib/"

echo "set-up: the BLAS products"
gcc -O2 -shared -fPIC -o "$lib/libmlxblas.so" "$here/openblas.c" -L"$lib" -lscipy_openblas -Wl,-rpath,'$ORIGIN'

# Fetching must not read a half-made override, so it runs before .cargo/config.toml is written.
cargo fetch --locked -q
mlxc=$(cargo metadata --format-version 1 --locked --filter-platform x86_64-unknown-linux-gnu | python3 -c '
import json, os, sys
packages = [p for p in json.load(sys.stdin)["packages"] if p["name"] == "mlx-sys"]
print(os.path.join(os.path.dirname(packages[0]["manifest_path"]), "src", "mlx-c"))')

echo "set-up: compiling MLX's C interface"
"$out/cmake/bin/cmake" -S "$mlxc" -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DMLX_C_USE_SYSTEM_MLX=ON \
  -DMLX_C_BUILD_EXAMPLES=OFF -DBUILD_SHARED_LIBS=OFF -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DCMAKE_PREFIX_PATH="$out/mlx" \
  -DCMAKE_CXX_FLAGS="-include $here/format -I$here" >"$work/cmake.log"
"$out/cmake/bin/cmake" --build "$work/build" -j"$(nproc)" --target mlxc >>"$work/cmake.log"
g++ -O2 -std=c++20 -shared -fPIC -I"$out/mlx/include" -o "$lib/libmlxc.so" "$here/half_and_clock.cpp" \
  -Wl,--whole-archive "$(find "$work/build" -name libmlxc.a | head -n1)" -Wl,--no-whole-archive -L"$lib" -lmlx -Wl,-rpath,'$ORIGIN'

echo "set-up: generating the Rust bindings"
cargo install -q --locked --root "$work/bindgen" --target-dir "$work/bindgen-target" bindgen-cli --version 0.72.1
for header in "$mlxc"/mlx/c/*.h; do echo "#include \"$header\""; done >"$work/all.h"
LIBCLANG_PATH=$work/py/clang/native "$work/bindgen/bin/bindgen" "$work/all.h" -o "$out/bindings.rs" --rust-target 1.73.0 \
  --blocklist-function malloc --blocklist-function realloc \
  --raw-line '#[repr(transparent)] #[derive(Debug, Default, Copy, Clone)] pub struct __BindgenFloat16(pub u16);' \
  --raw-line 'pub type float16_t = __BindgenFloat16; pub type bfloat16_t = u16;' \
  --raw-line 'unsafe extern "C" {' \
  --raw-line '  pub fn mlx_array_item_float16(res: *mut float16_t, arr: mlx_array) -> ::std::os::raw::c_int;' \
  --raw-line '  pub fn mlx_array_item_bfloat16(res: *mut bfloat16_t, arr: mlx_array) -> ::std::os::raw::c_int;' \
  --raw-line '  pub fn mlx_array_data_float16(arr: mlx_array) -> *const float16_t;' \
  --raw-line '  pub fn mlx_array_data_bfloat16(arr: mlx_array) -> *const bfloat16_t;' \
  --raw-line '}' \
  -- -I"$(dirname "$(dirname "$mlxc")")/mlx-c" -I"$mlxc" -isystem "$(gcc -print-file-name=include)"

cat >.cargo/config.toml <<T
# Written by .linux/setup.sh: replaces mlx-sys's build script, which links Apple frameworks on every platform.
[target.x86_64-unknown-linux-gnu.mlx]
rustc-link-search = ["native=$lib"]
rustc-link-lib = ["dylib=mlxc", "dylib=mlx"]
rustc-env = { OUT_DIR = "$out" }

# With it libopus is built.
[env]
CMAKE = "$out/cmake/bin/cmake"

# OpenBLAS first, so that libmlx finds its products there; libraries are found where they lie.
[target.x86_64-unknown-linux-gnu]
rustflags = ["-C", "link-arg=-Wl,--no-as-needed", "-C", "link-arg=-L$lib", "-C", "link-arg=-lmlxblas", "-C", "link-arg=-Wl,--as-needed", "-C", "link-arg=-Wl,-rpath,$lib"]
T
rm -rf "$work"
echo "$stamp" >"$out/stamp"
echo "set-up: done"
