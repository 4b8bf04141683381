#!/usr/bin/env bash
# Measures mlxbatch, mlx-lm and transformers on the same prompts and weights, on the GPU machine that stage.sh packed for.
#
#     run.sh [WORKLOAD:ROWS[:PROMPTS] ...]
#
# WORKLOAD is a, b, c or d of docs/benchmarks.md; or `step`: as many prompts as rows, of 416 tokens and 64 new ones each, for a look at
# decode steps at 448 tokens of context. With a 4 behind it (a4, step4) weights have 4 bits, which transformers does not read.
#
# The halves that stage.sh made lie in the folders `a` and `b`, one of which holds this script. Where one is missing, the other is
# kept in $WORK and nothing is measured: so they may come one after the other. The folders `c`, `d` and `e`, which only workload d needs,
# are kept in the same way.
#
# `media:ROWS[:PROMPTS]` captions photographs and describes recordings, those in the folder `media` of the halves, with a Gemma 4 of E2B's
# sizes and random weights (random_gemma4.py): mlxbatch alone, whose table says what towers and stages take.
#
# Results go to $OUT/results.jsonl, an object a program and workload; compare.py makes tables of it. Variables:
#   WORK      where all is unpacked                                            /tmp/mlxbatch-gpu
#   OUT       where results go                                                 $WORK/out
#   PROGRAMS  which, in this order                                             mlxbatch mlx_lm transformers
#   REPEAT    runs that count, after one that does not                         3
#   LIMIT     seconds for one program on one workload, its loading included    100
#   TOTAL     seconds after which all ends                                     560
#   FLAGS     more options for mlxbatch bench
#   MODEL     shape of the model: `large`, or `tiny`, to try the scripts        large
#   DEVICE    `gpu`, or `cpu`, to try the scripts                              gpu
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
WORK=${WORK:-/tmp/mlxbatch-gpu}
OUT=${OUT:-$WORK/out}
PROGRAMS=${PROGRAMS:-mlxbatch mlx_lm transformers}
REPEAT=${REPEAT:-3} LIMIT=${LIMIT:-100} TOTAL=${TOTAL:-560} FLAGS=${FLAGS:-} MODEL=${MODEL:-large} DEVICE=${DEVICE:-gpu}
pieces=${*:-a:64 a:256 a:1:8 b:256 c:256 b:64 c:64 a:8:32}

