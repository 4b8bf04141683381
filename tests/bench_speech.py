"""Speech side by side, in one run: python bench_speech.py MLXBATCH .models PEERS

1. Decoding, resampling and log-mel on one core, against ffmpeg decoding and resampling the same files (one thread) and transformers'
   numpy features of what it gives.
2. How busy the pool keeps the cores: wall time of the same with every core over the work divided by the cores.
3. Whisper tiny.en over the same clips and weights, end to end, against mlx-whisper and faster-whisper, one process each, loading
   included; the clips are those of fetch_speech.sh, each heard several times.

PEERS is a folder with faster-whisper (pip install --target), or "-" to leave it out. Prints a table for docs/benchmarks.md.
"""
import json, os, pathlib, subprocess, sys, tempfile, time, wave

import imageio_ffmpeg
import numpy as np

binary, models, peers = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve(), sys.argv[3]
FFMPEG = imageio_ffmpeg.get_ffmpeg_exe()
ROUNDS = 3
CLIP_TIMES = 4
FORMATS = {
    "wav 16 kHz": ("wav", ["-ar", "16000", "-c:a", "pcm_s16le"]),
    "wav 44.1 kHz stereo": ("wav", ["-ar", "44100", "-ac", "2", "-c:a", "pcm_s16le"]),
    "flac 16 kHz": ("flac", ["-ar", "16000"]),
    "flac 44.1 kHz stereo": ("flac", ["-ar", "44100", "-ac", "2"]),
    "mp3 44.1 kHz stereo": ("mp3", ["-ar", "44100", "-ac", "2", "-b:a", "128k"]),
    "m4a 44.1 kHz stereo": ("m4a", ["-ar", "44100", "-ac", "2", "-b:a", "128k"]),
    "ogg vorbis 44.1 kHz": ("ogg", ["-ar", "44100", "-ac", "2", "-c:a", "libvorbis", "-q:a", "4"]),
    "opus 48 kHz": ("opus", ["-c:a", "libopus", "-b:a", "48k"]),
}
cores = os.cpu_count()


