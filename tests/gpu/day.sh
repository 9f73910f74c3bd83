#!/usr/bin/env bash
# One part of the first day on a GPU: tests/gpu/day.sh dry|1|2|...|7 [DIRECTORY]. docs/develop/gpu-day.md explains them.
# The first parts validate the most. Each part first prints how long it takes: parts 1 to 6 take at most 44 minutes
# together. Part `dry` needs no GPU, and has to run before the others. PYTHON names the interpreter,
# .venv/bin/python by default.
# Exit status: 1 if a check did not hold or a dry run failed, otherwise 3 if a check was not seen; 2 if the part
# cannot run here.
set -u
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python} part=${1:-} out=${2:-out}
gpu=${CUDA_VISIBLE_DEVICES-0}
gpu=${gpu%%,*} # the first GPU, on which the cases run
measure=("$python" -m pytest -q -W default -p no:cacheprovider --perf-baselines=none --perf-wait-quiet=0)
perfsuite=("$python" -c 'from perfsuite.cli.app import app; app()')
day=tests/gpu/test_day.py
DRY_MIN=2 # minutes of a dry run of one case, for part `dry`
status=0

refuse() {
    echo "tests/gpu/day.sh: $*" >&2
    exit 2
}

say() { printf '\n=== %s\n' "$*"; }
begin() { say "part $part takes at most $1 minutes"; }
expect() { say "$2"; "$python" -m tests.gpu.held expect "$1"; }
held() { answered "$("$python" -m tests.gpu.held "$@")"; }

# Prints and keeps an answer. Anything that is neither HELD nor NOT HELD was not seen.
answered() {
    printf '%s\n' "$1" | tee -a "$out/held.txt"
    case "$1" in
    HELD*) ;;
    "NOT HELD"*) status=1 ;;
    *) [ $status -eq 1 ] || status=3 ;;
    esac
}

case "$part" in
dry | [1-7]) ;;
*) refuse "name a part, dry or 1 to 7; got '$part'" ;;
esac
"$python" -c 'from importlib.metadata import version; version("perfsuite"); import pytest, perfsuite.cli.app' \
    > /dev/null 2>&1 || refuse "perfsuite is not installed for $python: run make .venv/installed"
if [ "$part" != dry ]; then
    command -v nvidia-smi > /dev/null || refuse "part $part needs a GPU, and there is no nvidia-smi in PATH"
    nvidia-smi -L 2> /dev/null | grep -q '^GPU ' || refuse "part $part needs a GPU, and nvidia-smi -L lists none"
    case "$gpu" in
    "" | -*) refuse "part $part needs a GPU, and CUDA_VISIBLE_DEVICES='$CUDA_VISIBLE_DEVICES' hides every GPU" ;;
    esac
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)

# Agents, and the servers from which they fork ranks. Other programs can have "perfsuite" in their command line.
agents() { pgrep -u "$(id -u)" -af -- "(-m |\[')perfsuite\.(node|worker)"; }

case "$part" in
dry)
    cases=18
    processes=$(($(nproc) / 2))
    [ $processes -le $cases ] || processes=$cases
    "$python" -c 'import xdist' > /dev/null 2>&1 && [ $processes -gt 1 ] || processes=1
    minutes=$(((cases + processes - 1) / processes * DRY_MIN))
    say "part dry takes about $minutes minutes, with $processes of the $(nproc) cores, and uses no GPU"
    say "what part 2 should count"
    [ $processes -eq 1 ] || measure+=(--numprocesses=$processes --benchmark-disable)
    "${measure[@]}" $day -k wide --perf-dry --perf-json "$out/dry-new.json"
    ended=$?
    [ $ended -eq 0 ] || status=1
    # An interrupted part has to be repeated.
    [ $ended -gt 1 ] || [ ! -e "$out/dry-new.json" ] || mv "$out/dry-new.json" "$out/dry.json"
    ;;
1)
    begin 6
    say "what the machine is"
    nvidia-smi -q -d POWER,CLOCK,PERFORMANCE,ECC | head -80
    expect rows "the doctor, to its end"
    timeout 240 "${perfsuite[@]}" doctor --json > "$out/doctor.json"
    held rows "$out/doctor.json"
    expect recorded "does it run"
    timeout 110 "${measure[@]}" $day -k smoke --perf-record-launches=1 --perf-json "$out/smoke.json"
    held recorded "$out/smoke.json"
    ;;
2)
    begin 8
    expect recorded "every code path once"
    for check in losses memory compiled fp32; do expect $check "every code path once"; done
    timeout 480 "${measure[@]}" $day -k wide --perf-record-launches=1 \
        --perf-json "$out/wide.json" --perf-report "$out"
    for check in recorded losses memory compiled fp32; do held $check "$out/wide.json"; done
    expect as-dry "the same work as in dry runs"
    held as-dry "$out/wide.json" "$out/dry.json"
    expect peak-as-dry "the same peak memory as in dry runs"
    held peak-as-dry "$out/wide.json" "$out/dry.json"
    ;;
