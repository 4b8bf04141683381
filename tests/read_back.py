"""Reads a results folder with pyarrow and DuckDB, and fails unless both see the same rows and the schema of docs/output.md.

    python tests/read_back.py DIR [--rows N]

Needs pyarrow and duckdb. N is the number of rows that a complete run has.
"""

import argparse
import json
import math
import pathlib
import sys

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

SEGMENT = pa.struct([
    pa.field("start", pa.float64(), False),
    pa.field("end", pa.float64(), False),
    pa.field("text", pa.string(), False),
    pa.field("avg_logprob", pa.float32(), False),
    pa.field("compression_ratio", pa.float32(), False),
    pa.field("no_speech_prob", pa.float32(), False),
    pa.field("temperature", pa.float32(), False),
])
LIKELY = [pa.field("token_id", pa.uint32(), False), pa.field("logprob", pa.float32(), False)]
LOGPROB = pa.struct([*LIKELY, pa.field("top", pa.list_(pa.field("item", pa.struct(LIKELY), False)), False)])
# Name, type, nullable; in the order of the file. docs/output.md is the reference.
COLUMNS = [
    ("id", pa.string(), False),
    ("row", pa.uint64(), False),
    ("source", pa.string(), False),
    ("input_hash", pa.uint64(), False),
    ("status", pa.string(), False),
    ("error_stage", pa.string(), True),
    ("error", pa.string(), True),
    ("text", pa.string(), True),
    ("finish_reason", pa.string(), True),
    ("language", pa.string(), True),
    ("segments", pa.list_(pa.field("item", SEGMENT, False)), True),
    ("notes", pa.list_(pa.field("item", pa.string(), False)), True),
    ("prompt_tokens", pa.uint32(), False),
    ("image_tokens", pa.uint32(), False),
    ("audio_tokens", pa.uint32(), False),
    ("cached_tokens", pa.uint32(), False),
    ("completion_tokens", pa.uint32(), False),
    ("audio_seconds", pa.float64(), True),
    ("media_ms", pa.float64(), True),
    ("encode_ms", pa.float64(), True),
    ("queue_ms", pa.float64(), True),
    ("prefill_ms", pa.float64(), True),
    ("ttft_ms", pa.float64(), True),
    ("decode_ms", pa.float64(), True),
    ("total_ms", pa.float64(), True),
    ("tokens_per_second", pa.float64(), True),
    ("rows_in_batch", pa.float64(), True),
    ("started_at", pa.timestamp("us", tz="UTC"), True),
    ("token_ids", pa.list_(pa.field("item", pa.uint32(), False)), True),
    ("logprobs", pa.list_(pa.field("item", LOGPROB, False)), True),
    ("reference", pa.string(), True),
    ("wer", pa.float64(), True),
    ("cer", pa.float64(), True),
    ("reference_words", pa.uint32(), True),
    ("word_errors", pa.uint32(), True),
    ("reference_characters", pa.uint32(), True),
    ("character_errors", pa.uint32(), True),
]
KEPT_TYPES = {pa.string(), pa.int64(), pa.float64(), pa.bool_()}
METADATA = ["schema_version", "job_hash", "manifest_hash", "model_id", "model_hash", "versions", "rows_failed"]


def check_schema(part, kept):
    schema = pq.read_schema(part)
    names = set(schema.names)
    own = [column for column in COLUMNS if column[0] != "token_ids" or "token_ids" in names]
    for position, (name, kind, nullable) in enumerate(own):
        field = schema.field(position)
        assert field.name == name, f"{part}: column {position} is {field.name}, expected {name}"
        assert field.type == kind, f"{part}: {name} is {field.type}, expected {kind}"
        assert field.nullable == nullable, f"{part}: {name} nullable is {field.nullable}"
    rest = [schema.field(position) for position in range(len(own), len(schema))]
    assert [field.name for field in rest] == kept, f"{part}: keeps {[field.name for field in rest]}, run.json says {kept}"
    for field in rest:
        assert field.type in KEPT_TYPES and field.nullable, f"{part}: {field}"
    metadata = pq.read_metadata(part).metadata
    for key in METADATA:
        assert metadata.get(f"mlxbatch.{key}".encode()), f"{part}: no metadata mlxbatch.{key}"
    return schema


def check_rows(table):
    rows = table.to_pylist()
    ids, numbers = [row["id"] for row in rows], [row["row"] for row in rows]
    assert len(set(ids)) == len(ids), "an id is there twice"
    assert len(set(numbers)) == len(numbers), "a row is there twice"
    for row in rows:
        ok = row["status"] == "ok"
        assert ok or row["status"] == "failed", row
        for name in ["error_stage", "error"]:
            assert (row[name] is None) == ok, row
        for name in ["text", "finish_reason", "ttft_ms", "decode_ms", "total_ms", "started_at"]:
            assert (row[name] is not None) == ok, row
        assert row["finish_reason"] in (None, "stop", "length"), row
        check_heard(row)
        check_logprobs(row, ok)
        check_score(row, ok)
    return rows


