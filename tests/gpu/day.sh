#!/usr/bin/env bash
# One part of the first day on a GPU: tests/gpu/day.sh 1|2|3|4 [DIRECTORY]. docs/develop/gpu-day.md says what to expect.
# Each part is whole and ends within ten minutes. PYTHON names the interpreter, .venv/bin/python by default.
set -u
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python} out=${2:-out}
measure=("$python" -m pytest -q -W default -p no:cacheprovider --perf-baselines=none --perf-wait-quiet=0)
perfsuite=("$python" -c 'from perfsuite.cli.app import app; app()')
day=tests/gpu/test_day.py

say() { printf '\n=== %s\n' "$*"; }

case "${1:-}" in
1)
    say "what the machine is"
    nvidia-smi -q -d POWER,CLOCK,PERFORMANCE,ECC | head -80
    "${perfsuite[@]}" doctor --quick
    say "does it run"
    timeout 90 "${measure[@]}" $day -k smoke --perf-record-launches=1
    say "is the clock true"
    timeout 120 "$python" -m tests.gpu.clock ddp
    timeout 120 "$python" -m tests.gpu.clock fsdp2
    say "how noisy is it"
    timeout 200 "${measure[@]}" $day -k noise --perf-record-launches=5 --perf-json "$out/noise.json"
    timeout 60 "${measure[@]}" $day -k noise
    timeout 100 "${measure[@]}" $day -k noise --perf-inject=slowdown=5%
    ;;
2)
    say "every code path once"
    timeout 580 "${measure[@]}" $day -k wide --perf-record-launches=1 \
        --perf-json "$out/wide.json" --perf-report "$out"
    ;;
3)
    say "out of memory"
    timeout 60 "${measure[@]}" $day -k oom --perf-record-launches=1
    say "what SIGKILL of pytest leaves"
    "${measure[@]}" $day -k noise &
    session=$!
    sleep 20
    kill -9 $session
    for _ in 1 2 3 4 5 6; do
        nvidia-smi --query-gpu=memory.used --format=csv,noheader
        sleep 1
    done
    pgrep -af perfsuite
    say "a stranger on the GPU"
    "$python" -c "import torch, time; x = torch.ones(2 << 30, dtype=torch.uint8, device='cuda'); time.sleep(90)" &
    timeout 95 "${measure[@]}" $day -k noise
    wait
    say "the doctor"
    timeout 240 "${perfsuite[@]}" doctor
    ;;
4)
    say "the gate tests itself"
    timeout 300 "${perfsuite[@]}" selftest
    say "the Llamas of the suite"
    timeout 290 "${measure[@]}" bench_cases/test_llama.py --perf-record-launches=1 \
        --perf-json "$out/llama.json" --perf-report "$out"
    ;;
*)
    echo "tests/gpu/day.sh: name a part, 1 to 4; got '${1:-}'" >&2
    exit 2
    ;;
esac
mkdir -p "$out"
tar --exclude='*.pt' -czf "$out/part-$1.tgz" .perfsuite
