"""Workload d: windows of 30 s of real speech through Whisper, by mlxbatch and by transformers, on the same weights.

    python speech.py windows CLIPS DIR [--windows 512]
    python speech.py mlxbatch PROGRAM MODEL DIR --rows N [--repeat 3] [--device gpu] --result FILE
    python speech.py transformers MODEL DIR --rows N [--repeat 3] [--device gpu] --result FILE

`windows` makes the recordings: the clips of fixtures/fetch_speech.sh one after another, in another order each time, cut at 30 s. Both
programs read the files, make features, and transcribe greedily, in English, without timestamps and without second attempts. MODEL is
in mlx-whisper's layout, as `mlxbatch convert` writes it; transformers gets the same tensors under its own names. Loading counts for
nobody: of mlxbatch, which loads and has its kernels compiled in each run, the time of a short run is taken off that of a long one, and
the windows too; the long one transcribes each window several times, so that seconds of loading more or less weigh little. The result
has windows a second, tokens are not compared but texts are: FILE.texts holds them.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import wave
from pathlib import Path

from compare import median

RATE = 16_000
SECONDS = 30


def windows(args):
    clips = []
    for path in sorted(args.clips.glob("*.wav")):
        with wave.open(str(path)) as clip:
            assert (clip.getframerate(), clip.getnchannels(), clip.getsampwidth()) == (RATE, 1, 2), path
            clips.append(clip.readframes(clip.getnframes()))
    order = random.Random(0)
    args.folder.mkdir(parents=True, exist_ok=True)
    for index in range(args.windows):
        samples = b""
        while len(samples) < 2 * RATE * SECONDS:
            samples += b"".join(order.sample(clips, len(clips)))
        with wave.open(str(args.folder / f"{index:04}.wav"), "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(RATE)
            out.writeframes(samples[: 2 * RATE * SECONDS])
    print(f"{args.windows} windows of {SECONDS} s from {len(clips)} clips")


def run_mlxbatch(args, work, files, name, times=1):
    rows = ({"id": f"{time}-{file.stem}", "audio": str(file)} for time in range(times) for file in files)
    (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = work / f"{name}.toml"
    job.write_text(
        f'[job]\noutput = "{name}-out"\n[model]\npath = "{args.model.resolve()}"\ndevice = "{args.device}"\n'
        f'[input]\nmanifest = "{name}.jsonl"\n[transcription]\nlanguage = "en"\ntimestamps = false\ntemperatures = [0.0]\n'
        f"compression_ratio_threshold = false\nlogprob_threshold = false\nno_speech_threshold = false\nsuppress_tokens = []\nsuppress_blank = false\n[batching]\nrows = {args.rows}\n"
    )
    started = time.perf_counter()
    done = subprocess.run(
        [args.program, "run", job, "--fresh", "--progress", "none", "--json"], check=True, capture_output=True, text=True
    )
    return time.perf_counter() - started, json.loads(done.stdout)


def texts_of(args, work, name):
    shown = [args.program, "show", work / f"{name}-out", "--columns", "id,text"]
    lines = subprocess.run(shown, check=True, capture_output=True, text=True).stdout.splitlines()
    return "".join(line.removeprefix("0-") + "\n" for line in sorted(lines) if line.startswith("0-"))


def mlxbatch(args):
    files = sorted(args.folder.resolve().glob("*.wav"))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        run_mlxbatch(args, work, files[: args.short], "short")
        walls = []
        for number in range(args.repeat):
            short, _ = run_mlxbatch(args, work, files[: args.short], "short")
            long, summary = run_mlxbatch(args, work, files, "long", args.times)
            walls.append((long - short) / (args.times * len(files) - args.short))
            print(f"run {number + 1}: {1 / walls[-1]:.1f} windows/s ({long:.2f} s and {short:.2f} s)", file=sys.stderr, flush=True)
            write(args, "mlxbatch", walls, {"summary": summary, "wall_seconds_long": long, "wall_seconds_short": short})
        Path(f"{args.result}.texts").write_text(texts_of(args, work, "long"))


def write(args, program, walls, more):
    rate = 1 / median(walls)
    result = {"program": program, "rows": args.rows, "runs": len(walls), "windows_per_second": rate, "times_real_time": rate * SECONDS}
    args.result.write_text(json.dumps(result | more))


# mlx-whisper's names, and transformers'.
NAMES = [
    ("blocks.", "layers."),
    (".cross_attn_ln.", ".encoder_attn_layer_norm."),
    (".cross_attn.", ".encoder_attn."),
    (".attn_ln.", ".self_attn_layer_norm."),
    (".attn.", ".self_attn."),
    (".mlp_ln.", ".final_layer_norm."),
    (".mlp1.", ".fc1."),
    (".mlp2.", ".fc2."),
    (".query.", ".q_proj."),
    (".key.", ".k_proj."),
    (".value.", ".v_proj."),
    (".out.", ".out_proj."),
    ("decoder.ln.", "decoder.layer_norm."),
    ("encoder.ln_post.", "encoder.layer_norm."),
    ("decoder.token_embedding.", "decoder.embed_tokens."),
    ("decoder.positional_embedding", "decoder.embed_positions.weight"),
]


def renamed(name):
    for old, new in NAMES:
        name = name.replace(old, new)
    return f"model.{name}"


def load(folder, device):
    import torch
    from safetensors.torch import load_file
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    dims = json.loads((folder / "config.json").read_text())
    config = WhisperConfig(
        vocab_size=dims["n_vocab"],
        num_mel_bins=dims["n_mels"],
        d_model=dims["n_audio_state"],
        encoder_layers=dims["n_audio_layer"],
        encoder_attention_heads=dims["n_audio_head"],
        encoder_ffn_dim=4 * dims["n_audio_state"],
        decoder_layers=dims["n_text_layer"],
        decoder_attention_heads=dims["n_text_head"],
        decoder_ffn_dim=4 * dims["n_text_state"],
        max_source_positions=dims["n_audio_ctx"],
        max_target_positions=dims["n_text_ctx"],
    )
    tensors = {renamed(name): tensor for name, tensor in load_file(folder / "weights.safetensors").items()}
    for name in [name for name in tensors if ".conv" in name and name.endswith("weight")]:
        # (out, kernel, in) -> (out, in, kernel)
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    tensors["proj_out.weight"] = tensors["model.decoder.embed_tokens.weight"]
    model = WhisperForConditionalGeneration(config).to(torch.float16)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    left = [name for name in missing if name != "model.encoder.embed_positions.weight"]
    if left or unexpected:
        sys.exit(f"speech: these weights are not transformers': {left} are missing, {unexpected} are left over")
    return model.to(device).eval()


def transformers(args):
    import numpy as np
    import tokenizers
    import torch
    from transformers import GenerationConfig, GenerationMixin, WhisperFeatureExtractor, __version__

    device = "cuda" if args.device == "gpu" else "cpu"
    model = load(args.model, device)
    tokenizer = tokenizers.Tokenizer.from_file(str(args.model / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(f"<|{name}|>") for name in ("startoftranscript", "en", "transcribe", "notimestamps", "endoftext")}
    start = [ids[name] for name in ("startoftranscript", "en", "transcribe", "notimestamps")]
    settings = GenerationConfig(
        max_new_tokens=224,
        do_sample=False,
        decoder_start_token_id=start[0],
        eos_token_id=ids["endoftext"],
        pad_token_id=ids["endoftext"],
        bos_token_id=ids["endoftext"],
    )
    model.generation_config = settings
    extractor = WhisperFeatureExtractor(feature_size=model.config.num_mel_bins)
    files = sorted(args.folder.glob("*.wav"))

    def once():
        texts = {}
        for first in range(0, len(files), args.rows):
            batch = files[first : first + args.rows]
            clips = []
            for file in batch:
                with wave.open(str(file)) as clip:
                    clips.append(np.frombuffer(clip.readframes(clip.getnframes()), "<i2").astype(np.float32) / 32768)
            features = extractor(clips, sampling_rate=RATE, return_tensors="pt", device=device).input_features
            features = features.to(device, torch.float16)
            prompt = torch.tensor([start] * len(batch), device=device)
            # The plain decoding loop: Whisper's own `generate` adds rules that are not asked for here.
            with torch.no_grad():
                out = GenerationMixin.generate(model, features, decoder_input_ids=prompt, generation_config=settings)
            for file, row in zip(batch, out.tolist()):
                texts[file.stem] = tokenizer.decode(row[len(start) :], skip_special_tokens=True).strip()
        return texts

    walls = []
    for number in range(args.repeat + 1):
        started = time.perf_counter()
        texts = once()
        wall = (time.perf_counter() - started) / len(files)
        print(f"{'warm-up' if number == 0 else f'run {number}'}: {1 / wall:.1f} windows/s", file=sys.stderr, flush=True)
        if number > 0:
            walls.append(wall)
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
        versions = {"transformers": __version__, "torch": torch.__version__}
        write(args, "transformers", walls or [wall], {"versions": versions, "peak_memory_bytes": peak, "warm_up_only": not walls})
    Path(f"{args.result}.texts").write_text("".join(f"{name}\t{text}\n" for name, text in sorted(texts.items())))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    of_windows = commands.add_parser("windows")
    of_windows.add_argument("clips", type=Path)
    of_windows.add_argument("folder", type=Path)
    of_windows.add_argument("--windows", type=int, default=512)
    of_windows.set_defaults(run=windows)
    for name, run in (("mlxbatch", mlxbatch), ("transformers", transformers)):
        command = commands.add_parser(name)
        if run is mlxbatch:
            command.add_argument("program", type=Path)
            command.add_argument("--short", type=int, default=64, help="windows of the short run")
            command.add_argument("--times", type=int, default=4, help="how often the long run transcribes each window")
        command.add_argument("model", type=Path)
        command.add_argument("folder", type=Path)
        command.add_argument("--rows", type=int, default=64)
        command.add_argument("--repeat", type=int, default=3)
        command.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
        command.add_argument("--result", type=Path, required=True)
        command.set_defaults(run=run)
    args = parser.parse_args()
    if getattr(args, "program", None):
        args.program = args.program.resolve()
    args.run(args)


if __name__ == "__main__":
    main()