def median(values):
    return sorted(values)[len(values) // 2]


def timed(command, **options):
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    return time.perf_counter() - started


def job(folder, name, model, files, extra=""):
    rows = "".join(json.dumps({"id": f"{place}", "audio": str(file)}) + "\n" for place, file in enumerate(files))
    (folder / f"{name}.jsonl").write_text(rows)
    text = f'[job]\noutput = "{name}-out"\n[model]\npath = "{model}"\n[input]\nmanifest = "{name}.jsonl"\n{extra}'
    (folder / f"{name}.toml").write_text(text)
    return [binary, "run", folder / f"{name}.toml", "--fresh", "--progress", "none"]


def media(folder, clips):
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor()
    raw = np.concatenate([clip for _ in range(20) for clip in clips])
    (folder / "raw.f32").write_bytes(raw.astype("<f4").tobytes())
    seconds = len(raw) / 16_000
    print(f"{'4 files of ' + format(seconds, '.0f') + ' s':24} {'mlxbatch':>10} {'ffmpeg':>8} {'+ numpy':>8}  ratio  (times real time, one core)")
    for name, (extension, options) in FORMATS.items():
        files = []
        for copy in range(4):
            file = folder / f"{name.replace(' ', '-')}-{copy}.{extension}"
            raw_input = ["-f", "f32le", "-ar", "16000", "-ac", "1", "-i", folder / "raw.f32"]
            subprocess.run([FFMPEG, "-y", "-loglevel", "error", *raw_input, *options, file], check=True)
            files.append(file)
        ours, theirs, features = [], [], []
        for _ in range(ROUNDS):
            command = job(folder, "media", "fake", files, "[generation]\nmax_tokens = 1\n")
            ours.append(timed(command, env={**os.environ, "RAYON_NUM_THREADS": "1"}))
            total = mels = 0.0
            for file in files:
                started = time.perf_counter()
                convert = [FFMPEG, "-threads", "1", "-loglevel", "error", "-i", file, "-f", "f32le", "-ar", "16000", "-ac", "1", "-"]
                decoded = np.frombuffer(subprocess.run(convert, check=True, capture_output=True).stdout, "<f4")
                total += time.perf_counter() - started
                started = time.perf_counter()
                for at in range(0, len(decoded), 480_000):
                    extractor(decoded[at : at + 480_000], sampling_rate=16_000, return_tensors="np")
                mels += time.perf_counter() - started
            theirs.append(total)
            features.append(mels)
        real = 4 * seconds
        both = median([a + b for a, b in zip(theirs, features)])
        print(
            f"{name:24} {real / median(ours):10.0f} {real / median(theirs):8.0f} {real / both:8.0f}  {both / median(ours):5.2f}", flush=True
        )
        if name == "mp3 44.1 kHz stereo":
            one = median(ours)
            all_cores = median([timed(job(folder, "media", "fake", files, "[generation]\nmax_tokens = 1\n")) for _ in range(ROUNDS)])
            print(f"  on {cores} cores {all_cores:.2f} s, the work of one core over them {one / cores:.2f} s: {all_cores * cores / one:.2f}")


def end_to_end(folder, paths):
    files = [path for _ in range(CLIP_TIMES) for path in paths]
    listed = folder / "clips.json"
    listed.write_text(json.dumps([str(file) for file in files]))
    mlx_whisper = f"""
import json, sys, types, wave
sys.modules["numba"] = types.SimpleNamespace(jit=lambda *a, **o: lambda f: f)
sys.modules["scipy"] = types.SimpleNamespace(signal=None)
import numpy as np, mlx_whisper
for path in json.load(open({str(listed)!r}))[:{len(paths)}]:
    with wave.open(path) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
    mlx_whisper.transcribe(samples, path_or_hf_repo={str(models / "whisper-tiny.en")!r}, fp16=DTYPE)
"""
    faster = f"""
import json
from faster_whisper import WhisperModel
model = WhisperModel({str(models / "whisper-tiny.en-ct2")!r}, device="cpu", compute_type=TYPE, cpu_threads={cores})
for path in json.load(open({str(listed)!r})):
    segments, _ = model.transcribe(path, beam_size=1, language="en")
    list(segments)
"""
    environment = {**os.environ, "PYTHONPATH": peers, "OMP_NUM_THREADS": str(cores)}
    runs = {"mlxbatch, 16 rows": lambda: timed(job(folder, "e2e", models / "whisper-tiny.en", files, "[batching]\nrows = 16\n"))}
    runs["mlxbatch, 1 row"] = lambda: timed(job(folder, "e2e", models / "whisper-tiny.en", files, "[batching]\nrows = 1\n"))
    runs["mlx-whisper, float32"] = lambda: timed([sys.executable, "-c", mlx_whisper.replace("DTYPE", "False")])
    runs["mlx-whisper, float16 (its default)"] = lambda: timed([sys.executable, "-c", mlx_whisper.replace("DTYPE", "True")])
    if peers != "-":
        for kind in ("float32", "int8"):
            runs[f"faster-whisper, {kind}"] = lambda kind=kind: timed(
                [sys.executable, "-c", faster.replace("TYPE", repr(kind))], env=environment
            )
    times = {}
    for name, run in runs.items():
        # mlx-whisper takes minutes: each clip once is what there is time for.
        times[name] = [run() for _ in range(1 if name.startswith("mlx-whisper") else ROUNDS)]
        per_clip = median(times[name]) / (len(paths) if name.startswith("mlx-whisper") else len(files))
        of_ours = median(times["mlxbatch, 16 rows"]) / len(files)
        print(f"{name:36} {per_clip:7.2f} s a clip  {per_clip / of_ours:6.2f} × mlxbatch's time", flush=True)


with tempfile.TemporaryDirectory() as temporary:
    paths = sorted((models / "speech").glob("*.wav"))
    clips = []
    for path in paths:
        with wave.open(str(path)) as file:
            clips.append(np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768)
    if "--media" in sys.argv or "--end-to-end" not in sys.argv:
        media(pathlib.Path(temporary), clips)
    if "--end-to-end" in sys.argv or "--media" not in sys.argv:
        end_to_end(pathlib.Path(temporary), paths)
