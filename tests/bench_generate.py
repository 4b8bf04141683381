"""Output tokens a second of `mlxbatch` and of mlx-lm's BatchGenerator, on the same prompts, at 1, 8 and 32 rows.

    python tests/bench_generate.py MLXBATCH MODEL.gguf MODEL_FOLDERS [--rows 1,8,32] [--max-tokens 32] [--prompts-per-row 2]

MODEL_FOLDERS holds `quantized` and `dense`, made by fixtures/convert_smollm2.py from the same file. mlx-lm runs as it comes
(`quantized`), and, for a second opinion, on dense float32 weights (`dense`; on Linux with the OpenBLAS that mlxbatch links).
Loading counts for nobody: the clock of mlxbatch runs from the first row's admission to the last row's end, both read from its
Parquet files.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
from transformers import AutoTokenizer

SUBJECTS = ["the sea", "winter", "bread", "a lost key", "trains", "the moon", "honey bees", "old maps"]
SUBJECTS += ["rivers", "chess", "glass", "salt", "wool", "the desert", "clocks", "bridges"]
TASKS = [
    "Write a short paragraph about {}.",
    "Name five things that have to do with {} and say why for each of them.",
    "Explain {} to a child who has never heard of it. Use simple words, short sentences, and one example from daily life.",
    "Write a letter to a friend in which you tell of a day that had much to do with {}. Begin with the weather, then tell what "
    "happened in the morning, at noon and in the evening, and end with a question for your friend.",
]
OUT = Path("out/bench")


def run_mlxbatch(binary, model, manifest, rows, prompts, max_tokens):
    output = OUT / f"mlxbatch-{rows}"
    job = OUT / "job.toml"
    job.write_text(
        f"""[job]
name = "bench"
task = "generate"
output = "mlxbatch"

[model]
path = "{model.resolve()}"

[input]
manifest = ["{manifest.name}"]

[generation]
max_tokens = {max_tokens}

[batching]
rows = {rows}
order = "manifest"

[results]
token_ids = true
"""
    )
    command = [binary, "run", job, "--output", output, "--limit", str(prompts), "--fresh", "--progress", "none"]
    finished = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if finished.returncode != 0:
        sys.exit(f"mlxbatch failed with status {finished.returncode}:\n{finished.stderr}")
    return measured(output, rows)


def measured(output, rows):
    results = pq.read_table(sorted(output.glob("part-*.parquet"))).sort_by("row").to_pylist()
    failed = [row for row in results if row["status"] != "ok"]
    if failed:
        sys.exit(f"mlxbatch failed on {len(failed)} rows, the first: {failed[0]['error']}")
    ends = [row["started_at"].timestamp() + row["total_ms"] / 1000 for row in results]
    admitted = [end - (row["ttft_ms"] + row["decode_ms"]) / 1000 for end, row in zip(ends, results)]
    wall = max(ends) - min(admitted)
    tokens = sum(row["completion_tokens"] for row in results)
    return {
        "rows": rows,
        "prompts": len(results),
        "prompt_tokens": sum(row["prompt_tokens"] for row in results),
        "output_tokens": tokens,
        "wall_seconds": round(wall, 3),
        "output_tokens_per_second": round(tokens / wall, 2),
        "token_ids": [row["token_ids"] for row in results],
    }


def run_mlx_lm(folder, prompts, args, blas=None):
    command = [sys.executable, Path(__file__).with_name("bench_mlx_lm.py"), folder, prompts, "--rows", args.rows]
    command += ["--max-tokens", args.max_tokens, "--prompts-per-row", args.prompts_per_row]
    environment = os.environ | ({"LD_PRELOAD": str(blas)} if blas else {})
    finished = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, env=environment)
    if finished.returncode != 0:
        sys.exit(f"mlx-lm failed on {folder}")
    return {result["rows"]: result for result in map(json.loads, finished.stdout.splitlines())}


def same(ours, theirs, stops):
    """Prompts whose tokens agree; an end token is sampled but may not be kept."""

    def text(ids):
        return [token for token in ids if token not in stops]

    return sum(text(a) == text(b) for a, b in zip(ours, theirs))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mlxbatch", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("folders", type=Path)
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--prompts-per-row", type=int, default=2)
    args = parser.parse_args()
    all_rows = [int(rows) for rows in args.rows.split(",")]

    OUT.mkdir(parents=True, exist_ok=True)
    texts = [
        TASKS[i % len(TASKS)].format(SUBJECTS[(i // len(TASKS)) % len(SUBJECTS)])
        for i in range(max(all_rows) * args.prompts_per_row)
    ]
    manifest = OUT / "prompts.jsonl"
    manifest.write_text("".join(json.dumps({"id": f"bench-{i:03}", "prompt": text}) + "\n" for i, text in enumerate(texts)))
    tokenizer = AutoTokenizer.from_pretrained(args.folders / "dense")
    rendered = [
        tokenizer.apply_chat_template([{"role": "user", "content": t}], tokenize=False, add_generation_prompt=True) for t in texts
    ]
    prompts = OUT / "prompts.json"
    prompts.write_text(json.dumps([tokenizer.encode(text, add_special_tokens=False) for text in rendered]))
    stops = {tokenizer.eos_token_id}

    blas = Path(".mlx/mlx/lib/libmlxblas.so").resolve()
    blas = blas if blas.exists() else None
    ours = {
        rows: run_mlxbatch(args.mlxbatch, args.model, manifest, rows, rows * args.prompts_per_row, args.max_tokens)
        for rows in all_rows
    }
    dense = run_mlx_lm(args.folders / "dense", prompts, args, blas)
    quantized = run_mlx_lm(args.folders / "quantized", prompts, args)

    print(f"output tokens a second, prompt included in the time; {os.cpu_count()} cores; at most {args.max_tokens} tokens a prompt")
    print("| rows | prompts | prompt + output tokens | mlxbatch | mlx-lm | ratio | mlx-lm float32 | ratio | same tokens |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for rows in all_rows:
        a, b, c = ours[rows], quantized[rows], dense[rows]
        if a["prompt_tokens"] != b["prompt_tokens"]:
            sys.exit(f"the prompts differ: {a['prompt_tokens']} tokens for mlxbatch, {b['prompt_tokens']} for mlx-lm")
        speed, peer, other = (x["output_tokens_per_second"] for x in (a, b, c))
        agree = same(a["token_ids"], c["token_ids"], stops)
        cells = [rows, a["prompts"], f"{a['prompt_tokens']} + {a['output_tokens']}", speed, peer, f"{speed / peer:.1f}"]
        cells += [other, f"{speed / other:.1f}", f"{agree} of {a['prompts']}"]
        print(f"| {' | '.join(map(str, cells))} |")
    for result in (*ours.values(), *quantized.values(), *dense.values()):
        del result["token_ids"]
    (OUT / "generate.json").write_text(json.dumps({"mlxbatch": ours, "mlx_lm": quantized, "mlx_lm_dense": dense}, indent=1))


if __name__ == "__main__":
    main()