3)
    begin 9
    expect recorded "torchtitan, float8, quantization, FlashAttention, Mamba and DeepSpeed"
    timeout 540 "${measure[@]}" $day -k libraries --perf-record-launches=1 --perf-json "$out/libraries.json"
    held recorded "$out/libraries.json"
    expect graphs "CUDA graphs, with and without gradient accumulation"
    held graphs "$out/libraries.json"
    ;;
4)
    begin 8
    expect rows "the gate tests itself"
    timeout 480 "${perfsuite[@]}" selftest --json > "$out/selftest.json"
    held rows "$out/selftest.json"
    ;;
5)
    begin 8
    expect caches "compilation with cold and warm caches"
    directory=$(mktemp -d "$out/caches.XXXXXX") # a new directory: cold caches are empty
    for launch in 1 2 3; do
        TORCHINDUCTOR_CACHE_DIR=$directory/caches/$launch TRITON_CACHE_DIR=$directory/caches/$launch timeout 60 \
            "${measure[@]}" $day -k compiled --perf-record-launches=1 --perf-json "$directory/cold/$launch.json" \
            --perf-store "$directory/caches/cold-$launch"
        TORCHINDUCTOR_CACHE_DIR=$directory/caches/1 TRITON_CACHE_DIR=$directory/caches/1 timeout 50 \
            "${measure[@]}" $day -k compiled --perf-record-launches=1 --perf-json "$directory/warm/$launch.json" \
            --perf-store "$directory/caches/warm-$launch"
    done
    held caches "$directory/cold" "$directory/warm"
    expect sampler "the cost of the health sampler"
    timeout 150 "${measure[@]}" $day -k noise --perf-max-pairs=3 --perf-json "$out/sampler.json" \
        --perf-against="PYTHONPATH=$PWD/tests/gpu/no_sampler:${PYTHONPATH:-}"
    held sampler "$out/sampler.json"
    ;;
6)
    begin 5
    say "a baseline: changed clocks are only listed against one"
    timeout 60 "${measure[@]}" $day -k noise --perf-record-launches=1 --perf-max-launches=1 \
        --perf-json "$out/before.json"
    expect free "what SIGKILL of pytest leaves"
    agents > "$out/others.txt"
    "${measure[@]}" $day -k noise &
    session=$!
    sleep 20
    kill -9 $session
    sleep 6
    {
        nvidia-smi -i "$gpu" --query-gpu=memory.used --format=csv,noheader
        agents | grep -vxFf "$out/others.txt"
    } > "$out/killed.txt"
    cat "$out/killed.txt"
    held free "$out/killed.txt"
    expect oom "out of memory"
    timeout 60 "${measure[@]}" $day -k oom --perf-record-launches=1 --perf-json "$out/oom.json"
    held oom "$out/oom.json"
    expect unhealthy "a stranger on the GPU"
    "$python" -c "import torch, time; x = torch.ones(2 << 30, dtype=torch.uint8, device='cuda'); time.sleep(60)" &
    stranger=$!
    timeout 60 "${measure[@]}" $day -k noise --perf-max-launches=1 --perf-json "$out/stranger.json"
    kill $stranger 2> /dev/null
    wait $stranger
    held unhealthy "$out/stranger.json"
    trap 'nvidia-smi -i "$gpu" --reset-gpu-clocks' EXIT
    trap 'exit 130' INT TERM # which runs the trap of EXIT
    if nvidia-smi -i "$gpu" --lock-gpu-clocks=900; then
        expect locked "locked clocks"
        timeout 60 "${measure[@]}" $day -k noise --perf-max-launches=1 --perf-json "$out/locked.json"
        held locked "$out/locked.json"
    else
        trap - EXIT
        answered "NOT SEEN (locked): the clocks cannot be locked by this user"
    fi
    ;;
7)
    begin 13
    expect trends "growth, the start-up and the wait for data"
    timeout 60 "${measure[@]}" $day -k trends --perf-record-launches=1 --perf-json "$out/trends.json"
    held trends "$out/trends.json"
    expect quiet "how noisy is it"
    timeout 200 "${measure[@]}" $day -k noise --perf-record-launches=5 --perf-json "$out/noise.json"
    held quiet "$out/noise.json"
    expect slower "a slowdown of 5%"
    timeout 100 "${measure[@]}" $day -k noise --perf-inject=slowdown=5% --perf-json "$out/slower.json"
    held slower "$out/slower.json"
    expect clock "is the clock true"
    timeout 120 "$python" -m tests.gpu.clock ddp | tee "$out/clock.txt"
    held clock "$out/clock.txt"
    expect llamas "the Llamas of the suite"
    timeout 290 "${measure[@]}" bench_cases/test_llama.py --perf-record-launches=1 \
        --perf-json "$out/llama.json" --perf-report "$out"
    held llamas "$out/llama.json"
    ;;
esac
if [ -d .perfsuite ]; then
    tar --exclude='*.pt' -czf "$out/part-$part.tgz" .perfsuite
fi
exit $status
