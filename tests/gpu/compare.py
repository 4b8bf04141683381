"""Gathers what programs measured on the same workloads, and makes a table of it.

    python compare.py add RESULTS.jsonl WORKLOAD ROWS PROGRAM STATUS RESULT.json [OURS.json THEIRS.json]
    python compare.py table RESULTS.jsonl...

`add` appends a program's result on a workload, or that there is none; with the tokens of two programs it counts the rows that are
equal. `table` prints Markdown: for each workload and number of rows a line a program, with mlxbatch's tokens a second over its own.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

OURS = "mlxbatch"


def median(values):
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


def percentile(values, percent):
    """The value that `percent` of the values do not exceed (nearest rank)."""
    if not values:
        return None
    ranked = sorted(values)
    return ranked[max(0, -(-len(ranked) * percent // 100) - 1)]


def peer_arguments():
    """What a program beside mlxbatch is told on its command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--outputs", type=Path)
    parser.add_argument("--result", type=Path, required=True)
    return parser.parse_args()


def report(number, repeat, wall, outputs):
    """Tells of a run, on standard error."""
    which = "warm-up" if number == 0 else f"run {number} of {repeat}"
    print(f"{which}: {wall:.2f} s, {sum(map(len, outputs)) / wall:.1f} output tokens/s", file=sys.stderr, flush=True)


def read(path):
    """The JSON in a file; none where it is missing or was cut off."""
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return None


def agreement(ours, theirs):
    """Rows that are equal, and the mean part of a row before the first token that differs."""
    equal, heads = 0, []
    for a, b in zip(ours, theirs):
        head = next((place for place, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        equal += a == b
        heads.append(head / max(len(a), len(b), 1))
    return {"rows_compared": len(heads), "rows_equal": equal, "head_equal": statistics.mean(heads) if heads else None}


def add(results, workload, rows, program, status, result, ours=None, theirs=None):
    found = read(result) or {}
    if found.get("program") == OURS and found.get("results"):
        # A result of mlxbatch has what is common to all numbers of rows around the one that was asked for.
        shared = {key: found[key] for key in ("program", "versions", "device", "dtype", "weight_bytes", "settings")}
        counts = {key: found["workload"][key] for key in ("prompts", "prompt_tokens", "output_tokens")}
        found = shared | counts | found["results"][0]
    entry = {"workload": workload, "rows": int(rows), "program": program, "status": int(status)} | found
    if not found:
        entry["failed"] = "out of time" if int(status) in (124, 137) else f"status {status}"
    tokens = (read(ours), read(theirs)) if program != OURS and ours and theirs else (None, None)
    if all(tokens):
        entry |= agreement(*tokens)
    with Path(results).open("a") as file:
        file.write(json.dumps(entry) + "\n")


def number(value, digits=0):
    return "" if value is None else f"{value:,.{digits}f}"


def line(entry, ours):
    rate = entry.get("output_tokens_per_second")
    notes = [entry.get(key) for key in ("failed", "note") if entry.get(key)]
    if entry.get("way", "").startswith("generate,"):
        notes.append("padded batches")
    if "rows_equal" in entry:
        notes.append(f"{entry['rows_equal']} of {entry['rows_compared']} rows equal")
    if entry["program"] == OURS and "host_share" in entry:
        notes.append(f"host {entry['host_share']:.0%}, occupancy {entry['occupancy']:.0%}")
        notes.append(f"memory predicted {entry['predicted_over_peak'] - 1:+.0%}")
    memory = entry.get("peak_memory_bytes")
    cells = [
        entry["workload"],
        str(entry["rows"]),
        entry["program"],
        number(rate),
        "" if not (rate and ours) or entry["program"] == OURS else f"{ours / rate:.2f}",
        number(entry.get("wall_seconds"), 2),
        number(entry.get("ttft_ms_p50")),
        number(entry.get("decode_step_ms_p50"), 2),
        number(memory / 1e9 if memory else None, 1),
        str(entry.get("runs", "")),
        "; ".join(note.replace("|", "/").replace("\n", " ")[:160] for note in notes),
    ]
    return "| " + " | ".join(cells) + " |"


def table(paths):
    entries = [json.loads(text) for path in paths for text in Path(path).read_text().splitlines() if text.strip()]
    print("| workload | rows | program | output tokens/s | mlxbatch over it | wall, s | first token p50, ms | step p50, ms | peak, GB | runs | |")
    print("|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---|")
    groups = {}
    for entry in entries:
        # A later measurement of the same takes the place of an earlier one.
        groups.setdefault((entry["workload"], entry["rows"]), {})[entry["program"]] = entry
    for group in groups.values():
        ours = group.get(OURS, {}).get("output_tokens_per_second")
        for entry in group.values():
            print(line(entry, ours))
    versions = {}
    for entry in entries:
        versions |= entry.get("versions", {})
    devices = sorted({str(entry["device"]) for entry in entries if entry.get("device")})
    print(f"\n{', '.join(f'{name} {version}' for name, version in versions.items())}; {', '.join(devices)}")


def main():
    match sys.argv[1:]:
        case ["add", *arguments] if 6 <= len(arguments) <= 8:
            add(*arguments)
        case ["table", first, *more]:
            table([first, *more])
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