def check_heard(row):
    heard = row["audio_seconds"] is not None
    assert (row["segments"] is not None) == heard and (heard or row["audio_tokens"] == 0 and row["language"] is None), row
    assert row["notes"] is None or row["notes"], row
    for segment in row["segments"] or []:
        assert 0 <= segment["start"] <= segment["end"] and segment["text"], row
        assert 0 <= segment["no_speech_prob"] <= 1 and segment["temperature"] >= 0, row


def check_logprobs(row, ok):
    logprobs = row["logprobs"]
    assert logprobs is None or ok and len(logprobs) == row["completion_tokens"], row
    assert logprobs is None or row.get("token_ids", ids := [token["token_id"] for token in logprobs]) == ids, row
    for token in logprobs or []:
        assert token["logprob"] <= 0 and len(token["top"]) == len(logprobs[0]["top"]), row


def check_score(row, ok):
    rates = [("wer", "word_errors", "reference_words"), ("cer", "character_errors", "reference_characters")]
    scored = row["word_errors"] is not None
    assert not scored or ok and row["reference"] is not None, row
    for rate, errors, length in rates:
        assert (row[errors] is not None) == (row[length] is not None) == scored, row
        assert row[rate] == (row[errors] / row[length] if row[length] else None), row


def check_failed(folder, rows):
    path = folder / "failed.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    failed = {row["row"]: row for row in rows if row["status"] == "failed"}
    assert len(lines) == len(failed), f"failed.jsonl has {len(lines)} lines, the parts have {len(failed)} failed rows"
    for line in lines:
        row = failed.pop(line["_row"])
        assert (line["_error"], line["_error_stage"], line["_source"]) == (row["error"], row["error_stage"], row["source"]), line
    return len(lines)


def same(a, b):
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--rows", type=int)
    arguments = parser.parse_args()
    folder = arguments.folder

    parts = sorted(folder.glob("part-*.parquet"))
    assert parts, f"{folder} has no parts"
    assert not list(folder.glob("*.tmp")), "a .tmp was left behind"
    record = json.loads((folder / "run.json").read_text())
    schemas = [check_schema(part, record["keep_columns"]) for part in parts]
    assert all(schema.equals(schemas[0]) for schema in schemas), "parts differ in their schema"

    arrow = pa.concat_tables([pq.read_table(part) for part in parts])
    rows = check_rows(arrow)
    failed = check_failed(folder, rows)
    assert record["state"] != "complete" or (folder / "_SUCCESS").exists()
    if arguments.rows is not None:
        assert sorted(row["row"] for row in rows) == list(range(arguments.rows)), f"not each of {arguments.rows} rows is there"
        assert (folder / "_SUCCESS").exists(), "no _SUCCESS"

    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    table = connection.sql(f"SELECT * FROM read_parquet('{folder}/part-*.parquet') ORDER BY row").to_arrow_table()
    names = table.column_names
    assert names == arrow.column_names, f"DuckDB has {names}"
    duck = table.to_pylist()
    rows.sort(key=lambda row: row["row"])
    assert len(duck) == len(rows), f"DuckDB has {len(duck)} rows, pyarrow {len(rows)}"
    for ours, theirs in zip(rows, duck):
        for name in names:
            assert same(ours[name], theirs[name]), f"row {ours['row']}, {name}: pyarrow {ours[name]!r}, DuckDB {theirs[name]!r}"
    # Nested values by SQL, as a user asks for them.
    segments = connection.sql(f"""
        SELECT row, unnest(segments, recursive := true) FROM read_parquet('{folder}/part-*.parquet') ORDER BY row
    """).fetchall()
    expected = [(row["row"], *segment.values()) for row in rows for segment in row["segments"] or []]
    assert sorted(segments) == sorted(expected), "DuckDB sees other segments"
    tops = connection.sql(f"""
        SELECT row, token.token_id, unnest(token.top, recursive := true)
        FROM (SELECT row, unnest(logprobs) AS token FROM read_parquet('{folder}/part-*.parquet'))
    """).fetchall()
    tokens = [(row["row"], token) for row in rows for token in row["logprobs"] or []]
    expected = [(row, token["token_id"], *likely.values()) for row, token in tokens for likely in token["top"]]
    assert sorted(tops) == sorted(expected), "DuckDB sees other log-probabilities"
    names = ["word_errors", "reference_words", "character_errors", "reference_characters"]
    sums = ", ".join(f"coalesce(sum({name}), 0)" for name in names)
    totals = connection.sql(f"SELECT {sums} FROM read_parquet('{folder}/part-*.parquet')").fetchall()[0]
    assert totals == tuple(sum(row[name] or 0 for row in rows) for name in names), totals
    print(f"{len(rows)} rows in {len(parts)} parts, {failed} failed: pyarrow and DuckDB agree")


if __name__ == "__main__":
    sys.exit(main())
