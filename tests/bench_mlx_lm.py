"""mlx-lm's BatchGenerator over given prompts: the peer that bench_generate.py compares with.

    python tests/bench_mlx_lm.py MODEL_FOLDER PROMPTS.json --rows 1,8,32 --max-tokens 32 [--prompts-per-row 2]

PROMPTS.json is a list of lists of token ids. At each number of rows the first `rows × prompts-per-row` prompts are generated
greedily, after a warm-up of one prompt; loading is not counted. Prints one JSON object a line.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import load_model


def generate(model, prompts, rows, max_tokens, stops):
    """Token ids of each prompt, an end token included, in the order of `prompts`."""
    generator = BatchGenerator(
        model,
        max_tokens=max_tokens,
        stop_tokens=[[token] for token in stops],
        completion_batch_size=rows,
        prefill_batch_size=min(8, rows),
    )
    tokens = {uid: [] for uid in generator.insert(prompts)}
    while responses := generator.next_generated():
        for response in responses:
            tokens[response.uid].append(response.token)
    generator.close()
    return list(tokens.values())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--prompts-per-row", type=int, default=2)
    args = parser.parse_args()

    prompts = json.loads(args.prompts.read_text())
    model, config = load_model(args.model)
    stops = config["eos_token_id"]
    stops = stops if isinstance(stops, list) else [stops]
    generate(model, prompts[:1], 1, 2, stops)
    for rows in map(int, args.rows.split(",")):
        wanted = rows * args.prompts_per_row
        if wanted > len(prompts):
            sys.exit(f"{rows} rows want {wanted} prompts; {args.prompts} has {len(prompts)}")
        mx.reset_peak_memory()
        start = time.perf_counter()
        tokens = generate(model, prompts[:wanted], rows, args.max_tokens, stops)
        wall = time.perf_counter() - start
        result = {
            "rows": rows,
            "prompts": wanted,
            "prompt_tokens": sum(map(len, prompts[:wanted])),
            "output_tokens": sum(map(len, tokens)),
            "wall_seconds": round(wall, 3),
            "output_tokens_per_second": round(sum(map(len, tokens)) / wall, 2),
            "peak_memory_bytes": mx.get_peak_memory(),
            "device": str(mx.default_device()),
            "token_ids": tokens,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