mkdir -p "$WORK" "$OUT" && WORK=$(cd "$WORK" && pwd) && OUT=$(cd "$OUT" && pwd) || exit 1
for half in "$here"/../[a-e]; do
  if [ -d "$half" ]; then cp -p "$half"/* "$WORK/"; fi
done
cd "$WORK" || exit 1
for part in part.aa part.ab; do
  [ -s $part ] || { echo "run: $part is still to come; what is here is kept in $WORK"; exit 0; }
done

if [ ! -e env/unpacked ]; then
  rm -rf env && mkdir env && cat part.aa part.ab | tar xJ -C env && python3 -m zipfile -e mlx_lm-*.whl env && touch env/unpacked || exit 1
fi
xz -dcf mlxbatch.xz >mlxbatch && chmod +x mlxbatch && cp libmlxc.so libmlxblas.so env/mlx/lib/ || exit 1
nvidia=$(python3 -c 'import nvidia, os; print(os.path.join(os.path.dirname(nvidia.__path__[0]), "nvidia"))' 2>/dev/null)
libraries=$WORK/env/mlx/lib:$nvidia/cu13/lib:$nvidia/cudnn/lib:$nvidia/nccl/lib:${LD_LIBRARY_PATH:-}
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
# Each length of attention costs MLX a plan, of which it keeps 256 and then fails.
export MLX_CUDA_SDPA_CACHE_SIZE=${MLX_CUDA_SDPA_CACHE_SIZE:-8192}
with_mlx() { LD_LIBRARY_PATH=$libraries PYTHONPATH=$WORK/env "$@"; }

[ "$DEVICE" = cpu ] || nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
if [ ! -e "$MODEL/config.json" ] || [ ! -e "$MODEL-4bit/config.json" ]; then
  with_mlx python3 make_model.py "$MODEL" "$MODEL" --quantized "$MODEL-4bit" || exit 1
fi

# Workload d: recordings, by a script of their own.
speech() {
  local rows=$1 windows=${2:-512} program status
  if [ ! -e whisper/weights.safetensors ]; then
    for part in whisper.aa whisper.ab whisper.ac clips.tar; do
      [ -s $part ] || { echo "run: $part has not come, so d:$rows is left out"; return; }
    done
    mkdir -p whisper clips && cat whisper.aa whisper.ab whisper.ac | tar x -C whisper && tar xf clips.tar -C clips || return
  fi
  rm -rf windows && python3 speech.py windows clips windows --windows "$windows" || return
  for program in $PROGRAMS; do
    [ "$program" = mlx_lm ] && continue
    [ "$SECONDS" -lt "$TOTAL" ] || { echo "run: $TOTAL s are over; $program on d:$rows is left out"; continue; }
    echo "== d:$rows $program, at $SECONDS s"
    case $program in
      mlxbatch) with_mlx timeout -k 5 "$LIMIT" python3 speech.py mlxbatch ./mlxbatch whisper windows --rows "$rows" \
        --repeat "$REPEAT" --device "$DEVICE" --result "$OUT/d-$program.json" ;;
      *) timeout -k 5 "$LIMIT" python3 speech.py "$program" whisper windows --rows "$rows" --repeat "$REPEAT" --device "$DEVICE" \
        --result "$OUT/d-$program.json" ;;
    esac 2>errors.txt
    status=$?
    grep -E "windows/s" errors.txt | tail -n 4
    [ "$status" = 0 ] || { echo "run: status $status (124: out of time)"; tail -n 15 errors.txt; }
  done
  [ -s "$OUT/d-mlxbatch.json.texts" ] && [ -s "$OUT/d-transformers.json.texts" ] &&
    echo "texts that are the same: $(comm -12 "$OUT/d-mlxbatch.json.texts" "$OUT/d-transformers.json.texts" | wc -l) of $windows"
}

# What a program does on one workload; its result goes into the file $result.
measure() {
  local program=$1 weights=$2 rows=$3
  case $program in
    mlxbatch)
      # shellcheck disable=SC2086 # options are words
      with_mlx timeout -k 5 "$seconds" ./mlxbatch bench "$weights" --load workload.json --rows "$rows" --repeat "$REPEAT" \
        --device "$DEVICE" --outputs ours.json --json $FLAGS >"$result" ;;
    mlx_lm)
      with_mlx timeout -k 5 "$seconds" python3 peer_mlx_lm.py "$weights" workload.json --rows "$rows" --repeat "$REPEAT" \
        --device "$DEVICE" --outputs theirs.json --result "$result" ;;
    transformers)
      timeout -k 5 "$seconds" python3 peer_transformers.py "$weights" workload.json --rows "$rows" --repeat "$REPEAT" \
        --device "$DEVICE" --outputs theirs.json --result "$result" ;;
    *) echo "run: $program is no program here" >&2; return 1 ;;
  esac
}

# Images and recordings in prompts.
media() {
  local rows=$1 prompts=${2:-64} kind
  if [ ! -e gemma4/config.json ]; then with_mlx python3 random_gemma4.py e2b gemma4 || return; fi
  rm -rf media && mkdir media && tar xf media.tar -C media || return
  for kind in photographs speech; do
    echo "== media:$rows $kind, at $SECONDS s"
    # shellcheck disable=SC2086 # options are words
    with_mlx timeout -k 5 "$LIMIT" ./mlxbatch bench gemma4 --media "media/$kind" --prompts "$prompts" --prompt-tokens 20..20 \
      --new-tokens 32 --rows "1,$rows" --repeat "$REPEAT" --device "$DEVICE" $FLAGS 2>errors.txt | tee "$OUT/media-$kind.txt"
    tail -n 5 errors.txt
  done
}

for piece in $pieces; do
  IFS=: read -r workload rows prompts <<<"$piece"
  if [ "$workload" = d ]; then
    speech "$rows" "$prompts"
    continue
  fi
  if [ "$workload" = media ]; then
    media "$rows" "$prompts"
    continue
  fi
  weights=$MODEL
  name=$workload
  case $name in *4) weights=$MODEL-4bit name=${name%4} ;; esac
  case $name in
    step) recipe="--workload a --prompt-tokens 416..416 --new-tokens 64 --prompts ${prompts:-$rows}" ;;
    *) recipe="--workload $name --prompts ${prompts:-256}" ;;
  esac
  # shellcheck disable=SC2086 # options are words
  with_mlx ./mlxbatch bench "$weights" $recipe --dump workload.json || continue
  rm -f ours.json
  for program in $PROGRAMS; do
    case $program:$weights in transformers:*-4bit) continue ;; esac
    seconds=$((TOTAL - SECONDS < LIMIT ? TOTAL - SECONDS : LIMIT))
    if [ "$seconds" -lt 20 ]; then
      echo "run: of $TOTAL s too few are left; $program on $piece is left out"
      continue
    fi
    result=$WORK/result.json
    rm -f "$result" theirs.json
    echo "== $piece $program, at $SECONDS s"
    measure "$program" "$weights" "$rows" 2>errors.txt
    status=$?
    [ "$status" = 0 ] || { echo "run: status $status (124: out of time)"; tail -n 15 errors.txt; }
    grep -E "warm-up|run [0-9]" errors.txt | tail -n 4
    python3 compare.py add "$OUT/results.jsonl" "$workload" "$rows" "$program" "$status" "$result" ours.json theirs.json
  done
done
[ -s "$OUT/results.jsonl" ] && python3 compare.py table "$OUT/results.jsonl"
