"""What `mlxbatch` costs without a model: more and more rows through the fake engine, then a resume that finds all done.

python tests/bench_rows.py MLXBATCH [--rows 20000,200000,2000000] [--max-tokens 4] [--head 0]

`--head` puts so many characters before every prompt that all rows share; the fake engine's tokens are bytes.
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


def measure(binary, rows, max_tokens, head):
    """A run, then a resume: seconds and memory of each."""
    with open(OUT / "rows.jsonl", "w") as manifest:
        manifest.writelines(
            f'{{"id": "row-{i:07}", "prompt": "{head}Say something about the number {i}."}}\n' for i in range(rows)
        )
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
max_tokens = {max_tokens}

[batching]
rows = 256

[results]
rows_per_part = 100000
"""
    )
    shutil.rmtree(OUT / "rows", ignore_errors=True)
    first = run(binary, "run", job, "--progress", "none")
    if not (OUT / "rows" / "_SUCCESS").exists():
        sys.exit(f"{OUT / 'rows'} has no _SUCCESS")
    return first, run(binary, "run", job, "--progress", "none")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mlxbatch", type=Path)
    parser.add_argument("--rows", default="20000,200000,2000000")
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--head", type=int, default=0)
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    head = ("Answer in one word, and in the language of the question. " * (args.head // 50 + 1))[: args.head]
    print("| rows | run, s | rows/s | peak memory, MB | resume, s | peak memory, MB |")
    print("|---:|---:|---:|---:|---:|---:|")
    for rows in map(int, args.rows.split(",")):
        (wall, memory), (again, memory_again) = measure(args.mlxbatch.resolve(), rows, args.max_tokens, head)
        print(f"| {rows:,} | {wall:.2f} | {rows / wall:,.0f} | {memory:.0f} | {again:.2f} | {memory_again:.0f} |", flush=True)
    shutil.rmtree(OUT / "rows", ignore_errors=True)
    (OUT / "rows.jsonl").unlink()


if __name__ == "__main__":
    main()
