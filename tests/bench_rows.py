"""What `mlxbatch` costs without a model: a manifest of a million rows through the fake engine, then a resume that finds all done.

python tests/bench_rows.py MLXBATCH [--rows 1000000] [--max-tokens 4]
"""

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

OUT = Path("out/bench")


def run(binary, *arguments):
    """Wall seconds and the highest resident memory, in MB, of one child process."""
    start = time.perf_counter()
    child = os.spawnv(os.P_NOWAIT, binary, [str(binary), *map(str, arguments)])
    _, status, usage = os.wait4(child, 0)
    wall = time.perf_counter() - start
    if status != 0:
        sys.exit(f"mlxbatch {' '.join(map(str, arguments))} ended with status {os.waitstatus_to_exitcode(status)}")
    return wall, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mlxbatch", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--max-tokens", type=int, default=4)
    args = parser.parse_args()
    binary = args.mlxbatch.resolve()

    OUT.mkdir(parents=True, exist_ok=True)
    with open(OUT / "rows.jsonl", "w") as manifest:
        manifest.writelines(f'{{"id": "row-{i:07}", "prompt": "Say something about the number {i}."}}\n' for i in range(args.rows))
    job = OUT / "rows.toml"
    job.write_text(
        f"""[job]
name = "rows"
task = "generate"
output = "rows"

[model]
path = "fake"

[input]
manifest = ["rows.jsonl"]

[generation]
max_tokens = {args.max_tokens}

[batching]
rows = 256

[results]
rows_per_part = 100000
"""
    )
    shutil.rmtree(OUT / "rows", ignore_errors=True)
    wall, memory = run(binary, "run", job, "--progress", "none")
    if not (OUT / "rows" / "_SUCCESS").exists():
        sys.exit(f"{OUT / 'rows'} has no _SUCCESS")
    print(f"{args.rows} rows through the fake engine: {wall:.1f} s, {args.rows / wall:,.0f} rows/s, peak memory {memory:.0f} MB")
    wall, memory = run(binary, "run", job, "--progress", "none")
    print(f"resume that finds all done: {wall:.2f} s, peak memory {memory:.0f} MB")


if __name__ == "__main__":
    main()
