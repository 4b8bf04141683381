"""mlx-lm's BatchGenerator over a workload that `mlxbatch bench --dump` wrote.

    python peer_mlx_lm.py MODEL WORKLOAD.json --rows N [--repeat 3] [--device gpu] [--outputs FILE] --result FILE

All prompts are handed over at once, in the file's order, and no token ends a row. Loading is not counted, and neither is a first run.
FILE is written after every run, so that one that is cut off leaves the figures of those before it.
"""

import json
import time
from pathlib import Path

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import load_model

from compare import median, peer_arguments, percentile, report


def run(model, workload, rows):
    """Seconds, milliseconds to each row's first token, milliseconds of each step with all rows, and the tokens of each row."""
    generator = BatchGenerator(model, stop_tokens=[], completion_batch_size=rows, prefill_batch_size=min(8, rows))
    full = min(rows, len(workload))
    steps, first, tokens = [], {}, {}
    started = before = time.perf_counter()
    uids = generator.insert([row["prompt"] for row in workload], [row["max_tokens"] for row in workload])
    while responses := generator.next_generated():
        now = time.perf_counter()
        if len(responses) == full:
            steps.append((now - before) * 1e3)
        before = now
        for response in responses:
            first.setdefault(response.uid, (now - started) * 1e3)
            tokens.setdefault(response.uid, []).append(response.token)
    wall = time.perf_counter() - started
    generator.close()
    return wall, [first[uid] for uid in uids], steps, [tokens[uid] for uid in uids]


def main():
    args = peer_arguments()

    mx.set_default_device(mx.gpu if args.device == "gpu" else mx.cpu)
    workload = json.loads(args.workload.read_text())
    model, _ = load_model(args.model)
    walls, ttfts, all_steps, peaks = [], [], [], []
    for number in range(args.repeat + 1):
        mx.reset_peak_memory()
        wall, ttft, steps, outputs = run(model, workload, args.rows)
        report(number, args.repeat, wall, outputs)
        if number == 0:
            continue
        walls.append(wall)
        ttfts.append(ttft)
        all_steps.append(steps)
        peaks.append(mx.get_peak_memory())
        prompt_tokens, output_tokens = sum(len(row["prompt"]) for row in workload), sum(map(len, outputs))
        result = {
            "program": "mlx_lm",
            "versions": {"mlx_lm": mlx_lm.__version__, "mlx": mx.__version__},
            "device": str(mx.default_device()),
            "rows": args.rows,
            "prompts": len(workload),
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "runs": len(walls),
            "wall_seconds": median(walls),
            "wall_seconds_of_runs": walls,
            "output_tokens_per_second": output_tokens / median(walls),
            "total_tokens_per_second": (prompt_tokens + output_tokens) / median(walls),
            "ttft_ms_p50": median([percentile(ttft, 50) for ttft in ttfts]),
            "ttft_ms_p95": median([percentile(ttft, 95) for ttft in ttfts]),
            # Steps with all rows; among them those that a batch of prompts joined.
            "decode_step_ms_p50": median([percentile(steps, 50) for steps in all_steps]),
            "decode_step_ms_p95": median([percentile(steps, 95) for steps in all_steps]),
            "peak_memory_bytes": median(peaks),
        }
        args.result.write_text(json.dumps(result))
        if args.outputs:
            args.outputs.write_text(json.dumps(outputs))


if __name__ == "__main__":
    main()
